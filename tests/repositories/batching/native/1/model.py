"""Adds one to each element, and tells how many rows there were."""

import numpy as np


class Model:
    def infer(self, request):
        raise RuntimeError("with dynamic_batching it is not called")

    def infer_batch(self, batch):
        given = batch.input("IN")
        np.add(given, 1, out=batch.output("OUT", given.shape))
        batch.output("ROWS", (len(given), 1))[:] = len(given)
