"""PyTorch backend (`pytorch`): TorchScript models."""
