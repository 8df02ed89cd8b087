"""Counts for each sequence, by as many as each request says, with an answer for every step."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            steps, so_far, start, number = (
                int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0])
                for name in ("IN", "SO_FAR", "START", "ID")
            )
            assert number == request.correlation_id()
            assert not (start and so_far)
            sender = request.get_response_sender()
            for total in range(so_far + 1, so_far + steps + 1):
                sender.send(answer(total))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def answer(total):
    tensors = {"SUM": total, "NEXT": total}
    made = [pb_utils.Tensor(k, np.array([[v]], np.int32)) for k, v in tensors.items()]
    made.append(pb_utils.Tensor("PID", np.array([[os.getpid()]], np.int64)))
    return pb_utils.InferenceResponse(made)
