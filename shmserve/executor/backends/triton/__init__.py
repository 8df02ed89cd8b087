"""Triton dialect of model.py, and the module `triton_python_backend_utils` for models.

Each file has one subject. No code here copies a tensor, with one exception: models that write into
inputs get copies, which are counted (`InputTensor.private`, parameter `writable_inputs`).
"""
