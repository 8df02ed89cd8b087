"""The Open Inference Protocol's JSON: requests, answers, tensor data."""
