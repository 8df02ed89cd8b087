"""Costs of keys and TLS over HTTP, in one run: ``python -m bench.doors --help``.

    open      the server as shipped, one HTTP worker, model `identity`
    required  as `open`, with `keys_required_from = "anyone"` and a key in each request
    tls       as `open`, with TLS (1.3; an ECDSA certificate)
    both      keys and TLS

A client in this process sends prepared bytes over one kept connection: the head in one call, JSON
part and tensor in another. It receives the answer into one buffer, so with TLS the client also
encrypts and decrypts once, on the same machine: the ratios are of both ends together. A round
measures every case once, the servers right after each other, every second round backwards. The
report has medians over the rounds of each round's median time, and ratios to `open`. The first
answer of each case is compared byte for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import ssl
import statistics
import tempfile
import time
from pathlib import Path

from bench.run import machine
from shmserve.cli.serving import key
from shmserve.config import Settings
from shmserve.testing.running_server import ROOT, RunningServer
from tests.tls_files import make_certificates

KIB, MIB = 1 << 10, 1 << 20
SIZES = {4 * KIB: 400, 16 * MIB: 12}  # bytes of the tensor: requests of a round
SERVERS = {"open": (), "required": ("keys",), "tls": ("tls",), "both": ("keys", "tls")}


class Door:
    """A server, and the connection to this server."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, has: tuple[str, ...]) -> None:
        settings: dict[str, object] = {"model_control": "explicit", "load_models": "identity"}
        self.fields = ""
        if "keys" in has:
            settings |= {"keys_file": folder / "keys.toml", "keys_required_from": "anyone"}
            self.fields = f"shmserve-key: {(folder / 'key').read_text()}\r\n"
        if "tls" in has:
            settings |= {"http_tls_cert": folder / "server.pem"}
            settings |= {"http_tls_key": folder / "server.key"}
        server = RunningServer(ROOT / "workers", http_workers=1, grpc_processes=0, **settings)
        if "tls" in has:
            server.tls = ssl.create_default_context(cafile=folder / "ca.pem")
        stack.enter_context(server)
        self.sock = socket.create_connection((server.http_host, server.http_port), 60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server.tls is not None:
            self.sock = server.tls.wrap_socket(self.sock, server_hostname="localhost")
        stack.callback(self.sock.close)

    def request(self, nbytes: int) -> tuple[bytes, bytes]:
        """Return head and body of an inference with a tensor of `nbytes` bytes."""
        tensor = {"shape": [nbytes // 4], "datatype": "FP32"}
        document = json.dumps(
            {
                "inputs": [
                    {"name": "INPUT0", **tensor, "parameters": {"binary_data_size": nbytes}}
                ],
                "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
            }
        ).encode()
        head = (
            "POST /v2/models/identity/infer HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(document) + nbytes}\r\n{self.fields}"
            f"Inference-Header-Content-Length: {len(document)}\r\n\r\n"
        )
        return head.encode(), document + os.urandom(nbytes // 64) * 64

    def ask(self, head: bytes, body: bytes, into: bytearray) -> int:
        """Receive the answer into `into`, and return the answer's length in bytes."""
        self.sock.sendall(head)
        self.sock.sendall(body)
        view, filled, total = memoryview(into), 0, len(into)
        while filled < total:
            got = self.sock.recv_into(view[filled:])
            if not got:
                raise RuntimeError("the server has ended the connection")
            filled += got
            if total == len(into) and (end := into.find(b"\r\n\r\n", 0, filled)) >= 0:
                answered = bytes(into[:end]).lower()
                if not answered.startswith(b"http/1.1 200 "):
                    raise RuntimeError(answered.decode())
                length = answered.split(b"content-length:")
                total = end + 4 + int(length[-1].split(b"\r\n")[0])
        return total


def median_us(door: Door, nbytes: int, count: int) -> float:
    """Return one round's median time, in microseconds, after a warm-up whose answer is
    compared."""
    head, body = door.request(nbytes)
    into = bytearray(nbytes + 64 * KIB)
    total = door.ask(head, body, into)
    if into[total - nbytes : total] != body[-nbytes:]:
        raise RuntimeError("the answer is not what was sent")
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        door.ask(head, body, into)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def prepare(folder: Path) -> None:
    """Write certificates, and a file with one key."""
    make_certificates(folder, "server")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        key.new(Settings(), str(folder / "keys.toml"), "bench", ["use"], None)
    (folder / "key").write_text(printed.getvalue().strip())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.doors", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    results: dict[tuple[int, str], list[float]] = {}
    description, before = machine(), os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prepare(folder)
        doors = {name: Door(stack, folder, has) for name, has in SERVERS.items()}
        for number in range(options.rounds):
            for nbytes, count in SIZES.items():
                for name in doors if number % 2 else reversed(doors):
                    took = median_us(doors[name], nbytes, count)
                    results.setdefault((nbytes, name), []).append(took)
    print(json.dumps(description), f"load {before:.1f} to {os.getloadavg()[0]:.1f}")
    print(f"{'bytes':>9} {'server':9} {'p50 us':>9} {'(rounds)':>22} {'of open':>8}")
    for nbytes in SIZES:
        base = statistics.median(results[nbytes, "open"])
        for name in SERVERS:
            rounds = results[nbytes, name]
            p50 = statistics.median(rounds)
            span = f"({min(rounds):9.0f} .. {max(rounds):9.0f})"
            print(f"{nbytes:9} {name:9} {p50:9.0f} {span:>22} {p50 / base:8.2f}")


if __name__ == "__main__":
    main()
