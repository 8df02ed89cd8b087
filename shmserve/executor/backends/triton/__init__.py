"""Triton dialect of model.py, and the module `triton_python_backend_utils` for models.

Each file has one subject. No code here copies a tensor, except with the parameter
`writable_inputs`: a model that writes into its inputs gets counted copies (`InputTensor.private`).
"""
