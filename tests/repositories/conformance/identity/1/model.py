"""Returns the input."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", given.as_numpy())])
