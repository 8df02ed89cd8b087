"""Response cache, and calls answered from the cache."""
