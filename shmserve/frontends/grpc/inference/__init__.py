"""Inferences over gRPC: single calls, and streams of many inferences."""
