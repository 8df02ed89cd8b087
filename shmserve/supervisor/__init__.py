"""Supervisor: starts, adopts and stops the other processes, and keeps descriptors for them."""
