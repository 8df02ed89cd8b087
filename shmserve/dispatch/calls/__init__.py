"""Calls: requests through the data plane, with attempts, retries and counting."""
