"""The gRPC process: its server and listeners, the calls of the inference service, health."""
