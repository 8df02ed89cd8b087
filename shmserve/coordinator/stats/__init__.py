"""What the service counts, holds and uses, for statistics, metrics, tables and the page."""
