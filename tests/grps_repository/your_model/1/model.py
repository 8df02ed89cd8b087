"""Answers with the message it gets, which it need not understand."""

import numpy as np


class Model:
    def infer(self, request):
        message = request.input("grps")
        np.copyto(request.output("grps", message.shape), message)
