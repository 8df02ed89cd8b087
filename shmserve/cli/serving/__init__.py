"""Commands for setting up, starting and replacing a service."""
