"""ONNX Runtime backend (`onnxruntime`)."""
