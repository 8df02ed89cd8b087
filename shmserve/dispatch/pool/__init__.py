"""Executor pools: a frontend's connections to executors, the choice of an executor, and memory
offered to executors."""
