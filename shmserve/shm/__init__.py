"""Shared memory: segments, arenas, pages, clients' regions, and the mappings of a process."""
