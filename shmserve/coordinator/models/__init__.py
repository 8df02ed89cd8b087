"""Models of the repository: choice of the models to run, loading and unloading on request."""
