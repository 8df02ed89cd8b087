"""Client memory: registers regions, hands regions to executors, and releases regions."""
