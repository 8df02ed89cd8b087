import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Adds one to host tensors: the default of a model on a GPU."""

    def initialize(self, args):
        assert args["model_instance_kind"] == "GPU"
        assert args["model_instance_device_id"] == "0"

    def execute(self, requests):
        answers = []
        for request in requests:
            source = pb_utils.get_input_tensor_by_name(request, "IN")
            assert source.is_cpu()
            made = pb_utils.Tensor("OUT", source.as_numpy() + 1)
            answers.append(pb_utils.InferenceResponse([made]))
        return answers
