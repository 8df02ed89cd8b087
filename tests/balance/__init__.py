"""A real HAProxy before three services."""
