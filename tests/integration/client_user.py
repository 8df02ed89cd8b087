"""Program of a user who installed only `shmserve-client`. Tests run it, and mypy --strict reads
it.

Prints the way that its requests took. The argument is the server's socket.
"""

import asyncio
import importlib.util
import sys

import numpy as np

import shmserve.client
from shmserve.client import Client, InferenceError, Result
from shmserve.client.aio import connect as connect_aio


def ask(client: Client, value: float) -> Result:
    array = client.empty((4,), np.float32)
    array[:] = value
    return client.infer("identity", {"INPUT0": array})


async def ask_aio(address: str) -> bool:
    async with connect_aio(address) as client:
        result = await client.infer("identity", {"INPUT0": np.ones(4, np.float32)})
        return bool((result["OUTPUT0"] == 1).all())


def main() -> None:
    address = sys.argv[1]
    for part in ("shmserve.config", "shmserve.dispatch", "grpc", "falcon", "gunicorn", "posix_ipc"):
        assert importlib.util.find_spec(part) is None, part
    with shmserve.client.connect(address) as client:
        assert client.shared_memory
        for value in (1.0, 2.0):
            result = ask(client, value)
            assert (result["OUTPUT0"] == value).all()
        try:
            client.infer("identity", {"INPUT9": np.ones(4, np.float32)})
        except InferenceError as ex:
            status = ex.status
    assert status == 400
    assert asyncio.run(ask_aio(address))
    print(result.transport)


if __name__ == "__main__":
    main()
