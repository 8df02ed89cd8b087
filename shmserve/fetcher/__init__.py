"""The process that fetches models of remote repositories into the cache, for the coordinator.

It is the only one that imports fsspec, whose event loops are threads: nothing here forks.
"""
