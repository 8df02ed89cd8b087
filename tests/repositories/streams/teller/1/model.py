"""Obeys commands, with response senders as the public documentation shows them."""

import json
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        assert pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.cancelled = 0

    def execute(self, requests):
        for request in requests:
            command = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0]
            what, _, argument = command.decode().partition(":")
            getattr(self, what)(request.get_response_sender(), argument)

    def count(self, sender, argument):
        for i in range(int(argument)):
            sender.send(response(i))
        finish(sender)

    def in_thread(self, sender, argument):
        threading.Thread(target=self.count, args=(sender, argument), daemon=True).start()

    def big(self, sender, argument):
        """Send answers of 1 MiB, until the request is cancelled."""
        threading.Thread(target=self._big, args=(sender, int(argument)), daemon=True).start()

    def _big(self, sender, count):
        data = np.zeros(1 << 20, np.uint8)
        for i in range(count):
            if sender.is_cancelled():
                self.cancelled += 1
                break
            sender.send(response(i, data))
        finish(sender)

    def texts(self, sender, argument):
        """Send texts of the given sizes in bytes, and an empty text."""
        for i, size in enumerate([*map(int, argument.split(",")), 0]):
            text = np.array([b"x" * size], np.object_)
            sender.send(response(i, text=text))
        finish(sender)

    def slowly(self, sender, argument):
        """Send an answer every 50 ms, until the request is cancelled."""
        threading.Thread(target=self._slowly, args=(sender, int(argument)), daemon=True).start()

    def _slowly(self, sender, count):
        for i in range(count):
            if sender.is_cancelled():
                self.cancelled += 1
                break
            sender.send(response(i))
            time.sleep(0.05)
        finish(sender)

    def told(self, sender, argument):
        """How many streams were seen to be cancelled."""
        sender.send(response(self.cancelled), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def pid(self, sender, argument):
        sender.send(response(os.getpid()), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def forget(self, sender, argument):
        for i in range(int(argument)):
            sender.send(response(i))

    def throw(self, sender, argument):
        self.forget(sender, argument)
        raise ValueError("no such luck in /srv/secret/model.py")

    def error(self, sender, argument):
        sender.send(response(0))
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("number 1 is missing")))
        sender.send(response(2))
        finish(sender)

    def silent(self, sender, argument):
        self.kept = sender


def response(number, data=None, text=None):
    tensors = [pb_utils.Tensor("N", np.array([number], np.int64))]
    if data is not None:
        tensors.append(pb_utils.Tensor("DATA", data))
    if text is not None:
        tensors.append(pb_utils.Tensor("TEXT", text))
    return pb_utils.InferenceResponse(output_tensors=tensors)


def finish(sender):
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
