"""Bounds of a request that hold in every service: no valid request comes near them."""

MAX_INPUTS = 256  # inputs, requested outputs or parameters
MAX_ELEMENTS = 1 << 40  # of one tensor
MAX_CLASSES = 65536  # of one row, in a classification
MAX_JSON_NESTING = 100  # depth of a JSON "data" array
MAX_FIELDS = 1 << 20  # protobuf fields; each BYTES element outside raw_input_contents is one
MAX_OVERRIDE_FILES = 64  # files that come with a request to load a model
