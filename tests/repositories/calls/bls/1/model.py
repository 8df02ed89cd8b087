"""An ordinary model of Triton's dialect that calls other models on command."""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils


def request_for(model, **options):
    inputs = options.pop("inputs", None)
    if inputs is None:
        inputs = [pb_utils.Tensor("X", np.arange(4, dtype=np.float32))]
    return pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=options.pop("outputs", []),
        inputs=inputs,
        **options,
    )


class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        self.x = pb_utils.get_input_tensor_by_name(request, "X")
        command = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0].decode()
        what, _, argument = command.partition(" ")
        result = getattr(self, what)(argument)
        self.x = None
        if isinstance(result, pb_utils.InferenceResponse):
            return result
        text = pb_utils.Tensor("TEXT", np.array([json.dumps(result)], object))
        return pb_utils.InferenceResponse([text])

    def call(self, argument):
        """Pass on the output of another model for X."""
        x = pb_utils.Tensor("X", self.x.as_numpy())
        self.x = None
        response = request_for("worker", inputs=[x], outputs=["Y"]).exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        y = pb_utils.get_output_tensor_by_name(response, "Y")
        if argument == "keep":
            self.kept.append(y)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y.as_numpy())])

    def forget(self, _):
        count = len(self.kept)
        self.kept.clear()
        return count

    def view(self, _):
        """Return the output, and whether the array owns its memory and is writable: uncopied
        worker memory is neither."""
        y = pb_utils.get_output_tensor_by_name(request_for("worker").exec(), "Y").as_numpy()
        return [y.tolist(), bool(y.flags.owndata), bool(y.flags.writeable)]

    def error(self, argument):
        """The error of a call: of which model, with which parameters."""
        model, _, rest = argument.partition(" ")
        response = request_for(model, parameters=json.loads(rest or "{}")).exec()
        assert response.has_error(), response.output_tensors()
        assert response.output_tensors() == []
        return [response.error().code(), response.error().message()]

    def count(self, argument):
        n = pb_utils.Tensor("N", np.array([int(argument)], np.int32))
        found = []
        for response in request_for("counter", inputs=[n]).exec(decoupled=True):
            if response.has_error():
                found.append(response.error().message())
            elif response.output_tensors():  # the last response only ends the stream
                out = pb_utils.get_output_tensor_by_name(response, "OUT")
                found.append(int(out.as_numpy()[0]))
        return found

    def leave(self, argument):
        """Take one response of many."""
        n = pb_utils.Tensor("N", np.array([int(argument)], np.int32))
        for response in request_for("counter", inputs=[n]).exec(decoupled=True):
            return int(response.output_tensors()[0].as_numpy()[0])
        return None

    def gather(self, argument):
        async def ask():
            calls = [
                request_for("worker", inputs=[pb_utils.Tensor("X", np.float32([n]))]).async_exec()
                for n in range(int(argument))
            ]
            return await asyncio.gather(*calls)

        responses = asyncio.run(ask())
        return [float(r.output_tensors()[0].as_numpy()[0]) for r in responses]

    def ready(self, argument):
        return pb_utils.is_model_ready(*argument.split())

    def manage(self, argument):
        """Load a model from files sent with the load request, call and unload the model."""
        code = "class Model:\n  def infer(self, request):\n    return {'Y': 2 * request.input('X')}"
        tensors = {
            kind: [{"name": name, "data_type": "TYPE_FP32", "dims": [-1]}]
            for kind, name in (("input", "X"), ("output", "Y"))
        }
        config = json.dumps({"backend": "python", **tensors})
        try:
            pb_utils.load_model(argument, config, {"file:1/model.py": code.encode()})
        except pb_utils.TritonModelException as ex:
            return str(ex)
        ready = pb_utils.is_model_ready(argument)
        doubled = request_for(argument).exec().output_tensors()[0].as_numpy().tolist()
        pb_utils.unload_model(argument)
        return [ready, doubled, pb_utils.is_model_ready(argument)]

    def circle(self, _):
        """Call the model that calls this model."""
        response = request_for("caller").exec()
        return response.error().message()
