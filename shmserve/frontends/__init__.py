"""Frontends: HTTP and gRPC servers, and the handling of requests before dispatch that both use."""
