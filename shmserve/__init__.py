"""shmserve: a model server on a zero-copy shared-memory data plane."""

__version__ = "0.2.0"
