"""GRPS projects in the model repository: reading of files, and instances on devices."""
