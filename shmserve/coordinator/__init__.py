"""Coordinator: the only writer of the registry (models, regions, budget, settings, statistics)."""
