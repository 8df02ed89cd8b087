import os

import numpy as np


class Model:
    def __init__(self, context):
        pass

    def infer(self, request):
        return {"OUT": request.input("IN") + 1, "PID": np.array([os.getpid()])}
