"""Facts on tensors and models for all processes: datatypes, BYTES framing, descriptions."""
