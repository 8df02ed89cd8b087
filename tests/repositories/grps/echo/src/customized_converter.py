"""Checks what comes in, and passes messages on as they are."""

from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.context.context import GrpsContext
from grps_framework.converter.converter import Converter, converter_register
from grps_framework.logger.logger import clogger


class EchoConverter(Converter):
    def init(self, path=None, args=None):
        super().init(path, args)
        clogger.info("converter: path %s, args %s", path, args)

    def preprocess(self, inp: GrpsMessage, context: GrpsContext):
        context.put_user_data("kind", inp.WhichOneof("data_oneof"))
        if inp.str_data == "bad":
            context.set_err_msg("bad words are not echoed")
        return inp

    def postprocess(self, inp, context: GrpsContext) -> GrpsMessage:
        if context.get_user_data("kind") == "str_data":
            return GrpsMessage(str_data=f"{inp.str_data}!")
        out = GrpsMessage()
        out.CopyFrom(inp)
        return out


converter_register.register("your_converter", EchoConverter())
