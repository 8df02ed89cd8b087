"""Inputs and outputs of a request: slots, client regions, device memory."""
