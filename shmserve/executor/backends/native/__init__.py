"""Native dialect of model.py."""
