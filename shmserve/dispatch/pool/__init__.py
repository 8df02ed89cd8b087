"""Executors as one frontend process sees them: connections, their choice, memory named to them."""
