"""Commands for a running server: tables, a live view, loading of models."""
