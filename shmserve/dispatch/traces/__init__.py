"""Traces of sampled requests: stages, trace files, spans."""
