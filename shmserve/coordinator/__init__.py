"""Coordinator: the only process that writes the registry (models, regions, budget, settings,
statistics)."""
