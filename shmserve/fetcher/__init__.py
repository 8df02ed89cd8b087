"""Fetcher process: fetches models of remote repositories into the cache, for the coordinator. Only
this process imports fsspec. The process must not fork, because fsspec's event loops are
threads."""
