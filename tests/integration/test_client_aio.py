"""`shmserve.client.aio` against a real server: answers, deadlines, cancelled tasks."""

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.client import InferenceError, Result, aio
from shmserve.client.aio import AsyncClient, AsyncResultStream
from shmserve.client.memory import device_arrays
from shmserve.client.memory.device_blocks import DeviceBlocks
from shmserve.client.wire.cancel_scope import CancelScope
from shmserve.client.wire.http_transport import Transport
from shmserve.client.wire.lanes import ClientLane
from shmserve.errors import InvalidArgument
from tests.holding import Hold, given_up, in_flight
from tests.running_server import open_fds, wait_until
from tests.servers import SMALL, Server, inference_error, served

Body = Callable[[AsyncClient], Coroutine[Any, Any, None]]
COUNT = 5000
server = served("tests/repositories/basic,tests/repositories/streams", **SMALL)


def run(server: Server, body: Body, **options: Any) -> None:
    """Run a test with a client, then check for leaks: regions, descriptors, threads, slots."""

    async def with_client() -> None:
        async with aio.connect(f"unix:{server.unix_path}", **options) as client:
            await body(client)

    gc.collect()
    before = open_fds(os.getpid()), _client_threads()
    asyncio.run(with_client())
    gc.collect()
    assert (open_fds(os.getpid()), _client_threads()) == before
    assert [row for row in server.show("regions") if row["pid"] == os.getpid()] == []
    wait_until(lambda: not server.show("slots"), "slots are given back")


def _client_threads() -> int:
    return sum(thread.name.startswith("shmserve-client") for thread in threading.enumerate())


def command(text: str) -> dict[str, Any]:
    return {"COMMAND": [text.encode()]}


def hold_of(folder: Path) -> Hold:
    folder.mkdir()
    return Hold(folder)


@pytest.mark.parametrize(
    ("options", "shared", "transport"),
    [({}, True, "lane"), ({"lanes": False}, True, "http"), ({"control": ""}, False, "http")],
)
def test_all_ways(server: Server, options: dict[str, Any], shared: bool, transport: str) -> None:
    async def body(client: AsyncClient) -> None:
        assert client.shared_memory == shared
        x = await client.empty(COUNT, np.float32)
        x[:] = np.arange(COUNT)
        for _ in range(2):  # sizes unknown, known
            result = await client.infer("echo", {"IN": x}, request_id="a", receipt=True)
        assert isinstance(result, Result)
        assert (result.transport, result.id) == (transport, "a")
        assert result.receipt is not None
        assert np.array_equal(result["OUT"], x)
        with inference_error(404):
            await client.infer("nope", {})
        assert await client.ready("echo")
        assert (await client.metadata("echo"))["name"] == "echo"
        for control in (client.load, client.unload):
            with pytest.raises(InferenceError, match="model_control = 'explicit'"):
                await control("echo")
        with pytest.raises(ValueError, match="complex"):
            await client.infer("echo", {"IN": np.zeros(1, np.complex64)})

    run(server, body, **options)


def test_many_at_a_time(server: Server) -> None:
    async def ask(client: AsyncClient, number: int) -> str:
        x = np.full(COUNT + number % 3, number, np.float32)
        result = await client.infer("echo", {"IN": x})
        assert np.array_equal(result["OUT"], x)
        return result.transport

    async def body(client: AsyncClient) -> None:
        for repeat in range(3):
            ways = await asyncio.gather(*(ask(client, n) for n in range(50)))
            assert repeat == 0 or set(ways) == {"lane"}
        assert _client_threads() <= 8

    run(server, body, concurrency=8)


