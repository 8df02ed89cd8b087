"""Shared memory itself: segments, arenas, pages, clients' regions, and what is mapped of them."""
