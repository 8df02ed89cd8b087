"""Requests to ensembles: order of the steps, tensors between them, threads of runs."""
