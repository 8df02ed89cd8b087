"""What a model of sequences gets besides what clients send: control tensors and states."""
