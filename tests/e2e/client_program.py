"""Typical program with tritonclient, in a separate process that knows only the address.

Prints one line per check; any exception ends it with a traceback and status 1.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.http as http
import tritonclient.http.aio as aio
from tritonclient.utils import np_to_triton_dtype

RNG = np.random.default_rng(7)


def problems() -> dict[str, dict[str, np.ndarray]]:
    """Return inputs for every shipped worker."""
    small = RNG.integers(-1000, 1000, (2, 16), dtype=np.int32)
    vectors = RNG.random((2, 100), dtype=np.float32)
    text = np.array([b"a", "grün".encode(), b"", b"x" * 5000], dtype=np.object_)
    return {
        "add_sub": {"INPUT0": small[0], "INPUT1": small[1]},
        "identity": {"INPUT0": RNG.random(1000, dtype=np.float32)},
        "identity_bytes": {"INPUT0": text},
        "noop": {"INPUT0": RNG.random(7, dtype=np.float32)},
        "digits": {"image": RNG.integers(0, 17, (8, 8)).astype(np.float32)},
        "gpu_add_sub": {"INPUT0": vectors[0], "INPUT1": vectors[1]},
        "gpu_classifier": {"image": RNG.random((3, 224, 224), np.float32)},
    }


def check(model: str, inputs: dict[str, np.ndarray], get: Callable[[str], Any]) -> None:
    if model in ("add_sub", "gpu_add_sub"):
        np.testing.assert_array_equal(get("OUTPUT0"), inputs["INPUT0"] + inputs["INPUT1"])
        np.testing.assert_array_equal(get("OUTPUT1"), inputs["INPUT0"] - inputs["INPUT1"])
    elif model == "gpu_classifier":
        assert get("probabilities").shape == (1000,)
        assert abs(float(get("probabilities").sum()) - 1) < 1e-3
    elif model == "noop":
        assert get("OUTPUT0").shape == (1,)
    elif model == "digits":
        assert get("label").shape == (1,)
        assert abs(float(get("probabilities").sum()) - 1) < 1e-3
    elif model == "identity_bytes":
        got = [e.encode() if isinstance(e, str) else e for e in get("OUTPUT0").tolist()]
        assert got == inputs["INPUT0"].tolist()
    else:
        np.testing.assert_array_equal(get("OUTPUT0"), inputs["INPUT0"])


def wire_inputs(module: Any, inputs: dict[str, np.ndarray], **options: bool) -> list[Any]:
    made = []
    for name, array in inputs.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array, **options)
        made.append(tensor)
    return made


VARIANTS = [
    (binary_in, binary_out, request, response)
    for binary_in in (True, False)
    for binary_out in (True, False)
    for request in (None, "gzip", "deflate")
    for response in (None, "gzip", "deflate")
]
LARGE = {"gpu_classifier": [(True, True, None, None), (True, False, "deflate", "gzip")]}


def outputs_of(module: Any, metadata: Any, binary: bool) -> list[Any]:
    return [
        module.InferRequestedOutput(output["name"], binary_data=binary)
        for output in metadata["outputs"]
    ]


def run_sync(url: str) -> None:
    with http.InferenceServerClient(url, concurrency=2) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
        for model, inputs in problems().items():
            assert client.is_model_ready(model)
            assert client.is_model_ready(model, "1")
            assert not client.is_model_ready(model, "7")
            metadata = client.get_model_metadata(model)
            assert client.get_model_config(model, "1")["name"] == model
            for binary_in, binary_out, request, response in LARGE.get(model, VARIANTS):
                result = client.infer(
                    model,
                    wire_inputs(http, inputs, binary_data=binary_in),
                    outputs=outputs_of(http, metadata, binary_out),
                    request_id="r1",
                    request_compression_algorithm=request,
                    response_compression_algorithm=response,
                )
                assert result.get_response()["id"] == "r1"
                check(model, inputs, result.as_numpy)
            result = client.infer(model, wire_inputs(http, inputs))
            check(model, inputs, result.as_numpy)
            waiting = [client.async_infer(model, wire_inputs(http, inputs)) for _ in range(5)]
            for one in waiting:
                check(model, inputs, one.get_result().as_numpy)
            print("sync", model)
        try:
            client.infer("nosuch", wire_inputs(http, inputs))
        except http.InferenceServerException as ex:
            told = (ex.status(), "nosuch" in ex.message())
        else:
            told = ("", False)
        assert told == ("404", True)


async def run_aio(url: str) -> None:
    async with aio.InferenceServerClient(url) as client:
        assert await client.is_server_ready()
        for model, inputs in problems().items():
            metadata = await client.get_model_metadata(model)
            assert (await client.get_model_config(model))["name"] == model
            for binary_in, binary_out, request, response in LARGE.get(model, VARIANTS):
                result = await client.infer(
                    model,
                    wire_inputs(http, inputs, binary_data=binary_in),
                    outputs=outputs_of(http, metadata, binary_out),
                    request_compression_algorithm=request,
                    response_compression_algorithm=response,
                )
                check(model, inputs, result.as_numpy)
            print("aio", model)


if __name__ == "__main__":
    run_sync(sys.argv[1])
    asyncio.run(run_aio(sys.argv[1]))
