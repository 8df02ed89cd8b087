"""Inferences over gRPC: one call, and many on one stream."""
