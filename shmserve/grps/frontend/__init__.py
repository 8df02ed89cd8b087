"""GRPS over HTTP and gRPC: payloads, names of models, metadata, the online flag."""
