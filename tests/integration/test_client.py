"""`shmserve.client` against a real server."""

import gc
import os
import shutil
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shmserve.client
from shmserve.client import Client, InferenceError, api
from shmserve.client.memory import shared_pools
from tests.holding import Hold, replace
from tests.running_server import wait_until
from tests.servers import SMALL, Server, beside, inference_error, only

MODELS = Path("tests/repositories/basic")
NO_SOCKET = "/nonexistent/client.sock"
NOTHING = {"in": 0, "batch": 0, "out": 0, "device": 0}


def connect(server: Server, **options: Any) -> Client:
    client = shmserve.client.connect(f"unix:{server.unix_path}", **options)
    assert client.shared_memory
    return client


def regions_of(server: Server, pid: int | None = None) -> list[dict[str, Any]]:
    pid = pid or os.getpid()
    return [row for row in server.show("regions") if row["pid"] == pid]


@pytest.mark.parametrize("mib", [1 / 16, 1, 64])
def test_nothing_is_copied(server: Server, mib: float) -> None:
    with connect(server) as client:
        x = client.empty(int(mib * (1 << 18)), np.float32)
        x[:] = np.arange(len(x))
        client.infer("identity", {"INPUT0": x})  # the first answer tells the output's size
        result = client.infer("identity", {"INPUT0": x}, receipt=True)
        assert np.array_equal(result["OUTPUT0"], x)
        assert result.receipt is not None
        assert result.receipt["copied_bytes"] == NOTHING
        rows = regions_of(server)
        assert all(row["sealed"] for row in rows)
        pool = client._pools.on(None)
        assert pool is not None
        assert pool.find(result["OUTPUT0"]) is not None
        again = client.infer("identity", {"INPUT0": result["OUTPUT0"][16:]}, receipt=True)
        assert np.array_equal(again["OUTPUT0"], x[16:])
    assert regions_of(server) == []
    assert np.array_equal(result["OUTPUT0"], x), "results outlive their client"


def test_results_live_as_long_as_they_are_referenced(server: Server) -> None:
    with connect(server) as client:
        kept = []
        for number in range(12):
            x = np.full(5000, number, np.float32)
            kept.append(client.infer("identity", {"INPUT0": x})["OUTPUT0"][10:20])
        assert [k.tolist() for k in kept] == [[n] * 10 for n in range(12)]
        count = len(regions_of(server))
        del kept
        gc.collect()
        for number in range(12):
            x = np.full(5000, number, np.float32)
            assert client.infer("identity", {"INPUT0": x})["OUTPUT0"][0] == number
        assert len(regions_of(server)) == count, "regions are used again"


def test_without_shared_memory(server: Server) -> None:
    x = np.arange(100_000, dtype=np.float32)
    for url, control in (
        (server.base_url, ""),
        (f"unix:{server.unix_path}", ""),
        (f"unix:{server.unix_path}", NO_SOCKET),
    ):
        with warnings.catch_warnings(action="ignore"):
            client = shmserve.client.connect(url, control)
        with client:
            assert not client.shared_memory
            place = client.empty(x.shape, x.dtype)
            place[:] = x
            result = client.infer("identity", {"INPUT0": place}, request_id="a")
            assert np.array_equal(result["OUTPUT0"], x)
            assert result["OUTPUT0"].flags.writeable
            assert (result.id, result.model) == ("a", "identity")


def test_that_there_is_no_shared_memory_is_told_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_warned", set())
    place, why = f"unix:{server.unix_path}", f"no server at the client socket {NO_SOCKET}: "
    with pytest.warns(RuntimeWarning, match=f"travel over HTTP, .*: {why}"):
        shmserve.client.connect(place, NO_SOCKET).close()
    with shmserve.client.connect(place, NO_SOCKET) as client:  # a second warning would be an error
        assert client.why_no_shared_memory.startswith(why)
    with pytest.raises(InferenceError, match=f"no shared memory with the server at {place}"):
        shmserve.client.connect(place, NO_SOCKET, require_shared_memory=True)


