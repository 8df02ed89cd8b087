"""The executor's loop: which requests run next, how the model runs them, and their answers."""
