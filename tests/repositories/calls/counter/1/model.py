"""Counts to N, an answer a number; a negative N fails after as many answers."""

import numpy as np


class Model:
    def infer(self, request):
        count = int(request.input("N")[0])
        for number in range(abs(count)):
            yield {"OUT": np.array([number], np.int32)}
        if count < 0:
            raise ValueError("the counter has lost count")
