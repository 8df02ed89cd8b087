"""Adds 1 in place of the output, after as many seconds as the parameter `wait` says."""

import time

import numpy as np


class Model:
    def infer(self, request):
        source = request.input("IN")
        target = request.output("OUT", source.shape)
        time.sleep(float(request.parameters.get("wait", 0)))
        np.add(source, np.float32(1), out=target)
