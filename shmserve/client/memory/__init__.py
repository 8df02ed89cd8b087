"""Memory that a client shares with its server: blocks of the host's and of GPUs."""
