"""Returns its input, written straight into shared memory."""

import numpy as np


class Model:
    def infer(self, request):
        x = request.input("INPUT0")
        np.copyto(request.output("OUTPUT0", x.shape), x)
