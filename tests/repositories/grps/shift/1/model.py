"""Adds one; an input that begins with a negative number makes the model sleep as many seconds."""

import time

import numpy as np


class Model:
    def infer(self, request):
        a = request.input("A")
        if a.size and a[0] < 0:
            time.sleep(-float(a[0]))
        np.add(a, 1, out=request.output("B", a.shape))
