"""Polynomials as models: a backend, a folder reader, and requests with a single number."""
