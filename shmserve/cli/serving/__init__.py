"""Commands that set up, start and replace a service."""
