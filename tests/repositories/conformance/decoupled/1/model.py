"""Answers as often as the input says, counting from 0."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self._answer(request)

    def _answer(self, request):
        times = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        sender = request.get_response_sender()
        for number in range(int(times[0])):
            value = pb_utils.Tensor("OUTPUT0", np.array([number], np.int32))
            sender.send(pb_utils.InferenceResponse([value]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