@pytest.mark.parametrize("run_dir", [True, False])
def test_servers_that_do_not_tell_their_client_socket(
    server: Server, monkeypatch: pytest.MonkeyPatch, run_dir: bool
) -> None:
    """As servers before 0.2 are."""
    monkeypatch.setattr(os, "environ", {"SHMSERVE_RUN_DIR": server.run_dir} if run_dir else {})
    monkeypatch.setattr(shared_pools, "WHERE", "/nope")
    monkeypatch.setattr(shared_pools, "_SERVICES", "/nonexistent")
    # a user whose server has not been started
    monkeypatch.setattr(os, "getuid", lambda: 0 if run_dir else 0x7FFFFFFF)
    with warnings.catch_warnings(action="ignore"):
        client = shmserve.client.connect(server.base_url)
    with client:
        assert client.shared_memory == run_dir
        none = "" if run_dir else "no client socket is known for this address: name the server's"
        assert client.why_no_shared_memory[: len(none) or None] == none


def test_tcp_with_a_client_socket(server: Server) -> None:
    control = os.path.join(server.run_dir, "client.sock")
    with shmserve.client.connect(server.base_url, control) as client:
        assert client.shared_memory
        x = np.arange(5000, dtype=np.float32)
        assert np.array_equal(client.infer("identity", {"INPUT0": x})["OUTPUT0"], x)


def test_a_client_socket_of_another_server(server: Server, conformance_server: Server) -> None:
    control = os.path.join(conformance_server.run_dir, "client.sock")
    with warnings.catch_warnings(action="ignore"):
        client = shmserve.client.connect(f"unix:{server.unix_path}", control)
    with client:
        assert not client.shared_memory
        assert "belongs to another server" in client.why_no_shared_memory
    assert regions_of(conformance_server) == []


def test_memory_is_asked_for_again(server: Server, tmp_path: Path) -> None:
    """As after a start in the middle of the server's restart."""
    control = tmp_path / "client.sock"
    with warnings.catch_warnings(action="ignore"):
        client = shmserve.client.connect(f"unix:{server.unix_path}", str(control))
    with client:
        x = np.ones(5000, np.float32)
        assert client.infer("identity", {"INPUT0": x}).transport == "http"
        control.symlink_to(Path(server.run_dir, "client.sock"))
        wait_until(lambda: client.shared_memory, "memory")
        client.infer("identity", {"INPUT0": x})  # tells the output's size
        assert client.infer("identity", {"INPUT0": x}).transport == "lane"


def test_memory_that_is_required_and_has_no_room(server: Server) -> None:
    with connect(server, max_bytes=1 << 20, require_shared_memory=True) as client:
        x = np.ones(5000, np.float32)
        assert np.array_equal(client.infer("identity", {"INPUT0": x})["OUTPUT0"], x)
        with pytest.raises(InferenceError, match=r"'INPUT0' has no place.*max_bytes"):
            client.infer("identity", {"INPUT0": np.ones(1 << 20, np.float32)})


def test_what_a_server_tells(server: Server) -> None:
    with connect(server) as client:
        assert client.ready()
        assert client.ready("identity")
        assert client.ready("identity", "1")
        assert not client.ready("nope")
        assert client.metadata()["name"] == "shmserve"
        assert client.metadata("identity")["inputs"][0]["name"] == "INPUT0"
        assert client.config("identity", "1")["name"] == "identity"
        assert client.statistics("identity")["model_stats"][0]["name"] == "identity"
        assert client.statistics()["model_stats"]
        assert "identity" in {row["name"] for row in client.models()}
        with pytest.raises(InferenceError, match="nope"):
            client.metadata("nope")


def test_numbers_take_the_datatype_of_the_model(server: Server) -> None:
    with connect(server) as client:
        result = client.infer("identity", {"INPUT0": [1, 2.5]})
        assert result["OUTPUT0"].dtype == np.float32
        assert result["OUTPUT0"].tolist() == [1, 2.5]
        (answer,) = client.stream("identity", {"INPUT0": (1, 2)})
        assert answer["OUTPUT0"].dtype == np.float32
        with pytest.raises(InferenceError, match="nope"):
            client.infer("nope", {"INPUT0": [1]})


