"""Executor: the process that runs an instance of a model and answers the requests of its peers."""
