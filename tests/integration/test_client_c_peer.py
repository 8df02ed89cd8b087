"""libshmserve against a peer that breaks the protocol; its decoder; what an installation has."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from shmserve.protocol.control import client_messages as control
from shmserve.protocol.control import lane_messages as wire
from shmserve.protocol.control.lane_messages import LaneAnswer, LaneTensor
from tests.integration.c_programs import (
    GOOD,
    LIBRARY,
    MEMORY,
    STRICT,
    CProgram,
    FakePeer,
    cc,
    checks,
    run,
    sanitizer,
)
from tests.running_server import ROOT

_pack = msgspec.msgpack.encode
ANSWER = wire.encode(LaneAnswer(1, (LaneTensor("OUT", "FP32", (4,), None),)))
NESTED = b"\x91" * 5000


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checks(tmp_path_factory.mktemp("memory"), *sanitizer(MEMORY))


def told(
    program: Path,
    folder: Path,
    lane: tuple[bytes, ...],
    *,
    extra: int = 0,
    limit_ms: int = 60_000,
    **replies: bytes,
) -> dict[str, str]:
    """Return the result of each step of `checks peer` against a fake peer."""
    peer = FakePeer({**GOOD, **replies}, lane, extra)
    with peer.listening(folder) as path:
        lines = run(program, "peer", path, str(limit_ms))
    return dict(line.split(" ", 1) for line in lines)


def test_the_fake_peer_is_believed(program: Path, tmp_path: Path) -> None:
    steps = told(program, tmp_path, (ANSWER,))
    assert steps == {
        "connect": "OK",
        "describe": "OK 3 IN",
        "alloc": "OK",
        "lane": "OK",
        "infer": "OK 16",
    }


def answer(**fields: object) -> bytes:
    defaults = {"number": 1, "outputs": [["OUT", "FP32", [4], None]], "status": 200}
    values = {**defaults, "code": "", "error": "", "parameters": {}, "receipt": [], **fields}
    return _pack(["LaneAnswer", *values.values()])


def output(*fields: object) -> bytes:
    return answer(outputs=[list(fields)])


BAD_ANSWERS: dict[str, bytes] = {
    "no message": b"\xc1",
    "nested": NESTED,
    "nested field": _pack(["LaneAnswer", 1, [], 200, "", "", {}, [], True, False])[:-1] + NESTED,
    "another message": control.encode(control.Ok()),
    "an empty array": b"\x90",
    "cut": ANSWER[:-3],
    "more behind": ANSWER + b"\xc0",
    "too long": ANSWER + bytes(200_000),
    "another number": answer(number=77),
    "no number": answer(number=-1),
    "number zero": answer(number=0),
    "an array of 4 G": b"\xdd\xff\xff\xff\xff\xaaLaneAnswer",
    "a text of 4 G": b"\x92\xaaLaneAnswer\xdb\xff\xff\xff\xff",
    "4 G outputs": b"\x93\xaaLaneAnswer\x01\xdd\xff\xff\xff\xff",
    "300 outputs": answer(outputs=[["OUT", "FP32", [4], None]] * 300),
    "an unknown output": output("X", "FP32", [4], None),
    "an output that nobody asked for": output("X", "FP32", [1], bytes(4)),
    "bytes for a window": output("OUT", "FP32", [4], bytes(16)),
    "an unknown datatype": output("OUT", "FP33", [4], None),
    "a negative dimension": output("OUT", "FP32", [-4], None),
    "an endless shape": output("OUT", "FP32", [1 << 62, 1 << 62], None),
    "a high rank": output("OUT", "FP32", [1] * 100, None),
    "beyond its window": output("OUT", "FP32", [5], None),
    "other bytes than its shape": output("OUT", "FP32", [4], b"abc"),
    "texts cut short": output("OUT", "BYTES", [2], b"\1\0\0\0a\xff\xff\xff\xff"),
    "more texts than its shape": output("OUT", "BYTES", [1], b"\1\0\0\0a\0\0\0\0"),
    "texts not in its window": output("OUT", "BYTES", [1 << 40], None),
    "a name with NUL": output("OUT\0", "FP32", [4], None),
    "a status": answer(status=7),
    "300 parameters": answer(parameters={str(i): i for i in range(300)}),
    "a nested parameter": answer(parameters={"x": [1]}),
    "a receipt of text": answer(receipt=["x"]),
    "an answer of a stream": wire.encode(LaneAnswer(1, final=False)),
}


@pytest.mark.parametrize("what", BAD_ANSWERS)
def test_an_answer_that_is_not_believed(program: Path, tmp_path: Path, what: str) -> None:
    steps = told(program, tmp_path, (BAD_ANSWERS[what],))
    assert steps["infer"] == "PROTOCOL"


def test_what_newer_servers_may_append_is_ignored(program: Path, tmp_path: Path) -> None:
    more = _pack(
        [
            "LaneAnswer",
            1,
            [["OUT", "FP32", [4], None, {"new": [1]}]],
            200,
            "",
            "",
            {},
            [1, 2, 3, 4, 5, 6, 7, [8]],
            True,
            False,
            [[{}], "new"],
        ]
    )
    steps = told(program, tmp_path, (more,))
    assert steps["infer"] == "OK 16"
    assert told(program, tmp_path, (wire.encode(LaneAnswer(1)),))["infer"] == "OK"
    failed = wire.encode(LaneAnswer(1, (), 503, "A_NEWER_CODE", "é" * 600))
    assert told(program, tmp_path, (failed,))["infer"] == "UNKNOWN"


def test_descriptors_are_closed(program: Path, tmp_path: Path) -> None:
    """A lane's packets may not have descriptors, and replies have those that are expected."""
    steps = told(program, tmp_path, (ANSWER,), extra=1)
    assert (steps["connect"], steps["describe"]) == ("OK", "OK 3 IN")
    assert steps["lane"] == "PROTOCOL", "two descriptors"
    assert told(program, tmp_path, (ANSWER,), extra=200)["connect"] == "PROTOCOL"