def test_a_model_that_was_loaded_anew_has_other_datatypes(server: Server) -> None:
    with connect(server) as client:
        client.infer("identity", {"INPUT0": [1.5]})
        (key,) = client._requester._models
        known = client._requester._models[key]
        client._requester._models[key] = type(known)(known.outputs, {"INPUT0": "INT64"})
        assert client.infer("identity", {"INPUT0": [1.5]})["OUTPUT0"].tolist() == [1.5]


def test_the_address_of_grpc(server: Server) -> None:
    with pytest.raises(InferenceError, match=r"does not speak HTTP/1.1; is it gRPC's port"):
        shmserve.client.connect(f"http://{server.grpc_address}")


def test_more_than_it_may_have(server: Server) -> None:
    with connect(server, max_bytes=1 << 20) as client:
        x = np.arange(1 << 20, dtype=np.float32)
        assert np.array_equal(client.infer("identity", {"INPUT0": x})["OUTPUT0"], x)
        assert client.empty(1 << 20).shape == (1 << 20,)
        kept = [client.empty(1 << 15) for _ in range(20)]
        for number, array in enumerate(kept):
            array[:] = number
        assert [array[-1] for array in kept] == list(range(20))


@pytest.mark.parametrize("shared", [True, False])
def test_datatypes(conformance_server: Server, shared: bool) -> None:
    server = conformance_server
    with shmserve.client.connect(f"unix:{server.unix_path}", None if shared else "") as client:
        assert client.shared_memory == shared
        strings = np.array([b"", b"\0\xff", "ü".encode() * 5000], object)
        for model, x in (
            ("identity_fp16", np.arange(5000).astype(np.float16)),
            ("identity_bf16", np.arange(5000).astype(ml_dtypes.bfloat16)),
            ("identity_bool", np.arange(5000) % 2 == 0),
            ("identity_int64", np.arange(5000) - 7),
            ("identity_int64", np.zeros(0, np.int64)),
            ("identity_bytes", strings),
            ("identity_bytes", np.zeros(0, object)),
        ):
            for _ in range(3):  # sizes unknown, known, from memory used before
                given = client.infer(model, {"INPUT0": x})["OUTPUT0"]
                assert given.dtype == x.dtype
                assert np.array_equal(given, x)
        y = np.arange(10_000, dtype=np.float32)[::2]
        assert np.array_equal(client.infer("identity", {"INPUT0": y})["OUTPUT0"], y)
        assert client.infer("identity_bytes", {"INPUT0": ["a", "ü"]})["OUTPUT0"].tolist() == [
            b"a",
            "ü".encode(),
        ]


@pytest.mark.parametrize("options", [{}, {"lanes": False}, {"control": ""}])
def test_streams(conformance_server: Server, options: dict[str, Any]) -> None:
    """A decoupled model, over a lane and HTTP, and a model that answers once."""
    url = f"unix:{conformance_server.unix_path}"
    way = "http" if options else "lane"
    with shmserve.client.connect(url, **options) as client:
        for count in (0, 1, 500):
            x = client.empty(1, np.int32)
            x[:] = count
            inputs = {"INPUT0": x}
            results = list(client.stream("decoupled", inputs, request_id="q", version="1"))
            assert [r["OUTPUT0"].tolist() for r in results] == [[n] for n in range(count)]
            told = {(r.transport, r.id, r.model, r.version, r["OUTPUT0"].dtype) for r in results}
            assert told <= {(way, "q", "decoupled", "1", np.dtype(np.int32))}
        with client.stream("decoupled", {"INPUT0": np.full(1, 1000, np.int32)}) as stream:
            for _ in range(3):
                next(stream)
        assert list(stream) == []
        y = np.arange(5000).astype(np.float16)
        (result,) = client.stream("identity_fp16", {"INPUT0": y}, receipt=True)
        assert np.array_equal(result["OUTPUT0"], y)
        assert result.receipt is not None
        for model, wrong, status in (
            ("nope", {}, 404),
            ("decoupled", {"INPUT0": np.zeros(2, np.int32)}, 400),
            ("decoupled", {"INPUT0": np.zeros(1, np.float16)}, 0 if options else 400),
            ("identity_fp16", {}, 400),
        ):
            with inference_error(status):
                list(client.stream(model, wrong))
        open_one = client.stream("decoupled", {"INPUT0": np.full(1, 1000, np.int32)})
        next(open_one)
    assert list(open_one) == [], "it ends with its client"
    wait_until(lambda: not conformance_server.show("slots"), "slots are given back")


