"""Bounds of a request in every service. No valid request comes near a bound."""

MAX_INPUTS = 256  # inputs, requested outputs or parameters
MAX_ELEMENTS = 1 << 40  # elements of one tensor
MAX_CLASSES = 65536  # classes of one row in a classification
MAX_JSON_NESTING = 100  # depth of a JSON "data" array
# protobuf fields; each BYTES element outside raw_input_contents counts as a field
MAX_FIELDS = 1 << 20
MAX_OVERRIDE_FILES = 64  # files of one request to load a model
