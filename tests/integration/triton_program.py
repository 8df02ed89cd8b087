"""Calls with an unmodified tritonclient: ``triton_program.py NAME ADDRESS...``; NAME is a function.

Separate process, because tritonclient and shmserve register the same message names. Any failure is
a traceback. Addresses are HOST:PORT.
"""

import asyncio
import importlib
import queue
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http
import tritonclient.http.aio as http_aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


def given(module: Any, **arrays: np.ndarray) -> list[Any]:
    """Return inputs by name."""
    made = []
    for name, array in arrays.items():
        made.append(module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array)
    return made


def refused(call: Callable[..., object], *arguments: Any, **options: Any) -> Any:
    """Return the error of a call that must fail."""
    try:
        call(*arguments, **options)
    except InferenceServerException as ex:
        return ex
    raise AssertionError("the call was answered")


class Stream:
    """A stream of a client; `next` returns the next result, which must not be an error."""

    def __init__(self, client: Any) -> None:
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client.start_stream(lambda result, error: self._answers.put((result, error)))
        self.send = client.async_stream_infer

    def next(self) -> Any:
        result, error = self._answers.get(timeout=60)
        assert error is None, error
        return result

    def problem(self) -> str:
        """Return the text of the next result, which must be an error."""
        result, error = self._answers.get(timeout=60)
        assert result is None
        return str(error)


# ------------------------------------------------------------------------------------ streams


def side_by_side(address: str) -> None:
    """Requests, which only end together, and an error in the middle: answers come in order."""
    with grpc.InferenceServerClient(address) as client:
        stream = Stream(client)
        for number in (100, 101, -1, 102, 103):
            asked = given(grpc, IN=np.full((1, 1), max(0, number), np.int32))
            stream.send("meet" if number > 0 else "nosuch", asked, request_id=str(number))
        for number in (100, 101):
            assert stream.next().get_response().id == str(number)
        problem = stream.problem()
        assert "nosuch" in problem, problem
        for number in (102, 103):
            assert stream.next().get_response().id == str(number)
        client.stop_stream()


# -------------------------------------------------------------------------------- ensembles


def ensemble(protocol: str, address: str) -> None:
    library = importlib.import_module(f"tritonclient.{protocol}")
    client = library.InferenceServerClient(address)
    as_json = {"as_json": True} if protocol == "grpc" else {}

    assert client.is_model_ready("diamond")
    metadata = client.get_model_metadata("diamond", **as_json)
    assert metadata["platform"] == "ensemble"
    assert [output["name"] for output in metadata["outputs"]] == ["SUM", "DIFFERENCE", "DOUBLE"]
    document = client.get_model_config("diamond", **as_json)
    steps = document.get("config", document)["ensemble_scheduling"]["step"]
    assert steps[3]["input_map"] == {"A": "l", "B": "r"}
    rows = client.get_model_repository_index(**as_json)
    assert "diamond" in {row["name"] for row in rows.get("models", [])} if as_json else rows

    array = np.full(7, 60 if as_json else 70, np.float32)  # which tells the two branches apart
    wanted = [
        library.InferRequestedOutput("DOUBLE"),
        library.InferRequestedOutput("SUM", class_count=1),
    ]
    asked = given(library, IN=array)
    result = client.infer("diamond", asked, outputs=wanted, request_id="42")
    np.testing.assert_array_equal(result.as_numpy("DOUBLE"), array * 2)
    assert result.as_numpy("SUM")[0] == f"{array[0] * 4 + 11:f}:0".encode()
    assert result.as_numpy("DIFFERENCE") is None
    assert result.get_response(**as_json)["id"] == "42"

    for model in ("diamond", "left"):
        stats = client.get_inference_statistics(model, **as_json)["model_stats"][0]
        assert int(stats["inference_stats"]["success"]["count"]) >= 1
        assert int(stats["inference_count"]) >= 1

    cold = given(library, IN=np.full(1, -5000, np.float32))
    problem = str(refused(client.infer, "diamond", cold))
    assert "in ensemble 'diamond', " in problem, problem
    assert "(step 'scale')" in problem, problem
    if protocol == "grpc":
        parts(client)
    client.close()


def parts(client: Any) -> None:
    stream = Stream(client)
    asked = given(grpc, IN=np.full(1, 3, np.float32))
    stream.send("parts", asked, request_id="7", enable_empty_final_response=True)
    found, final = [], False
    while not final:
        answer = stream.next()
        response = answer.get_response()
        final = response.parameters["triton_final_response"].bool_param
        assert (response.id, response.model_name) == ("7", "parts")
        if response.outputs:
            found += answer.as_numpy("OUT").tolist()
    assert found == [3, 5, 7], found
    client.stop_stream()