def test_errors(server: Server) -> None:
    with connect(server) as client:
        for model, inputs, status in (
            ("nope", {}, 404),
            ("identity", {"INPUT0": np.zeros(5000)}, 400),
            ("identity", {"WRONG": np.zeros(5000, np.float32)}, 400),
        ):
            with inference_error(status):
                client.infer(model, inputs)
        with pytest.raises(ValueError, match="complex"):
            client.infer("identity", {"INPUT0": np.zeros(1, np.complex64)})
        with pytest.raises(ValueError, match="shared memory"):
            client.empty(3, object)
    with inference_error(0):
        shmserve.client.connect("unix:/nonexistent/http.sock")


def test_threads_share_a_client(server: Server, threads: ThreadPoolExecutor) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        for count in range(15):
            x = np.full(4000 + number, number * 100 + count, np.float32)
            y = client.infer("identity", {"INPUT0": x})["OUTPUT0"]
            if not np.array_equal(x, y):
                failures.append(f"{number} {count}")

    with connect(server) as client:
        list(threads.map(work, range(6)))
    assert failures == []


_PROGRAM = """
import sys, time, numpy as np, shmserve.client
client = shmserve.client.connect(sys.argv[1])
assert client.shared_memory
x = client.empty(100000, np.float32)
client.infer("identity", {"INPUT0": x})
client.infer("identity", {"INPUT0": x})
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_client_leaves_nothing(server: Server) -> None:
    with beside("-c", _PROGRAM, f"unix:{server.unix_path}") as (told, client):
        assert told == "ready\n"
        assert len(regions_of(server, client.pid)) >= 2
    wait_until(lambda: not regions_of(server, client.pid), "its regions vanish")


def test_one_client_does_not_close_another(server: Server) -> None:
    with connect(server) as first:
        x = first.empty(5000)
        x[:] = 3
        with connect(server) as second:
            second.infer("identity", {"INPUT0": np.zeros(5000, np.float32)})
        result = first.infer("identity", {"INPUT0": x}, receipt=True)
        assert result["OUTPUT0"].tolist() == x.tolist()


def test_outputs_larger_than_before(own_server: Server) -> None:
    """Output sizes that depend on data: the client guesses once, learns from the first answer, and
    results are always right."""
    with connect(own_server) as client:
        for size in (5000, 6000, 20_000, 1, 7000):
            command = np.array([f"ok:{size:06}".encode()], object)
            out = client.infer("misbehaving", {"COMMAND": command})["OUT"]
            assert out.shape == (size,)
            assert (out == out[0]).all()


@pytest.mark.parametrize("lanes", [True, False])
def test_a_deadline_costs_the_memory_it_may_still_write_to(
    own_server: Server, tmp_path: Path, lanes: bool
) -> None:
    with connect(own_server, lanes=lanes) as client, Hold(tmp_path) as hold:
        x = np.arange(5000, dtype=np.float32)
        client.infer("misbehaving", {"COMMAND": [b"ok:05000"]})
        first = {row["region"] for row in regions_of(own_server)}
        # With the output in client memory; where there are lanes, the input is in the message
        client.infer("misbehaving", {"COMMAND": [b"ok:05000"]})
        before = {row["region"] for row in regions_of(own_server)} - (first if lanes else set())
        assert before
        with inference_error(0):
            client.infer("misbehaving", {"COMMAND": [f"hold:{hold.path}"]}, timeout=2)
        client.infer("echo", {"IN": x})
        after = {row["region"] for row in regions_of(own_server)}
        assert not after & before, "what the late answer may be written to is not used again"
        assert np.array_equal(client.infer("echo", {"IN": x})["OUT"], x)


def test_restarts(own_server: Server) -> None:
    """Regions survive a restart of the coordinator. After a restart of the service the client
    registers regions again."""
    server = own_server
    with connect(server) as client:
        x = client.empty(5000)
        x[:] = 5
        client.infer("echo", {"IN": x})
        names = {row["region"] for row in regions_of(server)}
        replace(server, "coordinator")
        server.wait_linked()
        y = client.empty(9000)  # asks the new coordinator
        y[:] = 6
        assert names <= {row["region"] for row in regions_of(server)}
        assert client.infer("echo", {"IN": y})["OUT"].tolist() == y.tolist()
        assert client.infer("echo", {"IN": x})["OUT"].tolist() == x.tolist()
        server.stop()
        with pytest.raises(InferenceError):
            client.infer("echo", {"IN": x})
        server.start()
        result = client.infer("echo", {"IN": x}, receipt=True)
        assert result["OUT"].tolist() == x.tolist()
        assert regions_of(server) != []
        del result


def test_memory_that_the_service_has_lost(own_server: Server) -> None:
    """Supervisor and coordinator die at once: the region is dropped and the client registers its
    memory again."""
    server = own_server
    with connect(server) as client:
        x = client.empty(5000)
        x[:] = 7
        client.infer("echo", {"IN": x})
        for pid in server.pids("supervisor") + server.pids("coordinator"):
            os.kill(pid, signal.SIGKILL)
        server.wait_log("could not be found again")
        result = client.infer("echo", {"IN": x}, receipt=True)
        assert result["OUT"].tolist() == x.tolist()
        assert regions_of(server) != []


def test_refusals_of_large_bodies_are_heard() -> None:
    with (
        Server(MODELS, **SMALL, max_tensor_bytes=1 << 20) as server,
        shmserve.client.connect(server.base_url, "") as client,
    ):
        for _ in range(3):
            with inference_error(413):
                client.infer("echo", {"IN": np.zeros(1 << 23, np.float32)})


def test_clients_that_are_forgotten(server: Server) -> None:
    client = connect(server)
    x = client.empty(5000)
    del client
    gc.collect()
    assert regions_of(server) == []
    x[:] = 1


def test_not_across_a_fork(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(server) as client:
        before = regions_of(server)
        own = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        with pytest.raises(RuntimeError, match="fork"):
            client.infer("identity", {"INPUT0": np.zeros(1, np.float32)})
        client.close()
        monkeypatch.undo()
        assert regions_of(server) == before, "a child does not undo its parent's doing"
    with shmserve.client.connect(f"unix:{server.unix_path}") as other:
        assert other._pools.control is not None
        other._pools.control.unregister([row["region"] for row in before])


def test_switched_off() -> None:
    with Server(MODELS, **SMALL, **only("echo,pair"), client_shm_mode="off") as server:
        assert not os.path.exists(os.path.join(server.run_dir, "client.sock"))
        with warnings.catch_warnings(action="ignore"):
            client = shmserve.client.connect(f"unix:{server.unix_path}")
        with client:
            assert not client.shared_memory
            x = np.ones(5000, np.float32)
            assert np.array_equal(client.infer("echo", {"IN": x})["OUT"], x)
            client.unload("pair")
            wait_until(lambda: not client.ready("pair"), "pair is gone")
            client.load("pair")
            assert client.ready("pair")
            client.load("echo", client.config("echo"))
            with pytest.raises(InferenceError, match="nope"):
                client.load("nope")


def test_a_model_that_takes_no_client_memory(tmp_path: Path) -> None:
    shutil.copytree("tests/repositories/basic/echo", tmp_path / "echo")
    config = tmp_path / "echo" / "config.pbtxt"
    parameter = 'parameters { key: "client_shm_mode" value { string_value: "off" } }'
    config.write_text(config.read_text() + parameter)
    with Server(tmp_path, **SMALL) as server, connect(server) as client:
        x = np.ones(5000, np.float32)
        for _ in range(3):
            assert np.array_equal(client.infer("echo", {"IN": x})["OUT"], x)
        assert client._requester._barred == {"echo": {"host", "gpu"}}


def test_copy_mode_maps_what_is_sealed() -> None:
    with Server(MODELS, **SMALL, client_shm_mode="copy") as server:
        with connect(server) as client:
            x = client.empty(50_000)
            x[:] = 1
            client.infer("echo", {"IN": x})
            result = client.infer("echo", {"IN": x}, receipt=True)
            assert result.receipt is not None
            assert result.receipt["copied_bytes"] == NOTHING
        assert server.stop() == 0
