"""Calls with KServe's own clients, over REST and gRPC.

Arguments: the URL and the gRPC address. Runs in an environment without anything of this
repository. Prints one line per client.
"""

import asyncio
import sys
from collections.abc import Awaitable
from typing import Any

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig

LEFT = np.arange(32, dtype=np.int32).reshape(2, 16)
RIGHT = np.ones((2, 16), np.int32)
WORDS = np.array([[b"a", b"zwei", b""]], np.object_)
UNKNOWN = (
    "Request for unknown model: 'nosuch' is not found; the repository index lists what there is"
)


def sums(binary: bool, **parameters: object) -> InferRequest:
    inputs = []
    for name, array in (("INPUT0", LEFT), ("INPUT1", RIGHT)):
        tensor = InferInput(name, list(array.shape), "INT32")
        tensor.set_data_from_numpy(array, binary_data=binary)
        inputs.append(tensor)
    return InferRequest(
        model_name="simple", infer_inputs=inputs, request_id="r1", parameters=parameters
    )


def words(binary: bool) -> InferRequest:
    tensor = InferInput("INPUT0", list(WORDS.shape), "BYTES")
    tensor.set_data_from_numpy(WORDS, binary_data=binary)
    return InferRequest(model_name="simple_identity", infer_inputs=[tensor])


def check_sums(answer: Any) -> None:
    assert (answer.model_name, answer.id) == ("simple", "r1"), answer
    assert np.array_equal(answer.get_output_by_name("OUTPUT0").as_numpy(), LEFT + RIGHT)
    assert np.array_equal(answer.get_output_by_name("OUTPUT1").as_numpy(), LEFT - RIGHT)


async def refused(call: Awaitable[object]) -> Exception:
    try:
        await call
    except Exception as ex:
        return ex
    raise AssertionError("it was not refused")


def check_words(answer: Any) -> None:
    given = answer.get_output_by_name("OUTPUT0").as_numpy().ravel().tolist()
    told = [word if isinstance(word, bytes) else str(word).encode() for word in given]
    assert told == WORDS.ravel().tolist(), told


async def rest(url: str) -> None:
    async with InferenceRESTClient(RESTConfig(protocol="v2", retries=1)) as client:
        assert await client.is_server_live(url)
        assert await client.is_server_ready(url)
        assert await client.is_model_ready(url, "simple")
        assert not await client.is_model_ready(url, "nosuch")
        for binary in (False, True):
            for outputs in ({}, {"binary_data_output": True}):
                request = sums(binary, **outputs)
                check_sums(await client.infer(url, request, model_name="simple"))
            check_words(await client.infer(url, words(binary), model_name="simple_identity"))
        error = await refused(client.infer(url, sums(True), model_name="nosuch"))
        assert isinstance(error, httpx.HTTPStatusError), error
        assert error.response.status_code == 404
        assert UNKNOWN in str(error), error


async def grpc_(address: str) -> None:
    async with InferenceGRPCClient(address, retries=2) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("simple")
        assert not await client.is_model_ready("nosuch")
        for binary in (False, True):
            check_sums(await client.infer(sums(binary)))
            check_words(await client.infer(words(binary)))
        request = sums(True)
        request.model_name = "nosuch"
        error = await refused(client.infer(request))
        assert isinstance(error, grpc.aio.AioRpcError), error
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, UNKNOWN)


def main() -> None:
    url, address = sys.argv[1:]
    asyncio.run(rest(url))
    print("REST")
    asyncio.run(grpc_(address))
    print("gRPC")


if __name__ == "__main__":
    main()
