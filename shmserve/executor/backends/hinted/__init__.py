"""Hinted dialect: a function or class whose type hints describe inputs and outputs."""
