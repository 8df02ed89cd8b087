"""gRPC rivals in one process: ``python -m bench.rivals.grpc_server ADDRESS``.

`Pickle` is what a tutorial leads to: generated messages, the tensor handed to a model process
through multiprocessing queues and back. `Empty` takes bytes and answers with bytes: what
grpcio's synchronous server costs by itself.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from bench.rivals.model_process import Model
from shmserve._generated import grpc_service_pb2 as pb

THREADS = 16
UNBOUNDED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Pickle:
    """ModelInfer over a pickling queue."""

    def __init__(self):
        self._model = Model()

    def infer(self, request, context):
        tensor = np.frombuffer(request.raw_input_contents[0], dtype="<f4")
        result = self._model.ask("identity", tensor)
        output = pb.ModelInferResponse.InferOutputTensor(
            name="OUTPUT0", datatype="FP32", shape=result.shape
        )
        return pb.ModelInferResponse(
            model_name=request.model_name,
            model_version="1",
            outputs=[output],
            raw_output_contents=[result.tobytes()],
        )


def main(address):
    pickled = Pickle()  # forks: before anything of gRPC runs
    server = grpc.server(ThreadPoolExecutor(THREADS), options=UNBOUNDED)
    handlers = {
        "Pickle": grpc.unary_unary_rpc_method_handler(
            pickled.infer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
        ),
        "Empty": grpc.unary_unary_rpc_method_handler(lambda request, context: b""),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench", handlers)])
    server.add_insecure_port(address)
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main(sys.argv[1])
