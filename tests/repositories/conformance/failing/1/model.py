"""Fails in a way that the first element chooses; else gives its input back.

1: raises; 2: answers with an error; 3: answers without outputs; 4: ends the process.
"""

import os

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        choice = int(values[0]) if values.size and values[0] in (1, 2, 3, 4) else 0
        if choice == 1:
            raise ValueError("boom raised")
        if choice == 2:
            error = pb_utils.TritonError("boom returned", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        if choice == 3:
            return pb_utils.InferenceResponse([])
        if choice == 4:
            os._exit(3)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)])
