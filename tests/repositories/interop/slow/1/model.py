"""Return the input after as many milliseconds as the largest input of the batch says."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        time.sleep(max(int(array.max()) for array in given) / 1000)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a)]) for a in given]
