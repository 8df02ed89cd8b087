"""Asks the model that each request names twice at once, and gives one output of each answer."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0]
            inputs = [
                pb_utils.get_input_tensor_by_name(request, tensor)
                for tensor in ("INPUT0", "INPUT1")
            ]
            calls = [
                pb_utils.InferenceRequest(
                    model_name=name.decode("utf-8"), requested_output_names=[output], inputs=inputs
                ).async_exec()
                for output in ("OUTPUT0", "OUTPUT1")
            ]
            answers = await asyncio.gather(*calls)
            for answer in answers:
                if answer.has_error():
                    raise pb_utils.TritonModelException(answer.error().message())
            tensors = [
                pb_utils.get_output_tensor_by_name(answer, output)
                for answer, output in zip(answers, ("OUTPUT0", "OUTPUT1"), strict=True)
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