@pytest.mark.parametrize("options", [{}, {"lanes": False}])
def test_a_cancelled_task_ends_its_request(
    server: Server, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancel three requests: one runs, one is queued at the server, one waits for a thread."""
    lanes: set[ClientLane] = set()  # lanes that have a request and wait for an answer
    receive = ClientLane.receive
    monkeypatch.setattr(ClientLane, "receive", lambda lane, s: lanes.add(lane) or receive(lane, s))

    def sent() -> int:
        return len(lanes) if options.get("lanes", True) else in_flight(server, "misbehaving/1/0")

    async def body(client: AsyncClient) -> None:
        holds = [hold_of(tmp_path / name) for name in ("running", "queued", "unsent")]
        for _ in range(2):
            await client.infer("misbehaving", command("ok:1"))
        lanes.clear()
        before = given_up(server, "misbehaving")
        with holds[0], holds[1], holds[2]:
            tasks = []
            for hold in holds:
                call = client.infer("misbehaving", command(f"hold:{hold.path}"))
                tasks.append(asyncio.create_task(call))
                if hold is holds[0]:
                    await asyncio.to_thread(hold.wait_begun)
            await asyncio.to_thread(wait_until, lambda: sent() == 2, "the second is sent")
            for task in reversed(tasks):
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(end) for end in ends] == [asyncio.CancelledError] * 3
            # Both threads are free again, although the model is still at work
            await client.infer("echo", {"IN": np.zeros(COUNT, np.float32)})
            assert await client.empty(COUNT) is not None
            if not options.get("lanes", True):
                wait_until(lambda: given_up(server, "misbehaving") == before + 2, "both are ended")
        answer = await client.infer("misbehaving", command("ok:1"))
        assert answer["OUT"].shape == (1,)
        assert not (tmp_path / "unsent" / "hold.begun").exists(), "nobody has been asked"

    run(server, body, concurrency=2, **options)


@pytest.mark.parametrize("options", [{}, {"lanes": False}])
def test_deadlines_are_of_the_whole_call(
    server: Server, tmp_path: Path, options: dict[str, Any]
) -> None:
    async def body(client: AsyncClient) -> None:
        for _ in range(2):
            await client.infer("misbehaving", command("ok:05000"))
        with hold_of(tmp_path / "h") as hold:
            calls = [
                client.infer("misbehaving", command(f"hold:{hold.path}"), timeout=1),
                client.infer("echo", {"IN": np.zeros(1, np.float32)}, timeout=0.2),
            ]
            ends = await asyncio.gather(*calls, return_exceptions=True)
        for end in ends:  # the second has not even had a thread
            assert isinstance(end, InferenceError)
            assert (end.status, end.message) == (0, "the server did not answer in time")
        result = await client.infer("misbehaving", command("ok:05000"))
        assert result["OUT"].shape == (COUNT,)

    run(server, body, concurrency=1, **options)


def test_closing_ends_what_is_under_way(server: Server, tmp_path: Path) -> None:
    async def body() -> None:
        with hold_of(tmp_path / "h") as hold:
            async with aio.connect(f"unix:{server.unix_path}", concurrency=1) as client:
                tasks = [
                    asyncio.create_task(client.infer("misbehaving", command(f"hold:{hold.path}")))
                    for _ in range(2)
                ]
                await asyncio.to_thread(hold.wait_begun)
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(end, InferenceError)
                assert end.message == "the request was cancelled"

    asyncio.run(body())


@pytest.mark.parametrize("options", [{}, {"lanes": False}])
def test_streams(server: Server, options: dict[str, Any]) -> None:
    async def numbers(client: AsyncClient, text: str) -> list[int]:
        return [int(result["N"][0]) async for result in client.stream("teller", command(text))]

    async def body(client: AsyncClient) -> None:
        several = await asyncio.gather(*(numbers(client, "slowly:10") for _ in range(6)))
        assert several == [list(range(10))] * 6
        before = (await numbers(client, "told"))[0]
        async with client.stream("teller", command("slowly:1000000"), ["N"]) as stream:
            result = await anext(stream)
            assert result.transport == ("http" if options else "lane")
        assert [result async for result in stream] == []
        kept = client.stream("teller", command("slowly:1000000"), timeout=60)
        await anext(kept)
        waits = asyncio.create_task(_all(kept))
        await asyncio.sleep(0.1)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await kept.aclose()
        while (await numbers(client, "told"))[0] < before + 2:
            await asyncio.sleep(0.05)
        late = client.stream("teller", command("slowly:1000000"), timeout=0.5)
        with pytest.raises(InferenceError, match="did not answer in time"):
            await _all(late)
        with inference_error(404):
            await anext(client.stream("nope", {}))
        await anext(client.stream("teller", command("slowly:1000000")))  # ends with the client

    run(server, body, concurrency=4, **options)


async def _all(stream: AsyncResultStream) -> list[Result]:
    return [result async for result in stream]


def test_memory_is_given_back_by_a_cancelled_call(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_arrays, "cupy", lambda: None)  # this test needs no CuPy
    transport = Transport(f"unix:{server.unix_path}", 10.0)
    blocks = DeviceBlocks(transport, 0)
    scope = CancelScope()

    def call() -> None:
        scope.cancel()
        with contextlib.suppress(InvalidArgument):  # the server's error: the region does not exist
            blocks.unregister(["nobodys"])

    scope.run(call)
    transport.close()


def test_a_closed_client_asks_nothing(server: Server) -> None:
    async def body() -> None:
        async with aio.connect(f"unix:{server.unix_path}") as client:
            pass
        with pytest.raises(InferenceError, match="the client is closed"):
            await client.infer("echo", {"IN": np.zeros(3, np.float32)})
        with pytest.raises(InferenceError, match="the client is closed"):
            await anext(client.stream("teller", command("count:1")))

    asyncio.run(body())


def test_no_server() -> None:
    async def body() -> None:
        threads = _client_threads()
        with inference_error(0):
            async with aio.connect("unix:/nonexistent/http.sock"):
                pass
        assert _client_threads() == threads

    asyncio.run(body())


def test_a_restarted_server(own_server: Server) -> None:
    async def body() -> None:
        async with aio.connect(f"unix:{own_server.unix_path}") as client:
            x = await client.empty(COUNT, np.float32)
            x[:] = 5
            for _ in range(2):
                await client.infer("echo", {"IN": x})
            await asyncio.to_thread(own_server.stop)
            with pytest.raises(InferenceError):
                await client.infer("echo", {"IN": x})
            await asyncio.to_thread(own_server.start)
            result = await client.infer("echo", {"IN": x})
            assert result["OUT"].tolist() == x.tolist()

    asyncio.run(body())