def calls(address: str) -> None:
    """Models that call other models."""
    client = http.InferenceServerClient(address)

    def ask(model: str, name: str) -> Any:
        left, right = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 3, np.int32)
        text = np.array([name.encode()], dtype=np.object_)
        inputs = given(http, MODEL_NAME=text, INPUT0=left, INPUT1=right)
        outputs = [http.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
        return client.infer(model, inputs, request_id="1", outputs=outputs)

    for model in ("bls_sync", "bls_async"):
        result = ask(model, "simple")
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0")[0], np.arange(16) + 3)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1")[0], np.arange(16) - 3)
        problem = str(refused(ask, model, "nobody"))
        assert "'nobody'" in problem, problem
    client.close()


# ---------------------------------------------------------------------------- shared memory


def regions(address: str) -> None:
    client = http.InferenceServerClient(address)
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    values = np.arange(1024, dtype=np.float32)
    size = values.nbytes
    handles = {}
    for name in ("output", "input"):
        handles[name] = shm.create_shared_memory_region(f"{name}_data", f"/{name}_simple", size)
        client.register_system_shared_memory(f"{name}_data", f"/{name}_simple", size)
    shm.set_shared_memory_region(handles["input"], [values])

    inputs = [http.InferInput("IN", [1024], "FP32")]
    inputs[-1].set_shared_memory("input_data", size)
    outputs = [http.InferRequestedOutput("OUT", binary_data=True)]
    outputs[-1].set_shared_memory("output_data", size)
    told = client.infer(model_name="touch", inputs=inputs, outputs=outputs).get_output("OUT")
    assert told is not None, "no output"
    found = shm.get_contents_as_numpy(handles["output"], np.float32, told["shape"])
    np.testing.assert_array_equal(found, values + 1)
    assert len(client.get_system_shared_memory_status()) == 2
    client.unregister_system_shared_memory()
    assert client.get_system_shared_memory_status() == []
    del found
    for handle in handles.values():
        shm.destroy_shared_memory_region(handle)
    assert shm.mapped_shared_memory_regions() == []


# ---------------------------------------------------------------------------- large tensors

SIZES = (1 << 20, 16 << 20)


def check(result: Any, array: np.ndarray) -> None:
    assert np.array_equal(result.as_numpy("OUT"), array)


