"""Python models: choose the dialect of a model.py."""
