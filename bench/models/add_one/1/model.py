"""Adds 1, from its input's memory into its output's."""

import numpy as np


class Model:
    def infer(self, request):
        source = request.input("IN")
        np.add(source, np.float32(1), out=request.output("OUT", source.shape))
