"""config.pbtxt: text to a checked configuration, and from the configuration to instances."""
