"""Facts about tensors and models shared by all processes: datatypes, BYTES framing,
descriptions."""
