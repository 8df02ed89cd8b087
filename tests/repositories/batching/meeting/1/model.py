"""Returns the number of requests in the call, or obeys a command in one of the requests."""

import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request, len(requests)) for request in requests]

    def one(self, request, size):
        given = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()
        command, _, argument = given[0, 0].decode().partition(":")
        if command == "leave":
            os._exit(1)
        if command == "fail":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("as it was told"))
        if command == "hold":
            open(f"{argument}.begun", "w").close()
            while os.path.exists(argument):
                time.sleep(0.01)
        sizes = np.full((len(given), 1), size, np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SIZE", sizes)])
