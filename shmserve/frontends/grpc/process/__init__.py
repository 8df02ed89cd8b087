"""The gRPC process: its server, listeners and heap."""
