"""What the coordinator keeps and publishes: the registry, runtime settings, the checkpoint."""
