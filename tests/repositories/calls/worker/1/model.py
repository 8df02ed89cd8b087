"""Adds one, fails, takes time, or is killed, as the parameters demand."""

import os
import signal
import time

import numpy as np


class Model:
    def infer(self, request):
        what = request.parameters.get("do", "")
        if what == "fail":
            raise ValueError("the worker did not like it")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "wait":
            while not request.cancelled:
                time.sleep(0.01)
        x = request.input("X")
        np.add(x, 1, out=request.output("Y", x.shape))
