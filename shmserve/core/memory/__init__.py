"""Memory: slots, their allocator and the pool's budget. Bookkeeping of shared memory, without the
memory."""
