"""The native dialect of model.py."""
