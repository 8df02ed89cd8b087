"""The rpcs besides inference: metadata, control, health, reflection."""
