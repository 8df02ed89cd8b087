"""Counts requests, and their contents, in custom metrics."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        kinds = pb_utils.MetricFamily
        self.families = [
            kinds(name="metered_requests_total", description="Requests", kind=kinds.COUNTER),
            kinds(name="metered_level", description="The last X", kind=kinds.GAUGE),
            kinds(name="metered_sizes", description="All X", kind=kinds.HISTOGRAM),
        ]
        requests, level, sizes = self.families
        labels = {"of": args["model_name"]}
        self.requests, self.level = requests.Metric(labels=labels), level.Metric(labels=labels)
        self.sizes = sizes.Metric(labels=labels, buckets=[1, 10])

    def execute(self, requests):
        responses = []
        for request in requests:
            x = float(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0])
            self.requests.increment(1)
            self.level.set(x)
            self.sizes.observe(x)
            time.sleep(0.02)  # so that concurrent requests go to both instances
            count = pb_utils.Tensor("COUNT", np.array([self.requests.value()]))
            responses.append(pb_utils.InferenceResponse([count]))
        return responses
