"""Libraries that models load send no telemetry unless the server's user permits it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.balance.hosts import InsideServer
from tests.needs import ip
from tests.running_server import ROOT, WATCHDOG_S, wait_until
from tests.servers import python
from tests.torch.test_server import write

# If any of these is set, ONNX Runtime assumes a CI system and sends nothing anyway.
CI_VARIABLES = (
    *("CI", "TF_BUILD", "GITHUB_ACTIONS", "GITLAB_CI", "CIRCLECI", "TRAVIS", "JENKINS_URL"),
    *("CODEBUILD_BUILD_ID", "BUILDKITE", "TEAMCITY_VERSION", "APPVEYOR", "BITBUCKET_BUILD_NUMBER"),
)
RESOLVER = "192.0.2.53"
IN_NAMESPACE = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'

# Prints each packet to a non-loopback address. Each packet passes twice, once on its way out.
RECORDER = """
import ipaddress, socket
packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
packets.bind(("lo", 0))
print("records", flush=True)
while True:
    packet, address = packets.recvfrom(65535)
    target = ipaddress.ip_address(packet[16:20] if packet[0] >> 4 == 4 else packet[24:40])
    if address[2] == socket.PACKET_OUTGOING and not target.is_loopback:
        print(target, packet[28:], flush=True)
"""


class WatchedServer(InsideServer):
    """A server in a network namespace with a loopback device only, to which all packets go."""

    def __init__(self, folder: Path, name: str, **environ: str) -> None:
        self.namespace = f"shmserve-{name}-{os.getpid()}"
        self.home = folder / f"home-{name}"
        self.home.mkdir()
        self.resolvers = folder / "resolv.conf"
        self.resolvers.write_text(f"nameserver {RESOLVER}\n")
        self.records = folder / f"packets-{name}"
        inside = ("ip", "netns", "exec", self.namespace)
        super().__init__(
            folder / "repository",
            {"HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / ".cache"), **environ},
            within=(*inside, "sh", "-c", IN_NAMESPACE, str(self.resolvers)),
            http_workers=1,
        )
        self.recorder = (*inside, sys.executable, "-c", RECORDER)

    @contextlib.contextmanager
    def watched(self) -> Iterator[WatchedServer]:
        """Run the server; each packet to elsewhere is a line of `recorded`."""
        with contextlib.ExitStack() as stack:
            assert ip("netns", "add", self.namespace)
            stack.callback(ip, "netns", "delete", self.namespace)
            inside = ("-n", self.namespace)
            assert ip(*inside, "link", "set", "lo", "up")
            assert ip(*inside, "address", "add", "192.0.2.1/32", "dev", "lo")
            assert ip(*inside, "route", "add", "default", "dev", "lo", "src", "192.0.2.1")
            records = stack.enter_context(self.records.open("wb"))
            recorder = subprocess.Popen(self.recorder, stdout=records)
            stack.callback(recorder.wait, WATCHDOG_S)
            stack.callback(recorder.kill)
            wait_until(lambda: "records" in self.records.read_text(), "nothing is recorded")
            stack.enter_context(self)
            yield self

    def recorded(self) -> list[str]:
        return self.records.read_text().splitlines()[1:]

    def infer(self, model: str, **inputs: tuple[str, list[int]]) -> int:  # type: ignore[override]
        """Ask a model with zeros; return the status. `inputs`: datatype and shape by name."""
        tensors = [
            {"name": name, "datatype": datatype, "shape": shape, "data": zeros(shape)}
            for name, (datatype, shape) in inputs.items()
        ]
        return self.post(f"/v2/models/{model}/infer", {"inputs": tensors})[0]


def zeros(shape: list[int]) -> list[int]:
    count = 1
    for size in shape:
        count *= size
    return [0] * count


@pytest.mark.needs("netns", "root")
def test_libraries_send_nothing_unless_it_is_permitted(tmp_path: Path) -> None:
    """Both servers run at once: the permitted server shows how long a packet takes, and that
    packets are seen."""
    for name in ("identity", "add_sub", "digits"):  # native, Triton's python, onnxruntime
        shutil.copytree(ROOT / "workers" / name, tmp_path / "repository" / name)
    has_torch = find_spec("torch") is not None
    if has_torch:
        write(tmp_path / "repository", "double", "Double")
    quiet = WatchedServer(tmp_path, "quiet")
    permitted = WatchedServer(tmp_path, "permitted", ORT_DISABLE_TELEMETRY="0")
    for name in ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY"):  # the machine's own
        quiet.environ.pop(name, None)
    for name in CI_VARIABLES:
        quiet.environ.pop(name, None)
        permitted.environ.pop(name, None)
    with quiet.watched(), permitted.watched():
        assert quiet.infer("identity", INPUT0=("FP32", [4])) == 200
        pair = ("INT32", [16])
        assert quiet.infer("add_sub", INPUT0=pair, INPUT1=pair) == 200
        assert quiet.infer("digits", image=("FP32", [8, 8])) == 200
        if has_torch:
            assert quiet.infer("double", INPUT__0=("FP32", [4])) == 200
        wait_until(
            lambda: any("microsoft" in line for line in permitted.recorded()),
            "ONNX Runtime has looked for no address",
        )
    assert list(permitted.home.iterdir())
    assert quiet.recorded() == []
    assert list(quiet.home.iterdir()) == []
    assert quiet.leaks() == []


def test_commands_permit_no_telemetry_either(tmp_path: Path) -> None:
    """Commands such as `shmserve doctor` import the libraries in separate processes."""
    environ = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    environ |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / ".cache")}
    command = "from shmserve import cli; cli.main(['show', 'processes']); import onnxruntime"
    python("-c", command, environ=environ)
    assert list(tmp_path.iterdir()) == []
