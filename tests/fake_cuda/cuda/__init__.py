"""A small part of NVIDIA's cuda-python, on the same fake driver as the fake CuPy."""
