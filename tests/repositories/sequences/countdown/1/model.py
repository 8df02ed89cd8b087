"""Runs each request COUNT times, and reports each run or the last run. A request with the
parameter `hold` waits in the first run; only requests with COUNT of equal shape run together.

SEEN: number of the run, whether the run is the first, the request's flags, number of requests run
together.
"""

import json
import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def value(request, name):
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0])


def hold(path):
    if path and os.path.exists(path):
        open(f"{path}.begun", "w").close()
        while os.path.exists(path):
            time.sleep(0.01)


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)

    def execute(self, requests):
        for request in requests:
            hold(json.loads(request.parameters()).get("hold"))
        time.sleep(0.01)
        answers = [self.step(request, len(requests)) for request in requests]
        return None if self.decoupled else answers

    def step(self, request, together):
        count, runs = value(request, "COUNT"), value(request, "RUNS") + 1
        assert value(request, "ID") == request.correlation_id()
        if count < 0 and runs + count == 0:
            raise ValueError("as it was told")
        seen = np.array([[runs, value(request, "START"), request.flags(), together]], np.int32)
        state = pb_utils.Tensor("RUNS_NEXT", np.array([[runs]], np.int32))
        is_last = runs == count
        if not is_last:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if not (is_last or self.decoupled):
            return pb_utils.InferenceResponse([state])
        response = pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", seen), state])
        if not self.decoupled:
            return response
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
        request.get_response_sender().send(response, final)
        return None
