"""The response cache, and calls that ask the cache first."""
