"""The gRPC process: server, listeners and heap."""
