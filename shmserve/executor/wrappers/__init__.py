"""Wrappers: backends around a backend, for sequences and for batches of different shapes."""
