"""Backends around a backend: for sequences, and for requests of a batch that differ in shape."""
