"""The ModelInfer wire walk beside generated protobuf classes: ``python -m bench.wire``.

No server: what is timed is what a handler does with a message of one FP32 tensor.

    read    bytes to names, shape and a view of the tensor
    write   names, shape and a view of the tensor to bytes

Reported are medians over the calls in microseconds, and the generated classes' as a
multiple of the walk's. Both take turns, so that a change of the machine's mood hits both.
"""

import statistics
from functools import partial

from bench.turns import in_turn, seconds
from shmserve._generated import grpc_service_pb2 as pb
from shmserve.protocol.protobuf.infer_wire import parse_request, response_parts

SIZES = {"64 B": 64, "1 MiB": 1 << 20, "16 MiB": 16 << 20}


def request(size):
    message = pb.ModelInferRequest(model_name="identity", id="1")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, size // 4])
    message.raw_input_contents.append(bytes(size))
    return message.SerializeToString()


def read_generated(data):
    message = pb.ModelInferRequest.FromString(data)
    (tensor,) = message.inputs
    names = message.model_name, message.model_version, message.id, dict(message.parameters)
    entry = tensor.name, tensor.datatype, tuple(tensor.shape), dict(tensor.parameters)
    return names, entry, list(message.outputs), memoryview(message.raw_input_contents[0])


def write_generated(view, size):
    message = pb.ModelInferResponse(model_name="identity", model_version="1", id="1")
    message.outputs.add(name="OUTPUT0", datatype="FP32", shape=[1, size // 4])
    message.raw_output_contents.append(bytes(view))
    return message.SerializeToString()


def write_walk(view, size):
    rows = [("OUTPUT0", "FP32", (1, size // 4))]
    return b"".join(response_parts("identity", "1", "1", {}, rows, [view]))


def median_us(calls, *contestants):
    times = in_turn(calls, {call: partial(seconds, call) for call in contestants}, warm_up=0)
    return [statistics.median(taken) * 1e6 for taken in times.values()]


def main():
    print(f"{'':14}{'generated':>12}{'walk':>12}{'ratio':>8}")
    for name, size in SIZES.items():
        data, view = request(size), memoryview(bytearray(size))
        calls = 5000 if size < 1 << 20 else 100
        assert bytes(read_generated(data)[3]) == bytes(parse_request(data).inputs[0].raw)
        assert write_generated(view, size) == write_walk(view, size)
        for what, generated, walk in (
            ("read", partial(read_generated, data), partial(parse_request, data)),
            ("write", partial(write_generated, view, size), partial(write_walk, view, size)),
        ):
            theirs, ours = median_us(calls, generated, walk)
            print(f"{what + ' ' + name:14}{theirs:12.1f}{ours:12.1f}{theirs / ours:8.2f}")


if __name__ == "__main__":
    main()