BAD_REPLIES: dict[str, tuple[str, str, bytes]] = {
    "a hello that is no message": ("ClientHello", "connect", NESTED),
    "a hello without version": ("ClientHello", "connect", _pack(["ServerHello"])),
    "a hello of another kind": ("ClientHello", "connect", _pack(["ServerHello", "1"])),
    "a hello too long": ("ClientHello", "connect", bytes(200_000)),
    "a lane without fields": ("OpenLane", "lane", _pack(["LaneOpened", "1"])),
    "a lane of no time": ("OpenLane", "lane", _pack(["LaneOpened", "1", "m", True, -1])),
    "a lane of text": ("OpenLane", "lane", _pack(["LaneOpened", "1", "m", True, "1"])),
    "a failure without text": ("OpenLane", "lane", _pack(["Failed", "NOT_FOUND"])),
    "a description": ("DescribeModel", "describe", _pack(["ModelDescribed", "1", [], []])),
    "a description's rank": (
        *("DescribeModel", "describe"),
        _pack(["ModelDescribed", "1", [["IN", "FP32", [1] * 100]], [], False]),
    ),
    "a description's inputs": (
        *("DescribeModel", "describe"),
        _pack(["ModelDescribed", "1", [["IN", "FP32", [1]]] * 300, [], False]),
    ),
    "a description cut short": ("DescribeModel", "describe", GOOD["DescribeModel"][:-2]),
    "a registration": ("RegisterMemfd", "alloc", _pack(["LaneOpened", "1", "m", True, 1])),
}


@pytest.mark.parametrize("what", BAD_REPLIES)
def test_a_reply_that_is_not_believed(program: Path, tmp_path: Path, what: str) -> None:
    question, step, reply = BAD_REPLIES[what]
    peer = FakePeer({**GOOD, question: reply}, (ANSWER,))
    with peer.listening(tmp_path) as path:
        lines = run(program, "peer", path)
    assert f"{step} PROTOCOL" in lines


def test_failures_have_code_and_text(program: Path, tmp_path: Path) -> None:
    missing = control.encode(control.Failed("NOT_FOUND", "no such model"))
    other = control.encode(control.ServerHello(2, True))
    steps = told(program, tmp_path, (ANSWER,), OpenLane=missing, DescribeModel=missing)
    assert (steps["describe"], steps["lane"]) == ("NOT_FOUND", "NOT_FOUND")
    assert told(program, tmp_path, (ANSWER,), ClientHello=other) == {"connect": "UNIMPLEMENTED"}
    none = control.encode(control.ServerHello(1, False))
    steps = told(program, tmp_path, (ANSWER,), ClientHello=none)
    assert (steps["describe"], steps["lane"]) == ("UNIMPLEMENTED", "UNIMPLEMENTED")


def test_time_limits_hold_where_nothing_is_answered(program: Path, tmp_path: Path) -> None:
    steps = told(program, tmp_path, (), limit_ms=1000, DescribeModel=b"")
    assert (steps["describe"], steps["infer"]) == ("DEADLINE_EXCEEDED",) * 2
    steps = told(program, tmp_path, (), limit_ms=1000, OpenLane=b"", RegisterMemfd=b"")
    assert (steps["alloc"], steps["lane"]) == ("DEADLINE_EXCEEDED",) * 2
    steps = told(program, tmp_path, (), limit_ms=1000, ClientHello=b"")
    assert steps == {"connect": "DEADLINE_EXCEEDED"}


