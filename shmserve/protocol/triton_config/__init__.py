"""config.pbtxt: text to a checked configuration, and that to what instances need."""
