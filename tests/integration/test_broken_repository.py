"""A repository in which eight of twenty models are broken in eight ways. The other models serve."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conformance_runner import _LEAKS
from tests.running_server import ROOT, RunningServer, wait_until
from tests.servers import SMALL, Starting, only, run_shmserve

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.unit.executor.test_onnx_backend import adder

SERVER: dict[str, Any] = {
    **only("*"), **SMALL
}  # fmt: skip
GOOD = [f"good{number:02}" for number in range(12)]
CONFIG = (ROOT / "tests/repositories/basic/echo/config.pbtxt").read_text()
WORKING = (ROOT / "tests/repositories/basic/echo/1/model.py").read_text()
AT_LOAD = """
import os, signal, time

class Model:
    def __init__(self, context):
        {0}

    def infer(self, request):
        return {{}}
"""
HOLD = AT_LOAD.format("time.sleep(3600)")
CRASH = AT_LOAD.format("os.kill(os.getpid(), signal.SIGSEGV)")

# Texts for each kind of break: in the index and the log (the same text), by `shmserve check`, and
# with `--load`. "" where the check finds no error.
BROKEN = {
    "syntax": ("never closed", "1/model.py, line 1: '(' was never closed"),
    "missing": ("has no file 'model.py'", "has no file 'model.py'"),
    "dtype": ("TYPE_FLOAT33", "TYPE_FLOAT33"),
    "import": ("No module named 'nothing_of_that_name'", ""),
    "crash": ("ended 3 times while it loaded the model: signal SIGSEGV", ""),
    "endless": ("", ""),
    "count": ("input 'Z' is not in the ONNX model", "input 'Z' is not in the ONNX model"),
    "garbage": ("", "garbage/1/model.onnx is not an ONNX model (unknown wire type 6)"),
}
LOADED = {"crash": "SIGSEGV", "garbage": "is not an ONNX model"}


def make(folder: Path, config: str = CONFIG, source: str | None = WORKING) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    if source is not None:
        (folder / "1/model.py").write_text(source)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in GOOD:
        make(tmp_path / name)
    make(tmp_path / "syntax", source="class Model(")
    make(tmp_path / "missing", source=None)
    make(tmp_path / "dtype", CONFIG.replace("TYPE_FP32", "TYPE_FLOAT33"))
    make(tmp_path / "import", source="import nothing_of_that_name")
    make(tmp_path / "crash", source=CRASH)
    make(tmp_path / "endless", source=HOLD)
    tensors = ", ".join(f'{{ name: "{n}" data_type: TYPE_FP32 dims: [ 4 ] }}' for n in "XZ")
    count = f'backend: "onnxruntime"\ninput [ {tensors} ]\n'
    adder(tmp_path / "count", [4], config=count)
    garbage = make(tmp_path / "garbage", 'backend: "onnxruntime"\n', None)
    (garbage / "1/model.onnx").write_bytes(b"not a model")
    return tmp_path


def index(server: RunningServer) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in server.index()}


def states(server: RunningServer) -> dict[str, str]:
    """Return the state of each model, or {} while the server does not answer."""
    try:
        return {name: row.get("state", "LOADING") for name, row in index(server).items()}
    except (OSError, ValueError, AssertionError):
        return {}


def test_the_broken_are_told_apart_and_the_others_serve(repository: Path) -> None:
    # the model `endless` will not end
    with Starting(repository, **SERVER, drain_timeout_s=1) as server:

        def settled() -> bool:
            found = states(server)
            loading = [name for name, state in found.items() if state == "LOADING"]
            return len(found) == 20 and loading == ["endless"]

        wait_until(settled, "the models did not settle")
        found = index(server)
        reasons = [found[name]["reason"] for name in BROKEN if name != "endless"]
        wait_until(lambda: all(map(server.log().__contains__, reasons)), "reasons are not logged")
        server.wait_log("Traceback")
        for name, (reason, _) in BROKEN.items():
            if name == "endless":  # the next test waits for the end of the load
                continue
            assert found[name]["state"] == "UNAVAILABLE", name
            assert reason in found[name]["reason"], name
            assert found[name]["reason"], name
            shown = found[name]["reason"].replace("'model.py'", "")
            assert not _LEAKS.search(shown), found[name]
            assert str(repository) not in found[name]["reason"]
        for name in GOOD:
            assert found[name]["state"] == "READY"
            document = {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [7]}]}
            status, answer = server.infer(name, document)
            assert (status, answer["outputs"][0]["data"]) == (200, [7.0])
        assert not server.ready()
        starts = "started executor instance=crash/1/0"
        wait_until(lambda: server.log().count(starts) == 3, "three starts, no restart loop")
        shutil.copy(repository / GOOD[0] / "1/model.py", repository / "crash/1/model.py")
        assert server.control("load", "crash") == (200, None)


def test_what_does_not_load_in_time_is_told(tmp_path: Path) -> None:
    make(tmp_path / "endless", source=HOLD)
    with Starting(tmp_path, **SERVER, load_timeout_s=2) as server:
        wait_until(lambda: states(server) == {"endless": "UNAVAILABLE"}, "it goes on")
        reason = "the model did not load within 2 s"
        assert index(server)["endless"]["reason"] == reason
        server.wait_log(reason)
        assert not server.ready()
        assert server.control("unload", "endless") == (200, None)
        assert server.ready(), "unloaded models do not count"


@pytest.mark.parametrize("load", [False, True])
def test_check_tells_what_it_can_find(repository: Path, load: bool) -> None:
    for name in [*GOOD[1:], *(["endless"] if load else [])]:
        shutil.rmtree(repository / name)
    lines = check(repository, load)
    assert lines[GOOD[0]].startswith("ok")
    for name in BROKEN.keys() & lines.keys():
        served, checked = BROKEN[name]
        reason = LOADED.get(name, served) if load else checked
        if name in ("dtype", "import", "syntax") and reason:  # operators are told where
            assert str(repository / name) in lines[name]
        assert lines[name].startswith("FAIL" if load or checked else "ok"), lines[name]
        assert reason in lines[name]
    assert len(lines) == len(BROKEN) + (not load)


def test_check_gives_up_what_does_not_load(tmp_path: Path) -> None:
    make(tmp_path / "endless", source=HOLD)
    line = check(tmp_path, True, load_timeout_s=1)["endless"]
    assert line.startswith("FAIL")
    assert "did not load within 1 s" in line


def check(repository: Path, load: bool, **settings: Any) -> dict[str, str]:
    """Return the line that `shmserve check` prints for each model. The check must fail."""
    server = RunningServer(repository, **settings)  # only for the environment
    done = run_shmserve("check", *(["--load"] if load else []), environ=server.environ)
    assert done.returncode == 1
    return {line.split()[2].partition("/")[0].rstrip(":"): line for line in
            done.stdout.splitlines() if " model " in line}  # fmt: skip
