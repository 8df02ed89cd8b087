"""Sum and difference of two vectors."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        left, right = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("INPUT0", "INPUT1")
        )
        results = {"OUTPUT0": left + right, "OUTPUT1": left - right}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in results.items()]
        )
