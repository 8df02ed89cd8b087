"""Calls: one request through the data plane, with attempts at executors, retries and counting."""
