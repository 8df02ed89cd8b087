"""As `alone`, with a response sender."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            began = time.monotonic_ns()
            time.sleep(0.002)
            times = np.array([[began, time.monotonic_ns()]], np.int64)
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("TIMES", times)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
