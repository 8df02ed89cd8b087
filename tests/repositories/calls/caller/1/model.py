"""A native model that calls the model named by its parameters, otherwise the model that calls this
model."""

import numpy as np


class Model:
    def infer(self, request):
        x = request.input("X")
        model = request.parameters.get("model", "bls")
        if model == "counter":
            n = np.array([len(x)], np.int32)
            numbers = [a["OUT"][0] for a in request.call_stream("counter", {"N": n})]
            return {"Y": np.array(numbers, np.float32)}
        if model == "bls":
            request.call("bls", {"COMMAND": np.array(["view"], object)})
            return {"Y": x}
        own = {k: v for k, v in request.parameters.items() if k == "do"}
        return request.call(model, {"X": x}, outputs=("Y",), parameters=own)
