"""Echoes messages; in a stream, word by word."""

import os
import time

from grps_framework.apis import grps_pb2
from grps_framework.context.context import GrpsContext
from grps_framework.logger.logger import clogger
from grps_framework.model_infer.inferer import ModelInferer, inferer_register
from grps_framework.monitor.monitor import app_monitor


class EchoInferer(ModelInferer):
    def init(self, path, device=None, args=None):
        super().init(path, device, args)
        self._greeting = args["greeting"]

    def load(self):
        clogger.info("loaded for %s in %s", self._device, os.getcwd())
        return os.path.isfile("./conf/inference.yml")

    def infer(self, inp, context: GrpsContext):
        app_monitor.inc("echoed", 1)
        if inp.str_data == "raise":
            raise ValueError("cannot echo this, see /etc/echo/rules.py")
        if inp.str_data == "greet":
            return grps_pb2.GrpsMessage(str_data=self._greeting)
        if inp.str_data.startswith("sleep"):
            time.sleep(float(inp.str_data.split()[1]))
        if context.if_streaming():
            self._stream(inp, context)
        return inp

    def _stream(self, inp, context):
        for word in inp.str_data.split():
            if context.if_disconnected():
                return
            if word == "raise":
                raise ValueError("the stream broke")
            if word == "stop":
                context.set_err_msg("the stream was stopped")
                return
            if word == "done":
                context.stream_respond(grps_pb2.GrpsMessage(str_data=word), final=True)
            elif word == "tensor":
                tensor = grps_pb2.GenericTensor(
                    name="t", dtype=grps_pb2.DT_FLOAT32, shape=[2], flat_float32=[1.5, 2.5]
                )
                message = grps_pb2.GrpsMessage()
                message.gtensors.tensors.append(tensor)
                context.stream_respond(message)
            else:
                context.stream_respond_with_postprocess(grps_pb2.GrpsMessage(str_data=word))


inferer_register.register("your_inferer", EchoInferer())
