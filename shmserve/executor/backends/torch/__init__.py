"""The `pytorch` backend: TorchScript models."""
