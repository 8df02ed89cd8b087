"""Ensembles: order of steps, tensors between steps, and threads of a request to an ensemble."""