def test_a_lane_that_ends(program: Path, tmp_path: Path) -> None:
    """A request with memory is not sent again; one that was moved is, to a lane that moves it
    again, until its time is over."""
    assert told(program, tmp_path, (b"",))["infer"] == "ABORTED"
    moved = wire.encode(LaneAnswer(1, status=503, code="UNAVAILABLE", moved=True))
    for lane in ((moved,), ()):
        steps = told(program, tmp_path, lane, limit_ms=1000)
        assert steps["infer"] == "DEADLINE_EXCEEDED"
    with FakePeer(GOOD, (moved,)).listening(tmp_path) as path:
        assert run(program, "peer_cancelled", path) == ["infer CANCELLED"]


def test_the_code_is_that_of_the_error(program: Path, tmp_path: Path) -> None:
    full = control.encode(control.Failed("RESOURCE_EXHAUSTED", "all lanes are taken"))
    with FakePeer({**GOOD, "OpenLane": full}, ()).listening(tmp_path) as path:
        assert run(program, "peer_codes", path) == ["lane RESOURCE_EXHAUSTED RESOURCE_EXHAUSTED"]
    with FakePeer({**GOOD, "RegisterMemfd": b""}, ()).listening(tmp_path) as path:
        assert run(program, "peer_memory", path) == ["infer DEADLINE_EXCEEDED"] * 2


def test_regions_are_forgotten_by_the_next_connection(program: Path, tmp_path: Path) -> None:
    """A registration without reply, and a buffer freed without connection."""
    replies = {**GOOD, "RegisterMemfd": b""}
    peer = FakePeer(replies, ())
    with peer.listening(tmp_path) as path, CProgram(program, "peer_regions", path) as regions:
        assert regions.line() == "first DEADLINE_EXCEEDED"
        replies["RegisterMemfd"] = GOOD["RegisterMemfd"]
        regions.tell()
        assert regions.line() == "second OK"
        peer.hang_up()
        regions.tell()
        regions.end()
    questions = [q for q in peer.questions if q[0] in {"RegisterMemfd", "Unregister"}]
    first, second = (q[1] for q in questions if q[0] == "RegisterMemfd")
    assert [(q[0], q[1]) for q in questions] == [
        ("RegisterMemfd", first),
        ("Unregister", [first]),
        ("RegisterMemfd", second),
        ("Unregister", [second]),
    ]


def test_an_older_server_in_the_place_of_another(program: Path, tmp_path: Path) -> None:
    replies = dict(GOOD)
    peer = FakePeer(replies, ())
    with peer.listening(tmp_path) as path, CProgram(program, "peer_older", path) as older:
        assert older.line() == "connected"
        replies["ClientHello"] = control.encode(control.ServerHello(1))
        del replies["DescribeModel"], replies["OpenLane"]
        for line in ("describe UNIMPLEMENTED", "lane UNIMPLEMENTED"):
            peer.hang_up()
            older.tell()
            assert older.line() == line
        older.end()


def test_a_child_process_leaves_all_to_its_parent(program: Path, tmp_path: Path) -> None:
    peer = FakePeer(GOOD, (wire.encode(LaneAnswer(1)),))
    with peer.listening(tmp_path) as path, CProgram(program, "peer_fork", path) as forked:
        assert forked.line() == "child ended"
        assert not any(question[0] == "Unregister" for question in peer.questions)
        forked.tell()
        forked.end()
    assert [q[0] for q in peer.questions].count("ClientHello") == 1
    assert peer.questions[-1][0] == "Unregister"


# ------------------------------------------------------------------------------------- the decoder


def built(folder: Path, name: str) -> Path:
    """Build a program that has the library's source in it."""
    program = folder / name
    strict = ("-std=c11", "-Wall", "-Werror", "-O1", "-g", *sanitizer(MEMORY))
    cc(*strict, "-o", program, LIBRARY / f"tests/{name}.c", "-pthread")
    return program


def test_the_decoder_survives_what_comes(tmp_path: Path) -> None:
    """`make fuzz-c` tries ten million inputs."""
    (line,) = run(built(tmp_path, "fuzz_decoder"), "50000", "7")
    inputs, accepted = map(int, re.findall(r"\d+", line))
    assert inputs == 50000
    assert 1000 < accepted < inputs, "inputs are near to what is valid"


def test_polling_before_sleeping(tmp_path: Path) -> None:
    assert run(built(tmp_path, "looks")) == []


ENDS = (
    *("answers", "arguments", "behind", "cancel", "credit", "for_ever", "fork", "late"),
    *("lost_memory", "no_credit", "no_descriptor", "no_memory", "patience", "renew"),
    *("signals", "stuck", "texts", "time", "unused"),
)


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_lanes(tmp_path: Path, name: str) -> None:
    assert run(built(tmp_path, "ends"), name) == []


