"""Adds up what each sequence sends, in a dictionary of this process alone."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        given, start, ready, end, number = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("IN", "START", "READY", "END", "ID")
        )
        key = request.correlation_id()
        if start[0, 0]:
            self.sums[key] = 0
        self.sums[key] += int(given[0, 0])
        flags = request.flags()
        told = number[0, 0]
        assert key == (told.decode() if isinstance(told, bytes) else told)
        assert ready[0, 0]
        assert start[0, 0] == bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        seen = [[os.getpid(), start[0, 0], end[0, 0], flags]]
        total = np.array([[self.sums[key]]], np.int32)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("SUM", total), pb_utils.Tensor("SEEN", np.array(seen, np.int64))]
        )
