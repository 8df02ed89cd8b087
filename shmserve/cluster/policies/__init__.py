"""Decisions of a cluster, without Ray, sockets or a clock: time and reports are arguments."""
