"""The stand-in for CUDA's runtime (tests/cuda_runtime): each mistake is made once and found.

Programs call the stand-in through ctypes, without CuPy. `make test-cupy` runs the rest of
tests/cuda over the stand-in.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import standin
from tests.servers import completed

pytestmark = [
    pytest.mark.fake_cuda,
    pytest.mark.skipif(standin.active(), reason="run by `make test`"),
]

PRELUDE = """
import ctypes, mmap, os, subprocess, sys
cuda = ctypes.CDLL("libcudart.so.12")
NBYTES, TO_DEVICE, TO_HOST, BETWEEN = 1 << 16, 1, 2, 3
host = mmap.mmap(-1, NBYTES)
HOST = ctypes.addressof(ctypes.c_char.from_buffer(host))
word = ctypes.c_uint64
def malloc(nbytes=NBYTES):
    address = word()
    assert cuda.cudaMalloc(ctypes.byref(address), word(nbytes)) == 0
    return address.value
def copy(target, source, kind, stream=0, nbytes=NBYTES):
    return cuda.cudaMemcpyAsync(word(target), word(source), word(nbytes), kind, word(stream))
def free(address): return cuda.cudaFree(word(address))
def stream(flags=1):
    made = word()
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(made), flags) == 0
    return made.value
def event():
    made = word()
    assert cuda.cudaEventCreateWithFlags(ctypes.byref(made), 2) == 0
    return made.value
def pin(): return cuda.cudaHostRegister(word(HOST), word(NBYTES), 1)
def unpin(): return cuda.cudaHostUnregister(word(HOST))
def exported():
    handle = ctypes.create_string_buffer(64)
    memory = malloc()
    assert cuda.cudaIpcGetMemHandle(handle, word(memory)) == 0
    return handle.raw
class Handle(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 64)]
def opened(raw):
    address = word()
    assert cuda.cudaIpcOpenMemHandle(ctypes.byref(address), Handle.from_buffer_copy(raw), 1) == 0
    return address.value
def close(address): return cuda.cudaIpcCloseMemHandle(word(address))
def other_process():
    code = sys.argv[1].rpartition("# ---")[0]
    code += "print(exported().hex(), flush=True); sys.stdin.read()"
    started = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], stdin=-1, stdout=-1)
    return bytes.fromhex(started.stdout.readline().decode()), started
