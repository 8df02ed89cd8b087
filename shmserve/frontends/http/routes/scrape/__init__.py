"""``/metrics``: numbers of the service in Prometheus' text format."""
