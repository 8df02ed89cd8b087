"""`shmserve.client` and `shmserve measure` with TLS and keys, against a real server."""

import asyncio
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve.client
from shmserve.client import InferenceError, aio
from tests.integration.test_http_tls import Encrypted
from tests.integration.test_keys import make
from tests.servers import inference_error, run_shmserve

pytestmark = pytest.mark.needs("openssl")
X = np.arange(5000, dtype=np.float32)
UNKNOWN = "shmk_unknown"


class Keyed(Encrypted):
    """Server with keys and certificates of clients."""

    def __init__(self, folder: Path) -> None:
        self.key = make("user", ["use", "register", "change"], str(folder / "keys.toml"))
        (folder / "key").write_text(self.key + "\n")
        keys = {"keys_file": folder / "keys.toml", "keys_required_from": "anyone"}
        super().__init__(folder, mutual=True, **keys)
        self.url = f"https://localhost:{self.http_port}"
        self.ca = folder / "ca.pem"
        self.files: dict[str, Any] = {
            "ca": self.ca,
            "cert": folder / "client.pem",
            "cert_key": folder / "client.key",
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with Keyed(tmp_path_factory.mktemp("tls")) as server:
        yield server


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning that a server with keys takes no memory of clients."""
    monkeypatch.setenv("SHMSERVE_CLIENT_SOCKET", "")
    monkeypatch.setattr(shmserve.client.api, "_warned", Everything())


class Everything(set[str]):
    def __contains__(self, _: object) -> bool:
        return True


async def inferred(url: str, **options: Any) -> Any:
    async with aio.connect(url, **options) as client:
        return (await client.infer("echo", {"IN": X}))["OUT"]


def test_keys_and_certificates_of_arguments(server: Keyed) -> None:
    for key in ({"key": server.key}, {"key_file": server.folder / "key"}):
        with shmserve.client.connect(server.url, **server.files, **key) as client:
            assert np.array_equal(client.infer("echo", {"IN": X})["OUT"], X)
            (answer,) = client.stream("echo", {"IN": X})
            assert np.array_equal(answer["OUT"], X)
            assert client.metadata("echo")["name"] == "echo"
            reason = client.why_no_shared_memory
            assert "the client socket takes no keys" in reason
    given = asyncio.run(inferred(server.url, **server.files, key=server.key))
    assert np.array_equal(given, X)
    with shmserve.client.connect(f"unix:{server.unix_path}", key=server.key) as client:
        assert np.array_equal(client.infer("echo", {"IN": X})["OUT"], X)


def test_keys_and_authorities_of_the_environment(
    server: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMSERVE_KEY", server.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(server.ca))
    files = {"cert": server.files["cert"], "cert_key": server.files["cert_key"]}
    with shmserve.client.connect(server.url, **files) as client:
        assert np.array_equal(client.infer("echo", {"IN": X})["OUT"], X)
    with (
        shmserve.client.connect(server.url, **files, key="") as client,
        inference_error(401, "the server asks for a key"),
    ):
        client.infer("echo", {"IN": X})


def test_keys_that_are_missing_or_unknown(server: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHMSERVE_KEY", raising=False)
    with shmserve.client.connect(server.url, **server.files) as client:
        for call in (lambda: client.infer("echo", {"IN": X}), lambda: client.metadata("echo")):
            with inference_error(401, r"^the server asks for a key \(key, key_file, or SHMSERVE_"):
                call()
    with shmserve.client.connect(server.url, **server.files, key=UNKNOWN) as client:
        with inference_error(401, "^the server does not accept the key: using the service"):
            client.infer("echo", {"IN": X})
        with pytest.raises(InferenceError) as caught:
            client.metadata("echo")
        shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        assert UNKNOWN not in "".join(shown.format())
        assert UNKNOWN not in repr(client)
    assert UNKNOWN not in server.log()


def test_a_certificate_that_is_missing(server: Keyed) -> None:
    with inference_error(0, r": it asks for a client's certificate \(cert, cert_key\)$"):
        shmserve.client.connect(server.url, ca=server.ca, key=server.key)


def test_a_model_is_measured(server: Keyed) -> None:
    files = [word for name, path in server.files.items() for word in (option(name), path)]
    words = ("--url", server.url, "--grpc", f"grpcs://localhost:{server.grpc_address[10:]}")
    key = ("--key-file", server.folder / "key")
    limits = ("--requests", "5", "--warm-up", "0", "--json", "--over", "http", "grpc")
    done = run_shmserve("measure", "echo", *words, *files, *key, *limits)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["requests"] for row in json.loads(done.stdout)] == [5, 5]
    done = run_shmserve("measure", "echo", *words, *files, "--key", UNKNOWN, *limits)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the server does not accept the key" in done.stderr
    assert UNKNOWN not in done.stderr
    done = run_shmserve("ready", "echo", *words[:2], *files, *key)
    assert done.stdout == "echo is ready\n"


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
