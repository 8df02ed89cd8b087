"""GRPS over HTTP: its routes, and paths of models of their own."""
