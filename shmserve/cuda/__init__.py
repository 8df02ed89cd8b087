"""The thin layer over CuPy: devices, memory of other processes, pinned host memory.

Imported by executors whose instance runs on a GPU or whose request names memory of one, by
clients that ask for device arrays, and by `shmserve doctor`; by nobody else.
"""
