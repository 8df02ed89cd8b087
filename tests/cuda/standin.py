"""The real CuPy over the stand-in for CUDA's runtime (tests/cuda_runtime/README.md).

    python -m tests.cuda.standin --cupy .cupy12 PROGRAM ARGUMENTS

Runs a program and its children over the stand-in; `pytest tests/cuda`, for example. Compiled
kernels are kept in CuPy's folder. Prints the mistakes that were found; any mistake is a failure.
"""

import argparse
import ctypes
import functools
import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RUNTIME = Path(__file__).parents[1] / "cuda_runtime"
_ACTIVE = "FAKE_CUDA_STANDIN"  # the folder of the libraries


def build(folder: Path) -> Path:
    """Return the stand-in's libraries in `folder`; compile them if missing."""
    command = ("make", "-s", "-j2", "-C", RUNTIME, f"OUT={folder.resolve()}")
    subprocess.run(command, check=True, timeout=300)
    return folder.resolve()


def environment(libraries: Path, cupy: Path | None = None, **faults: object) -> dict[str, str]:
    """Return variables for a process over the stand-in.

    `cupy`: folder with CuPy (pip's --target), if the interpreter lacks CuPy. `faults`: see
    README.md, without their prefix, in lower case.
    """
    cuda = 12
    paths = [RUNTIME / "site"]
    if cupy is not None:
        paths.append(cupy.resolve())
        cuda = 13 if list(cupy.glob("cupy_cuda13x-*")) else 12
    made_for = hashlib.sha256((libraries / "libcuda.so.1").read_bytes()).hexdigest()[:8]
    kernels = (cupy or libraries) / "kernels" / made_for
    told = {
        "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", libraries),
        "PYTHONPATH": _before("PYTHONPATH", *paths),
        "CUDA_PATH": str(RUNTIME),
        "CUPY_CACHE_DIR": str(kernels.resolve()),
        "CUPY_ACCELERATORS": "",
        "FAKE_CUDA_VERSION": str(cuda),
        _ACTIVE: str(libraries),
    }
    return told | settings(**faults)


def settings(**faults: object) -> dict[str, str]:
    return {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in faults.items()}


def _before(name: str, *paths: Path) -> str:
    return os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(name)])])


def active() -> bool:
    """Return True if this process and its children run over the stand-in."""
    return _ACTIVE in os.environ


class Books:
    """The stand-in's state of this process, by the names of the fake's `cupy._fake`."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        library.standin_used.restype = library.standin_copied.restype = ctypes.c_size_t
        library.standin_pinned.restype = library.standin_allocation.restype = ctypes.c_uint64
        self._library = library

    def used(self, device: int) -> int:
        return int(self._library.standin_used(device))

    @property
    def pinned(self) -> dict[int, tuple[int, int]]:
        return {a: (n, flags) for a, n, flags in self._listed(self._library.standin_pinned)}

    @property
    def allocations(self) -> dict[int, SimpleNamespace]:
        listed = self._listed(self._library.standin_allocation)
        return {a: SimpleNamespace(base=a, nbytes=n, device=device) for a, n, device in listed}

    @staticmethod
    def _listed(call: Any) -> list[tuple[int, int, int]]:
        nbytes, more, found = ctypes.c_size_t(), ctypes.c_int(), list[tuple[int, int, int]]()
        while address := call(len(found), ctypes.byref(nbytes), ctypes.byref(more)):
            found.append((address, nbytes.value, more.value))
        return found

    @property
    def devices(self) -> list[SimpleNamespace]:
        """Return the visible devices, by the host's numbers."""
        found, index, part = list[SimpleNamespace](), ctypes.c_int(), ctypes.c_int()
        while self._library.standin_device(len(found), ctypes.byref(index), ctypes.byref(part)):
            found.append(SimpleNamespace(index=index.value, part=part.value))
        return found

    @property
    def _queues(self) -> dict[int, SimpleNamespace]:
        """Return the pending operations, of all streams together."""
        return {0: SimpleNamespace(operations=int(self._library.standin_waiting()))}

    @property
    def contexts(self) -> set[int]:
        mask = self._library.standin_contexts()
        return {device for device in range(16) if mask >> device & 1}

    @property
    def copied(self) -> Counter[int]:
        """Bytes, by cudaMemcpyKind."""
        return Counter({kind: int(self._library.standin_copied(kind)) for kind in range(4)})

    def findings(self) -> tuple[int, str]:
        """Return the number of findings, and the last finding."""
        text = ctypes.create_string_buffer(512)
        return int(self._library.standin_findings(text, len(text))), text.value.decode()

    def leaks(self) -> int:
        """Return the number of leaked objects; each leak is a finding."""
        return int(self._library.standin_leaks())

    def reset(self) -> None:
        """Make the process new to CUDA and discard all its state."""
        self._library.standin_reset()


@functools.cache
def imported() -> Any:
    """Import CuPy with two devices visible, because CuPy asks for their number only once."""
    import cupy

    for device in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(device):
            cupy.empty(1)
            # of the first test's pool, which stays until it is collected
            cupy.get_default_memory_pool().free_all_blocks()
    return cupy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.standin", description=__doc__)
    parser.add_argument("--cupy", type=Path, required=True, help="the folder CuPy is installed in")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    libraries = build(options.cupy / "standin")
    findings = libraries / "findings"
    findings.write_text("")
    variables = environment(libraries, options.cupy, findings=findings)
    status = subprocess.run(options.command, env=os.environ | variables, check=False).returncode
    told = Counter(line.partition(" ")[2] for line in findings.read_text().splitlines())
    for line, count in told.most_common():
        print(f"the stand-in has found {count} times: {line}")
    return status or bool(told)


if __name__ == "__main__":
    sys.exit(main())
