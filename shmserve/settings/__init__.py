"""Settings: kind, bounds, default and description of each setting."""
