"""Adds 1 on the GPU, from the input's memory into the output's memory."""

import numpy as np


class Model:
    device_tensors = True

    def __init__(self, context):
        self._xp = context.xp

    def infer(self, request):
        source = request.input("IN")
        self._xp.add(source, np.float32(1), out=request.output("OUT", source.shape))
