"""Two models of one class; the second one runs in batches and tells how large they were."""

from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.model_infer.inferer import ModelInferer, inferer_register


class AppendInferer(ModelInferer):
    def init(self, path, device=None, args=None):
        super().init(path, device, args)

    def load(self):
        return True

    def infer(self, inp, context):
        if inp.str_data == "fail":
            raise ValueError("the first model failed")
        return GrpsMessage(str_data=f"{inp.str_data}{self._args['text']}")

    def batch_infer(self, inp, contexts):
        if any("poison" in message.str_data for message in inp):
            raise ValueError("the batch failed")
        assert len(inp) == len(contexts)
        return [GrpsMessage(str_data=f"{self.infer(m, None).str_data}/{len(inp)}") for m in inp]


inferer_register.register("append", AppendInferer())
