"""Wire formats and model configurations: parsing, checking, writing."""
