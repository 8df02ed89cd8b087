"""JSON of the Open Inference Protocol: requests, answers, tensor data."""
