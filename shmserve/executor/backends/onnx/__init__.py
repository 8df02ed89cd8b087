"""The `onnxruntime` backend."""
