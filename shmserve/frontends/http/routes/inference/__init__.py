"""Inferences over HTTP: bodies into slots, answers out of slots."""
