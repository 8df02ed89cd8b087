"""GRPS projects in the model repository: reads the project files, and places instances on
devices."""
