"""Count from 0 to the first input, exclusive, with a pause of the second input in milliseconds."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count, pause_ms = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()[0]
            sender = request.get_response_sender()
            threading.Thread(target=self._count, args=(sender, count, pause_ms / 1000)).start()

    def _count(self, sender, count, pause_s):
        for number in range(count):
            if sender.is_cancelled():
                break
            tensor = pb_utils.Tensor("OUTPUT0", np.array([[number]], np.int32))
            sender.send(pb_utils.InferenceResponse([tensor]))
            if pause_s:
                time.sleep(pause_s)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
