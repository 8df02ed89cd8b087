"""Commands for inspecting settings, models and the host."""