# ---
"""

# The calls, the last call's status, and the findings.
MISTAKES = {
    "nothing": ("a = malloc(); copy(a, HOST, TO_DEVICE); last = free(a)", 0, []),
    "use after free": (
        "a = malloc(); free(a); last = copy(a, HOST, TO_DEVICE)",
        1,
        ["use after free"],
    ),
    "freed while under way on another device": (
        "a = malloc(); cuda.cudaSetDevice(1); s = stream(); copy(a, HOST, TO_DEVICE, s);"
        " free(a); last = cuda.cudaStreamSynchronize(word(s))",
        700,
        ["use after free"],
    ),
    "double free": ("a = malloc(); free(a); last = free(a)", 1, ["double free"]),
    "free of a part": ("last = free(malloc() + 512)", 1, ["invalid free"]),
    "out of bounds": ("last = copy(malloc(512), HOST, TO_DEVICE)", 1, ["out of bounds"]),
    "wrong kind": ("last = copy(malloc(), HOST, TO_HOST)", 1, ["wrong kind"]),
    "overlap": (
        "a = malloc(); copy(a, a + 1, BETWEEN, 0, 100); last = cuda.cudaDeviceSynchronize()",
        700,
        ["overlap"],
    ),
    "wrong device": (
        "a = word(malloc());"
        " last = cuda.cudaMemcpyPeerAsync(a, 1, word(malloc()), 0, word(512), word(0))",
        1,
        ["wrong device"],
    ),
    "unregistered twice": ("pin(); unpin(); last = unpin()", 713, ["invalid unregister"]),
    "unregistered too early": (
        "pin(); copy(malloc(), HOST, TO_DEVICE); last = unpin()",
        700,
        ["use after unregister"],
    ),
    "closed twice": (
        "raw, other = other_process(); a = opened(raw); close(a); last = close(a);"
        " other.kill(); other.wait()",
        1,
        ["double close"],
    ),
    "closed too early": (
        "raw, other = other_process(); a = opened(raw); copy(a, HOST, TO_DEVICE); close(a);"
        " last = cuda.cudaDeviceSynchronize(); other.kill(); other.wait()",
        700,
        ["use after close", "use after free"],
    ),
    "race": (
        "a, s, t = malloc(), stream(), stream(); copy(a, HOST, TO_DEVICE, s);"
        " cuda.cudaMemsetAsync(word(a), 7, word(8), word(t)); last = cuda.cudaDeviceSynchronize()",
        0,
        ["race"],
    ),
    "no race, with an event": (
        "a, s, t, e = malloc(), stream(), stream(), event(); copy(a, HOST, TO_DEVICE, s);"
        " cuda.cudaEventRecord(word(e), word(s)); cuda.cudaStreamWaitEvent(word(t), word(e), 0);"
        " cuda.cudaMemsetAsync(word(a), 7, word(8), word(t)); last = cuda.cudaDeviceSynchronize()",
        0,
        [],
    ),
    "no race, with a wait of the host": (
        "a, s, t = malloc(), stream(), stream(); copy(a, HOST, TO_DEVICE, s);"
        " cuda.cudaStreamSynchronize(word(s)); copy(HOST, a, TO_HOST, t);"
        " last = cuda.cudaDeviceSynchronize()",
        0,
        [],
    ),
    "no race, with the default stream": (
        "a, s = malloc(), stream(0); copy(a, HOST, TO_DEVICE, s); copy(HOST, a, TO_HOST);"
        " last = cuda.cudaDeviceSynchronize()",
        0,
        [],
    ),
    "leaks": (
        "malloc(); pin(); stream(); event(); raw, other = other_process(); opened(raw);"
        " other.kill(); other.wait(); last = cuda.standin_leaks() - 5",
        0,
        ["leak"] * 5,
    ),
}


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.build(tmp_path_factory.mktemp("standin"))


def run(libraries: Path, code: str, findings: Path, **faults: object) -> str:
    """Run a program and return its output."""
    program = PRELUDE + code
    done = completed(
        sys.executable,
        "-c",
        program,
        PRELUDE,
        environ={**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        | standin.settings(findings=findings, **faults),
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(mistake: str, libraries: Path, tmp_path: Path) -> None:
    code, status, kinds = MISTAKES[mistake]
    findings = tmp_path / "findings"
    findings.touch()
    assert run(libraries, f"{code}\nprint(last)", findings) == f"{status}\n"
    lines = findings.read_text().splitlines()
    assert [line.split(" ", 1)[1].partition(":")[0] for line in lines] == kinds


def test_leaks_are_told_at_the_end_if_asked_for(libraries: Path, tmp_path: Path) -> None:
    findings = tmp_path / "findings"
    run(libraries, "malloc()", findings, leaks=1)
    assert findings.read_text().split(" ", 1)[1] == "leak: 65536 bytes of device 0, allocated\n"


def test_a_missing_wait_shows(libraries: Path, tmp_path: Path) -> None:
    code = """
host[:4] = b"here"
a, s = malloc(), stream()
copy(a, HOST, TO_DEVICE, s, 4)
copy(HOST + 8, a, TO_HOST, s, 4)
before = host[8:12]
cuda.cudaStreamSynchronize(word(s))
print(before, host[8:12])
"""
    told = run(libraries, code, tmp_path / "findings")
    assert told == f"{bytes(4)!r} {b'here'!r}\n"


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        ("cudaMalloc=2@2", [0, 2, 0]),
        ("cudaMalloc=2", [2, 2, 2]),
        ("cudaMalloc=700@2", [0, 700, 700]),
        ("cudaFree=1", [0, 0, 0]),
    ],
)
def test_calls_fail_on_demand(
    fail: str, expected: list[int], libraries: Path, tmp_path: Path
) -> None:
    code = "print([cuda.cudaMalloc(ctypes.byref(word()), word(512)) for _ in range(3)])"
    assert run(libraries, code, tmp_path / "findings", fail=fail) == f"{expected}\n"


@pytest.mark.parametrize(
    ("model", "gib", "capability", "multiprocessors"),
    [
        ("h100", 80, (9, 0), 132),
        ("h200", 141, (9, 0), 132),
        ("b300", 270, (10, 3), 148),
        ("l4", 24, (8, 9), 58),
        ("mig", 10, (9, 0), 16),
    ],
)
def test_devices_that_there_are(
    model: str,
    gib: int,
    capability: tuple[int, int],
    multiprocessors: int,
    libraries: Path,
    tmp_path: Path,
) -> None:
    code = """
unused, every, value = word(), word(), ctypes.c_int()
cuda.cudaMemGetInfo(ctypes.byref(unused), ctypes.byref(every))
told = [every.value >> 30]
for attribute in (75, 76, 16):
    cuda.cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0)
    told.append(value.value)
print(told)
"""
    told = run(libraries, code, tmp_path / "findings", model=model)
    assert told == f"{[gib, *capability, multiprocessors]}\n"


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_it_runs_under_sanitizers(sanitize: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-s", "-C", standin.RUNTIME, f"OUT={tmp_path}", f"SANITIZE={sanitize}", "check"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
