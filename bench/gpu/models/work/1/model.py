"""Goes over the input a given number of times, and answers with one number."""

import numpy as np


class Model:
    device_tensors = True

    def __init__(self, context):
        self._xp = context.xp

    def infer(self, request):
        source = request.input("IN")
        scratch = self._xp.empty_like(source)
        for _ in range(request.parameters["passes"]):
            self._xp.add(source, np.float32(1), out=scratch)
        request.output("OUT", (1,))[...] = source[:1]
