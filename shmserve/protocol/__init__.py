"""What is said on the wire and written in model configurations: parsing, checking, writing."""
