"""Inferences over HTTP: request bodies into slots, answers out of slots."""
