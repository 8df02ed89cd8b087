"""What tritonclient's module for CUDA shared memory uses."""
