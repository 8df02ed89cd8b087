"""GRPS projects in the model repository: the contents of their files, and the devices of
instances."""
