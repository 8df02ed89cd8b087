"""What all processes agree on of tensors and models: datatypes, BYTES framing, descriptions."""
