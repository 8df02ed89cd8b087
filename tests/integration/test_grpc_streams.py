"""ModelStreamInfer in a real server: one stream's requests at the same time, in instances and in
batches."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from tests.grpc_client import Client
from tests.servers import Server, triton

SEQUENCES = Path(__file__).parents[1] / "repositories" / "sequences"
TENSORS = """backend: "python"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request, len(requests)) for request in requests]

    def one(self, request, size):
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        {work}
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", result)])
"""
# Each request waits for the other three of a group of four.
MEET = """number = int(given[0, 0])
        folder = os.path.join({folder!r}, str(number // 4))
        os.makedirs(folder, exist_ok=True)
        open(os.path.join(folder, str(number)), "w").close()
        until = time.monotonic() + 60
        while len(os.listdir(folder)) < 4:
            assert time.monotonic() < until, f"{{number}} is alone"
            time.sleep(0.005 * (4 - number % 4))  # so the last request of four ends first
        result = given"""


def write(models: Path, name: str, work: str, config: str) -> None:
    (models / name / "1").mkdir(parents=True)
    (models / name / "1" / "model.py").write_text(MODEL.format(work=work))
    (models / name / "config.pbtxt").write_text(TENSORS + config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models, folder = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("meeting")
    work = MEET.format(folder=str(folder))
    write(models, "meet", work, "instance_group [ { count: 4 } ]")
    size = "result = np.full_like(given, size)"
    write(models, "size", size, "dynamic_batching { max_queue_delay_microseconds: 60000000 }")
    (models / "tally").symlink_to(SEQUENCES / "tally")
    with Server(models, http_workers=1, grpc_processes=1) as server:
        server.wait_instances()
        yield server


def ask(model: str, number: int, id: str = "") -> pb.ModelInferRequest:
    array = np.array([[number]], np.int32)
    message = pb.ModelInferRequest(model_name=model, id=id or str(number))
    message.inputs.add(name="IN", datatype="INT32", shape=[1, 1])
    message.raw_input_contents.append(array.tobytes())
    return message


def told(answers: Iterator[pb.ModelStreamInferResponse]) -> list[tuple[str, int]]:
    found = []
    for answer in answers:
        assert not answer.error_message, answer.error_message
        response = answer.infer_response
        (value,) = np.frombuffer(response.raw_output_contents[0], np.int32)
        found.append((response.id, int(value)))
    return found


def test_a_stream_uses_all_instances(server: Server) -> None:
    """Four requests, which only end together, on four instances."""
    with Client(server.grpc_address) as client:
        for first in (0, 4, 8):
            numbers = range(first, first + 4)
            answers = told(client.stream([ask("meet", number) for number in numbers]))
            assert answers == [(str(number), number) for number in numbers]


def test_tritonclients_requests_on_a_stream_run_together(server: Server) -> None:
    triton("side_by_side", server.grpc_address)


def test_requests_of_a_stream_share_a_batch(server: Server) -> None:
    with Client(server.grpc_address) as client:
        answers = told(client.stream([ask("size", number) for number in range(8)]))
    assert answers == [(str(number), 4) for number in range(8)]


def test_sequences_on_a_stream_keep_the_order_of_their_requests(server: Server) -> None:
    numbers, steps = range(1, 8), 12

    def step(number: int, index: int) -> pb.ModelInferRequest:
        message = ask("tally", 1, str(number))
        message.parameters["sequence_id"].int64_param = number
        message.parameters["sequence_start"].bool_param = index == 0
        message.parameters["sequence_end"].bool_param = index == steps - 1
        return message

    sent = [step(number, index) for index in range(steps) for number in numbers]
    sums = defaultdict(list)
    with Client(server.grpc_address) as client:
        for id, value in told(client.stream(sent)):
            sums[id].append(value)
    assert sums == {str(number): list(range(1, steps + 1)) for number in numbers}
