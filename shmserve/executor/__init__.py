"""Executor: the process that runs an instance of a model on the requests of its peers."""
