"""Numbers of the service: counts, holdings and usage, for statistics, metrics, history and
tables."""
