"""gRPC rivals in one process: ``python -m bench.rivals.grpc_server ADDRESS``.

`Pickle` is what a tutorial leads to: generated messages, the tensor handed to a model process
through multiprocessing queues and back. `Empty` takes bytes and answers with bytes: what
grpcio's synchronous server costs by itself.
"""

import itertools
import multiprocessing
import os
import queue
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import numpy as np

from shmserve._generated import grpc_service_pb2 as pb

THREADS = 16
UNBOUNDED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def model(requests, answers, parent):
    """The model process: gives every tensor back."""
    while os.getppid() == parent:
        try:
            number, tensor = requests.get(timeout=2)
        except queue.Empty:
            continue
        answers.put((number, tensor))


class Pickle:
    """ModelInfer over a pickling queue."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self._requests, self._answers = context.Queue(), context.Queue()
        self._waiting = {}
        self._numbers = itertools.count()
        arguments = (self._requests, self._answers, os.getpid())
        context.Process(target=model, args=arguments, daemon=True).start()
        threading.Thread(target=self._distribute, daemon=True).start()

    def _distribute(self):
        while True:
            number, tensor = self._answers.get()
            self._waiting.pop(number).set_result(tensor)

    def infer(self, request, context):
        tensor = np.frombuffer(request.raw_input_contents[0], dtype="<f4")
        number, answer = next(self._numbers), Future()
        self._waiting[number] = answer
        self._requests.put((number, tensor))
        result = answer.result(timeout=120)
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
