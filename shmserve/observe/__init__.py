"""What a process tells of itself and its machine: logs, CPU and memory, connections, GPUs."""
