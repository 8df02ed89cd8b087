"""GRPS over HTTP: the routes of GRPS, and the models' own paths."""
