"""Steps of a GPU day: commands in separate processes, each with a time limit."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu_day.evidence import Evidence, NotRun
from tests.running_server import marked

ROOT = Path(__file__).resolve().parents[2]
_MARK = "GPU_DAY_STEP"  # variable in the environment of every process that a step starts
# plug-ins installed on the host are not under test
_PYTEST = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
_TO_END_S = 20.0  # for a step that was told to end
_TAIL = 4000  # characters


@dataclass(frozen=True)
class Step:
    """`command`: Python's arguments, given the evidence, the folder and the limit in seconds.
    `reads`: function that puts the step's output into the evidence, and raises any exception if
    the output is unusable. `on`: the kinds of CUDA on which the step can run."""

    name: str
    what: str
    limit_s: float
    command: Callable[[Evidence, Path, float], list[str]]
    reads: Callable[[Evidence, Path], None]
    on: tuple[str, ...] = ("real", "stand-in", "fake")
    why_not: str = ""


@dataclass
class Outcome:
    """`status`: "done", "failed", "stopped" (at the limit), "not run"."""

    name: str
    what: str
    status: str = "not run"
    reason: str = ""
    took_s: float = 0.0
    limit_s: float = 0.0
    exit_status: int | None = None
    output: str = field(default="", repr=False)


def take(step: Step, evidence: Evidence, folder: Path, limit_s: float) -> Outcome:
    """Run the step if this machine can run it, and read the step's output."""
    outcome = Outcome(step.name, step.what, limit_s=round(min(step.limit_s, limit_s), 1))
    if step.on and evidence.kind not in step.on:
        why = {"none": _no_device(evidence)}.get(evidence.kind, step.why_not)
        outcome.reason = why or f"not on {evidence.kind} CUDA"
    elif outcome.limit_s < 5:
        outcome.reason = "no time was left"
    else:
        _run(step, evidence, folder, outcome)
        try:
            step.reads(evidence, folder)
        except NotRun as ex:
            outcome.reason, outcome.status = str(ex), "not run"
        except Exception as ex:
            found = f"{type(ex).__name__}: {ex}"
            outcome.reason = outcome.reason or f"it left nothing that can be read ({found})"
            outcome.status = "stopped" if outcome.status == "stopped" else "failed"
    if outcome.reason:
        name = "" if evidence.kind == "none" else f"step {step.name}: "
        evidence.missing.setdefault(step.name, f"{name}{outcome.reason}")
    return outcome


def _no_device(evidence: Evidence) -> str:
    return evidence.missing.get("devices", "no CUDA device")


def _run(step: Step, evidence: Evidence, folder: Path, outcome: Outcome) -> None:
    mark, begin = uuid.uuid4().hex, time.monotonic()
    log = folder / f"{step.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *step.command(evidence, folder, outcome.limit_s)],
            cwd=ROOT, env={**os.environ, **_PYTEST, _MARK: mark}, stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            # A shell ignores SIGINT for background commands, and Python would inherit this
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            outcome.exit_status = process.wait(outcome.limit_s)
            outcome.status = "failed" if outcome.exit_status else "done"
        except subprocess.TimeoutExpired:
            outcome.status, outcome.reason = "stopped", f"not done after {outcome.limit_s:g} s"
            process.send_signal(signal.SIGINT)  # Python then ends the processes it has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TO_END_S)
        finally:
            for pid in marked(f"{_MARK}={mark}"):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    outcome.took_s = round(time.monotonic() - begin, 1)
    outcome.output = log.read_text(errors="replace")[-_TAIL:]


# --------------------------------------------------------------------------- what they leave


def _json_line(evidence: Evidence, folder: Path, name: str) -> Any:
    """Read the last JSON line of a step's output into the evidence."""
    for line in reversed((folder / f"{name}.log").read_text().splitlines()):
        if line.startswith(("{", "[")):
            evidence.documents[name] = msgspec.json.decode(line.encode())
            return evidence.documents[name]
    raise ValueError("no JSON in its output")


def _read_devices(evidence: Evidence, folder: Path) -> None:
    facts = _json_line(evidence, folder, "devices")
    why = facts["error"] or ("" if facts["devices"] else "CUDA shows no device")
    if why:
        del evidence.documents["devices"]
        evidence.missing["devices"] = f"no CUDA device: {why}"
    else:
        evidence.kind = kind_of(facts, os.environ)


