"""Return the sum of a sequence so far."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        given, before = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("INPUT0", "BEFORE")
        )
        total = given + before
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", total), pb_utils.Tensor("AFTER", total)]
        )
