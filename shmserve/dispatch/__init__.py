"""Dispatch: the only way for frontends to run requests (reserve, send, await, release)."""
