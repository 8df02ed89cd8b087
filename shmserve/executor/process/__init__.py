"""Executor process: start, loading of the model, and calls of other models."""
