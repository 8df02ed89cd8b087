"""config.pbtxt: text to a checked configuration, and from there to instances."""
