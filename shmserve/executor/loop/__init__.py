"""Executor loop: schedules requests, runs the model, and sends the answers."""
