import numpy as np


class Model:
    def __init__(self, context):
        pass

    def infer(self, request):
        source = request.input("IN")
        np.copyto(request.output("OUT", source.shape), source)
