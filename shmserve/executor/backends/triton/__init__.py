"""The Triton dialect of model.py, and what it imports as `triton_python_backend_utils`."""
