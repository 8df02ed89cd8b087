"""``shmserve measure``: requests to one model over each way to it, timed."""
