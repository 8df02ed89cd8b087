"""Triton dialect of model.py, and the module `triton_python_backend_utils` for models.

Each file has one subject. No code here copies a tensor, except with the parameter
`writable_inputs`. Then inputs are counted copies (`InputTensor.private`), and the outputs of
called models are copied, too.
"""
