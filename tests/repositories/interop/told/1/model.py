"""Return the request's parameters as JSON: they hold the call's metadata."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        text = np.array([request.parameters().encode()], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", text)])
