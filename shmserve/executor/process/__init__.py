"""The executor process: its start, loading of the model, and calls of other models."""
