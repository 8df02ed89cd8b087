"""Core: decisions and counts of all processes, as plain objects without system calls, threads or
clocks."""
