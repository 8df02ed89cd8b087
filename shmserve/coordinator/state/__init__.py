"""State of the coordinator: the published registry, runtime settings, and the checkpoint."""
