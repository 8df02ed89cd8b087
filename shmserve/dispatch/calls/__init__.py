"""One request through the data plane: attempts at executors, retries, counting."""
