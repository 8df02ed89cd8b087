"""Programs that pass GPU tensors to a server through `shmserve.client`, each in a separate
process.

    python client_program.py ADDRESS (rounds | mixture | hold | restart | without MODEL)

Each program checks the values and prints its other observations as JSON.
"""

import json
import sys
from typing import Any

import cupy
import numpy as np

import shmserve.client
from shmserve.client import Client, Result

COUNT = 50_000
NUMBERS = np.arange(COUNT, dtype=np.float32)
ON_DEVICE = cupy.asarray(NUMBERS)
cupy.cuda.Stream.null.synchronize()


def produced(client: Client, first: int = 0) -> Any:
    """Return numbers counting from `first`, made on a stream without waiting for the stream."""
    array = client.empty(COUNT, np.float32, device=0)
    with cupy.cuda.Stream(non_blocking=True):
        array[:] = ON_DEVICE + first
    return array


def regions(client: Client, kind: str = "cuda") -> list[str]:
    reply = client._transport.request("GET", f"/v2/{kind}sharedmemory/status")
    return [region["name"] for region in json.loads(reply.body.tobytes())]


def copied(result: Result) -> dict[str, int]:
    """Return the copied bytes in an answer's receipt, by stage."""
    assert result.receipt is not None
    found: dict[str, int] = result.receipt["copied_bytes"]
    return found


def rounds(client: Client) -> Any:
    """Repeat a request. The first answer tells the client the output's size."""
    assert client.device_memory()
    receipts = []
    for first in range(20):
        x = produced(client, first)
        result = client.infer("plus_one", {"IN": x}, receipt=True, device=0)
        assert isinstance(result["OUT"], cupy.ndarray)
        np.testing.assert_array_equal(result["OUT"].get(), NUMBERS + first + 1)
        receipts.append(copied(result))
        again = client.infer("plus_one", {"IN": result["OUT"][10:]}, device=0)["OUT"]
        np.testing.assert_array_equal(again.get(), NUMBERS[10:] + first + 2)
    return {"receipts": receipts, "regions": len(regions(client))}


def mixture(client: Client) -> Any:
    """From the host and from memory of other libraries, to either side."""
    moved = {}
    for model in ("plus_one", "plus_one_host"):
        for source in ("host", "device", "other"):
            for device in (None, 0):
                given = {"host": NUMBERS, "other": cupy.asarray(NUMBERS)}.get(source)
                given = produced(client) if given is None else given
                for _ in range(2):
                    result = client.infer(model, {"IN": given}, receipt=True, device=device)
                    y = result["OUT"]
                    kind: Any = np.ndarray if device is None else cupy.ndarray
                    assert isinstance(y, kind)
                    y = y if device is None else y.get()
                    np.testing.assert_array_equal(y, NUMBERS + 1)
                assert copied(result)["in"] == 0
                moved[f"{model} {source} {device}"] = copied(result)["device"]
    return moved


def hold(client: Client) -> Any:
    """Hold memory until this process is killed."""
    for _ in range(3):
        x = produced(client)
        y = client.infer("plus_one", {"IN": x}, device=0)["OUT"]
    np.testing.assert_array_equal(y.get(), NUMBERS + 1)
    print(json.dumps(regions(client)), flush=True)
    sys.stdin.readline()


def restart(client: Client) -> Any:
    """A line comes when the server was started anew."""
    x = produced(client)
    client.infer("plus_one", {"IN": x}, device=0)
    before = regions(client)
    print(flush=True)
    sys.stdin.readline()
    result = client.infer("plus_one", {"IN": x}, receipt=True, device=0)
    np.testing.assert_array_equal(result["OUT"].get(), NUMBERS + 1)
    assert set(before) <= set(regions(client))
    return copied(result)


def without(client: Client, model: str) -> Any:
    """Pass GPU tensors to a server that knows no GPU."""
    assert not client.device_memory()
    for _ in range(3):
        x = produced(client)
        y = client.infer(model, {"INPUT0": x}, device=0)["OUTPUT0"]
        assert isinstance(y, cupy.ndarray)
        np.testing.assert_array_equal(y.get(), NUMBERS)
        np.testing.assert_array_equal(client.infer(model, {"INPUT0": x})["OUTPUT0"], NUMBERS)
    return {"system regions": len(regions(client, "system")) > 0}


if __name__ == "__main__":
    address, what, *options = sys.argv[1:]
    with shmserve.client.connect(address) as connected:
        print(json.dumps(globals()[what](connected, *options)))
