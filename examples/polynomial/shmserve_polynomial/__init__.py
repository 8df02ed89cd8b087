"""Polynomials as models: a backend, its folders, and a way to ask them for one number."""
