"""The parts of cuda-python that tritonclient's module for CUDA shared memory uses."""
