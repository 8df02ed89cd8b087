"""A decoupled model with an `async` execute: the sum of calls that were under way together."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        sender = request.get_response_sender()
        command = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0].decode()
        what, _, argument = command.partition(" ")
        text = await getattr(self, what)(int(argument or 0))
        tensor = pb_utils.Tensor("TEXT", np.array([text], object))
        sender.send(
            pb_utils.InferenceResponse([tensor]),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    async def sum(self, count):
        calls = [self.worker(np.float32([number])) for number in range(count)]
        responses = await asyncio.gather(*calls)
        arrays = [pb_utils.get_output_tensor_by_name(r, "Y").as_numpy() for r in responses]
        return str(float(sum(array[0] for array in arrays)))

    def worker(self, x, **parameters):
        return pb_utils.InferenceRequest(
            model_name="worker",
            requested_output_names=["Y"],
            inputs=[pb_utils.Tensor("X", x)],
            parameters=parameters,
        ).async_exec()

    async def count(self, count):
        request = pb_utils.InferenceRequest(
            model_name="counter",
            requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("N", np.array([count], np.int32))],
        )
        responses = await request.async_exec(decoupled=True)
        # the last response may have no outputs
        outputs = [r.output_tensors() async for r in responses]
        return str([int(tensors[0].as_numpy()[0]) for tensors in outputs if tensors])

    async def hold(self, _):
        """Waits for a call until it is cancelled; what it then has is for the next one."""
        response = await self.worker(np.float32([0]), do="wait")
        return response.error().message() if response.has_error() else "answered"