def kind_of(facts: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return the kind of CUDA on this machine."""
    if facts["cupy"] == "0-fake":
        return "fake"
    return "stand-in" if environ.get("FAKE_CUDA_STANDIN") else "real"


def _read_bench(name: str) -> Callable[[Evidence, Path], None]:
    def read(evidence: Evidence, folder: Path) -> None:
        document = msgspec.json.decode((folder / f"{name}.json").read_bytes())
        if not document["parts"]:
            raise ValueError("no part of it was done")
        evidence.documents[name] = document

    return read


def _read_tests(name: str) -> Callable[[Evidence, Path], None]:
    def read(evidence: Evidence, folder: Path) -> None:
        cases = ElementTree.parse(folder / f"{name}.xml").iter("testcase")
        for case in cases:
            function = re.sub(r"\[.*", "", case.get("name", ""), flags=re.DOTALL)
            file = case.get("classname", "").replace(".", "/") + ".py"
            evidence.tests.setdefault(f"{file}::{function}", []).append(_outcome(case))

    return read


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error"):
            return "failed"
        if child.tag == "skipped":
            return f"skipped: {child.get('message', '')}"
    return "passed"


def _read_torch(evidence: Evidence, folder: Path) -> None:
    before = {name: len(outcomes) for name, outcomes in evidence.tests.items()}
    _read_tests("torch")(evidence, folder)
    found = [o for n, outcomes in evidence.tests.items() for o in outcomes[before.get(n, 0) :]]
    if "passed" not in found and "failed" not in found:
        raise NotRun(next(iter(found), "no test of it can run here"))
    number = f"{found.count('passed')} of {len(found)} tests"
    failed = ["tests failed"] if "failed" in found else []
    evidence.documents["torch"] = {"number": number, "problems": failed}


def _read_onnxruntime(evidence: Evidence, folder: Path) -> None:
    told = _json_line(evidence, folder, "onnxruntime")
    if told.get("not_run"):
        del evidence.documents["onnxruntime"]
        raise NotRun(told["not_run"])


# ------------------------------------------------------------------------------ the commands


def _bench(name: str, *parts: str) -> Callable[[Evidence, Path, float], list[str]]:
    def command(_: Evidence, folder: Path, __: float) -> list[str]:
        output = ["--output", str(folder / f"{name}.json")]
        return ["-m", "bench.gpu", "--quick", "--only", ",".join(parts), *output]

    return command


def _pytest(
    name: str, marks: str, path: str, *leaving: str
) -> Callable[[Evidence, Path, float], list[str]]:
    """Return a command that runs pytest; `leaving`: files to leave out."""

    def command(evidence: Evidence, folder: Path, limit_s: float) -> list[str]:
        plain = ["-m", "pytest", "-p", "pytest_timeout", "-q", "-W", "default", "-m", marks]
        how = ["--real-cuda"] if evidence.kind == "real" else _side_by_side()
        # early enough to report the results
        ends = f"--session-timeout={max(5.0, limit_s - 15):g}"
        report = [f"--junitxml={folder / name}.xml", ends, "-o", "faulthandler_timeout=60"]
        return [*plain, *how, *report, *(f"--ignore={file}" for file in leaving), path]

    return command


def _side_by_side() -> list[str]:
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-p", "xdist.plugin", "-n", "2", "--dist", "loadfile"]


OF_THEMSELVES = "tests/cuda/test_bench.py", "tests/cuda/test_gpu_day.py"
PRECOMPILED = "its kernels are precompiled CUDA code, which no stand-in can run"
STEPS = (
    Step("devices", "devices, and trials of each", 60,
         lambda *_: ["-m", "shmserve.cuda.device_trials", "devices"], _read_devices, on=()),
    Step("doctor", "`shmserve doctor --gpu`", 60,
         lambda *_: ["-m", "shmserve", "doctor", "--gpu", "--json"],
         lambda evidence, folder: _json_line(evidence, folder, "doctor")),
    Step("bench", "copies, regions, overlap", 130,
         _bench("bench", "copies", "regions", "overlap"), _read_bench("bench")),
    Step("deaths", "clients and executors killed -9 with the GPU's memory", 90,
         _bench("deaths", "deaths", "executors"), _read_bench("deaths")),
    Step("rounds", "register, infer, unregister", 90, _bench("rounds", "rounds"),
         _read_bench("rounds")),
    Step("onnxruntime", "ONNX Runtime's CUDA provider behind a server", 60,
         lambda *_: ["-m", "bench.gpu_day.onnx_model"], _read_onnxruntime,
         on=("real",), why_not=PRECOMPILED),
    Step("torch", "the pytorch backend's tests", 60,
         _pytest("torch", "torch and gpu", "tests/torch"), _read_torch,
         on=("real",), why_not=PRECOMPILED),
    Step("tests", "the tests of CUDA", 420,
         _pytest("tests", "not torch", "tests/cuda", *OF_THEMSELVES), _read_tests("tests")),
)  # fmt: skip
