"""Slots, their allocator and the pool's budget: bookkeeping of shared memory, without memory."""
