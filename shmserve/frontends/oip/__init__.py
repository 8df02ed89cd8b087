"""Operations of the Open Inference Protocol, shared by HTTP and gRPC."""
