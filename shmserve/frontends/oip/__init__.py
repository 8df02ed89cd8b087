"""The Open Inference Protocol's operations, whichever of HTTP and gRPC they came by."""
