"""Scheduling: order of requests, flow control of streams, wiring of ensembles and pipelines."""
