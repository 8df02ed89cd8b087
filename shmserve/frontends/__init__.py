"""What clients speak to: HTTP and gRPC, and what both do with a request before dispatch."""
