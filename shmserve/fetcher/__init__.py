"""Fetcher process: fetches models of remote repositories into the cache, for the coordinator. Only
this process imports fsspec, whose event loops run in threads, so this process must not fork."""
