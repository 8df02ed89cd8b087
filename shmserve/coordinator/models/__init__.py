"""Models of the repository: which should run, loading and unloading on request."""
