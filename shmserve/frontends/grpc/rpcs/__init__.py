"""Rpcs besides inference: metadata, control, health, reflection."""
