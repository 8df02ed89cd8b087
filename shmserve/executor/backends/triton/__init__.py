"""The Triton dialect of model.py, and what it imports as `triton_python_backend_utils`.

One file a subject. Nothing here copies a tensor, but for a model that asks for
`InputTensor.private` because it writes into its inputs; that copy is counted.
"""