def sizes(address: str) -> None:
    """Over gRPC: blocking, with asyncio, and in a stream."""
    arrays = [np.random.default_rng(size).random(size // 4, dtype=np.float32) for size in SIZES]
    with grpc.InferenceServerClient(address) as client:
        for array in arrays:
            for compression in (None, "gzip") if array.nbytes == SIZES[0] else (None,):
                asked = given(grpc, IN=array)
                check(client.infer("echo", asked, compression_algorithm=compression), array)
    asyncio.run(awaited(address, arrays))
    with grpc.InferenceServerClient(address) as client:
        stream = Stream(client)
        for array in arrays:
            stream.send("echo", given(grpc, IN=array))
        for array in arrays:
            check(stream.next(), array)
        client.stop_stream()


async def awaited(address: str, arrays: list[np.ndarray]) -> None:
    async with grpc_aio.InferenceServerClient(address) as client:
        waiting = (client.infer("echo", given(grpc, IN=array)) for array in arrays)
        results = await asyncio.gather(*waiting)
    for result, array in zip(results, arrays, strict=True):
        check(result, array)


# -------------------------------------------------------------------------------------- TLS


def tls(http_address: str, grpc_address: str, folder: str) -> None:
    authority, shown, key = (f"{folder}/{n}" for n in ("ca.pem", "client.pem", "client.key"))
    options = {"ca_certs": authority, "certfile": shown, "keyfile": key}
    over_grpc = grpc.InferenceServerClient(
        grpc_address,
        ssl=True,
        root_certificates=authority,
        private_key=key,
        certificate_chain=shown,
    )
    over_http = http.InferenceServerClient(http_address, ssl=True, ssl_options=options)
    clients: tuple[tuple[Any, Any], ...] = ((http, over_http), (grpc, over_grpc))
    for module, client in clients:
        assert client.is_server_ready()
        for size in (3, 1 << 20):
            array = np.arange(size, dtype=np.float32)
            check(client.infer("echo", given(module, IN=array)), array)
        client.close()


# ----------------------------------------------------------------- statistics and settings

LOGS = {
    "log_info": True,
    "log_warning": False,
    "log_error": True,
    "log_verbose_level": 1,
    "log_format": "ISO8601",
}
TRACES = {"trace_level": ["TIMESTAMPS"], "trace_rate": "10", "trace_count": "5"}
ONES = np.ones(3, np.float32)


def check_statistics(told: Any, model: str, count: int) -> None:
    (stats,) = [row for row in told["model_stats"] if row["name"] == model]
    assert stats["inference_stats"]["success"]["count"] == count, stats


def settings(address: str) -> None:
    client = http.InferenceServerClient(address)
    for _ in range(3):
        client.infer("echo", given(http, IN=ONES))
    for words in ((), ("echo",), ("echo", "1")):
        check_statistics(client.get_inference_statistics(*words), "echo", 3)
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings("echo", TRACES)["trace_rate"] == "10"
    assert client.get_trace_settings("echo")["trace_count"] == "5"
    cleared = {"trace_level": None, "trace_rate": None, "trace_count": None}
    assert client.update_trace_settings("echo", cleared) == client.get_trace_settings()
    assert client.update_log_settings(LOGS).items() >= LOGS.items()
    assert client.get_log_settings().items() >= LOGS.items()
    for change, name in (
        (client.update_trace_settings, "trace_file"),
        (client.update_log_settings, "log_file"),
    ):
        assert refused(change, settings={name: "/tmp/x"}).status() == "501"
    client.close()
    asyncio.run(settings_aio(address))


async def settings_aio(address: str) -> None:
    async with http_aio.InferenceServerClient(address) as client:
        await client.infer("echo", given(http, IN=ONES))
        check_statistics(await client.get_inference_statistics("echo"), "echo", 4)
        assert (await client.update_trace_settings("echo", TRACES))["trace_rate"] == "10"
        assert (await client.get_trace_settings("echo"))["trace_count"] == "5"
        changed = await client.update_log_settings({"log_format": "default"})
        assert changed == await client.get_log_settings()
        assert changed["log_format"] == "default"


# -------------------------------------------------------------------------------- sequences

VALUES = [11, 7, 5, 3, 2, 0, 1]


def flags(index: int) -> dict[str, bool]:
    return {"sequence_start": index == 0, "sequence_end": index == len(VALUES) - 1}


def tally(sequence: int | str) -> str:
    return "names" if isinstance(sequence, str) else "tally"


def sequences(over_http: str, over_grpc: str) -> None:
    one_by_one(http, over_http, 1001, 1002)
    one_by_one(http, over_http, "red", "blue")
    one_by_one(grpc, over_grpc, 1003, 1004)
    one_by_one(grpc, over_grpc, "green", "1003")
    with grpc.InferenceServerClient(over_grpc) as client:
        streamed(client, 1005, 1006)
        streamed(client, "black", "white")
        iterated(client)


def one_by_one(module: Any, address: str, first: int | str, second: int | str) -> None:
    """Send two sequences with alternating requests."""
    client = module.InferenceServerClient(address)
    sums = {first: 0, second: 0}
    for index, value in enumerate(VALUES):
        for sequence, sent in ((first, value), (second, -value)):
            sums[sequence] += sent
            asked = given(module, IN=np.full((1, 1), sent, np.int32))
            result = client.infer(tally(sequence), asked, sequence_id=sequence, **flags(index))
            assert result.as_numpy("SUM")[0, 0] == sums[sequence], (sequence, index)
    client.close()


def streamed(client: Any, first: int | str, second: int | str) -> None:
    """Send two alternating sequences on a stream, all requests before the first answer is read."""
    stream = Stream(client)
    for index, value in enumerate(VALUES):
        for sequence, sent in ((first, value), (second, -value)):
            asked = given(grpc, IN=np.full((1, 1), sent, np.int32))
            name = f"{sequence}/{index}"
            told = {"request_id": name, "sequence_id": sequence, **flags(index)}
            stream.send(tally(sequence), asked, **told)
    for index in range(len(VALUES)):
        for sequence, sign in ((first, 1), (second, -1)):
            result = stream.next()
            assert result.get_response().id == f"{sequence}/{index}"
            assert result.as_numpy("SUM")[0, 0] == sign * sum(VALUES[: index + 1])
    client.stop_stream()


def iterated(client: Any) -> None:
    """Send two requests that a model answers once per run, in shared runs."""
    stream = Stream(client)
    runs = {"long": 200, "short": 4}
    for name, count in runs.items():
        asked = given(grpc, COUNT=np.full((1, 1), count, np.int32))
        stream.send("countdowns", asked, request_id=name)
    seen: dict[str, list[list[int]]] = {name: [] for name in runs}
    for _ in range(sum(runs.values())):
        result = stream.next()
        seen[result.get_response().id].append(result.as_numpy("SEEN")[0].tolist())
    for name, count in runs.items():
        told = [[run, int(run == 1), int(run == 1)] for run in range(1, count + 1)]
        assert [row[:3] for row in seen[name]] == told, seen[name]
    assert any(together == 2 for *_, together in seen["short"]), seen
    assert seen["long"][-1][3] == 1, seen
    client.stop_stream()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