# ---------------------------------------------------------------------------------- what is built


def exported(library: Path) -> set[str]:
    """Return the names that a shared library exports, each with its version."""
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {line.split()[2] for line in lines if line.split()[1] != "A"}


def test_the_library_exports_what_is_written_down(tmp_path: Path) -> None:
    """A name that goes, or changes its version, breaks programs that were built before."""
    text = (LIBRARY / "shmserve.map").read_text()
    version = text.split()[0]
    named = set(re.findall(r"^ +(shmserve_\w+);", text, re.MULTILINE))
    header = (LIBRARY / "shmserve.h").read_text()
    declared = set(re.findall(r"^SHMSERVE_API [^;]*?(shmserve_\w+)\(", header, re.MULTILINE))
    assert named == declared
    script = f"-Wl,--version-script={LIBRARY / 'shmserve.map'},-z,defs"
    library = tmp_path / "libshmserve.so.0"
    cc(
        *STRICT,
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-shared",
        script,
        "-o",
        library,
        LIBRARY / "shmserve.c",
    )
    assert exported(library) == {f"{name}@@{version}" for name in named}


@pytest.mark.parametrize(
    "compiler", ["cc", pytest.param("clang", marks=pytest.mark.needs("clang"))]
)
@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_there_are_no_warnings(tmp_path: Path, compiler: str, level: str) -> None:
    strict = (*STRICT, "-Wshadow", "-Wpointer-arith", "-Wstrict-prototypes", level)
    cc(*strict, "-c", "-o", tmp_path / "x.o", LIBRARY / "shmserve.c", compiler=compiler)
    user = tmp_path / "user.cpp"
    user.write_text('#include "shmserve.h"\nint main() { return !shmserve_version(); }\n')
    plain = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I", LIBRARY)
    cc(*plain, "-x", "c++", "-fsyntax-only", user, compiler=compiler)


USER = """
#include <shmserve.h>
#include <stdio.h>
int main(void) {
    shmserve_error error;
    shmserve_client *client;
    shmserve_options options = {};
    options.path = "/nowhere";
    if (shmserve_connect(&options, &client, &error) != SHMSERVE_UNAVAILABLE) return 1;
    return puts(shmserve_version()) < 0;
}
"""
PROJECT = """
cmake_minimum_required(VERSION 3.16)
project(user LANGUAGES C CXX)
find_package(shmserve 0.2 REQUIRED)
add_executable(in_c user.c)
target_link_libraries(in_c PRIVATE shmserve::shmserve)
add_executable(in_cxx user.cpp)
target_link_libraries(in_cxx PRIVATE shmserve::static)
"""


@pytest.mark.needs("cmake", "pkg-config")
def test_a_project_uses_an_installation(tmp_path: Path) -> None:
    prefix, user = tmp_path / "prefix", tmp_path / "user"
    user.mkdir()
    (user / "user.c").write_text(USER)
    (user / "user.cpp").write_text(USER.replace("shmserve.h>", "shmserve.hpp>"))
    (user / "CMakeLists.txt").write_text(PROJECT)
    built = tmp_path / "built"
    run("cmake", "-S", LIBRARY, "-B", built, "-DCMAKE_INSTALL_LIBDIR=lib")
    run("cmake", "--build", built)
    run("cmake", "--install", built, "--prefix", prefix)  # another than configured
    run("cmake", "-S", user, "-B", user / "built", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", user / "built")
    assert run(user / "built/in_c") == run(user / "built/in_cxx") == ["0.2.0"]
    found = {**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    (flags,) = run("pkg-config", "--cflags", "--libs", "shmserve", environ=found)
    (told,) = run("pkg-config", "--variable=prefix", "shmserve", environ=found)
    assert os.path.samefile(told, prefix)
    compilers = (
        ("cc", "user.c"),
        ("c++", "user.cpp"),
        ("clang", "user.c"),
        ("clang++", "user.cpp"),
    )
    for compiler, source in compilers if shutil.which("clang") else compilers[:2]:
        standard = ("-std=c++17",) * compiler.endswith("++")
        cc(*standard, "-o", user / "linked", user / source, *flags.split(), compiler=compiler)
        found = {**os.environ, "LD_LIBRARY_PATH": str(prefix / "lib")}
        assert run(user / "linked", environ=found) == ["0.2.0"]


def test_make_builds_it(tmp_path: Path) -> None:
    """Also without CMake."""
    for cmake in ("cmake", ""):
        folder = tmp_path / (cmake or "plain")
        run(
            "make",
            "-C",
            ROOT,
            "--no-print-directory",
            "client-c",
            f"CLIENT_C={folder}",
            f"CMAKE={cmake}",
        )
        assert {"libshmserve.a", "libshmserve.so"} <= set(os.listdir(folder))
