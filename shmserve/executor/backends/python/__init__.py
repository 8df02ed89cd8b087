"""Models in Python: chooses the dialect of a model.py."""
