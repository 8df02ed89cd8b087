"""Observation of a process and the machine: logs, CPU and memory, connections, GPUs."""
