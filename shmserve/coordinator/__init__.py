"""The process that alone writes the registry: models, regions, budget, settings, statistics."""
