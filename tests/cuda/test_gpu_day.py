"""`python -m bench.gpu_day` checks the claims of docs/gpu.md and reports on all."""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_day import page
from bench.gpu_day.claims import CLAIMS
from bench.gpu_day.evidence import Evidence, decided
from bench.gpu_day.steps import Step, kind_of, take
from tests.cuda import standin
from tests.servers import completed

ROOT = Path(__file__).parents[2]
ID = re.compile(r"<!-- (G\d+) -->")
FACTS = {"cupy": "14", "runtime": 12080, "driver": 12080, "devices": [{"name": "GPU"}]}


def sections() -> str:
    """Return the sections with claims; the other sections contain commands to type."""
    text = (ROOT / "docs/gpu.md").read_text()
    return text[text.index("## What is needed") : text.index("## Testing and measuring")]


def blocks() -> Iterator[str]:
    """Paragraphs, points of lists, rows of tables; no headings, code, or heads of tables."""
    for part in re.split(r"\n\n|\n(?=- )|\n(?=\|)", sections()):
        line = part.strip()
        head = re.search(rf"{re.escape(part)}\n\|---", sections()) is not None
        if line and not line.startswith(("## ", "|---")) and not head and part[:4] != "    ":
            yield line


def plain(text: str) -> str:
    return " ".join(ID.sub("", text).split())


def test_every_claim_of_the_document_is_in_the_report() -> None:
    assert ID.findall(sections()) == [claim.id for claim in CLAIMS]
    without = [block for block in blocks() if not ID.search(block)]
    assert without == []


def test_claims_have_the_documents_words_before_their_ids() -> None:
    ends = {found[1]: plain(sections()[: found.start()]) for found in ID.finditer(sections())}
    assert [c.id for c in CLAIMS if not ends[c.id].endswith(c.words)] == []


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_tests_that_decide_exist() -> None:
    named = [name for claim in CLAIMS for name in getattr(claim.decision, "names", ())]
    assert len(named) > 20
    split = (name.split("::") for name in named)
    assert [f"{file}::{test}" for file, test in split if test not in functions(file)] == []


def evidence() -> Evidence:
    rows: dict[str, Any] = {
        "segment of a frontend": {
            "pinning": "registered read-only",
            "gb_per_s": 20.0,
            "rate_to_bare": 0.5,
        },
        "unknown memory": {"rate_to_bare": 0.4, "gb_per_s": 9.0},
    }
    copies = {"rows": rows, "aim": 0.9, "problems": []}
    bench = {"parts": {"copies": copies}}
    name = "tests/cuda/test_device.py::test_small_copies_pin_nothing"
    missing = {"tests": "step tests: not done after 5 s"}
    return Evidence("real", {"devices": FACTS, "bench": bench}, missing, {name: ["passed"] * 2})


def verdict(words: str, found: Evidence) -> tuple[str, str, str]:
    (claim,) = (claim for claim in CLAIMS if words in claim.words)
    told = decided(claim.decision, found)
    return told.status, told.number, told.reason


def test_what_decides_claims() -> None:
    found = evidence()
    assert verdict("64 KiB or more", found) == ("pass", "2 tests", "")
    assert verdict("NVIDIA's driver", found)[:2] == ("pass", "driver for CUDA 12.8")
    status, number, _ = verdict("one DMA straight from shared memory", found)
    assert (status, number) == ("fail", "20.0 GB/s, 0.5 of a bare copy's (aim 0.9)")
    assert verdict("that process alone", found) == (
        "not run",
        "",
        missing := found.missing["tests"],
    )
    status, number, reason = verdict("slower, nothing else", found)
    assert (status, number, reason) == ("not run", "0.4 of a bare copy's rate", missing)
    del found.missing["tests"]  # the tests ran, except for tests that need the fake
    assert verdict("slower, nothing else", found)[0] == "pass"
    assert "no device shows on demand" in verdict("the request gets 500", found)[2]
    assert verdict("by a copy between them", found)[2] == "needs two devices: there is one"
    found.tests["tests/cuda/test_device.py::test_small_copies_pin_nothing"].append("failed")
    assert verdict("64 KiB or more", found)[0] == "fail"
    del found.documents["bench"]["parts"]["copies"]["rows"]["segment of a frontend"]
    assert verdict("registered as such", found)[0] == "fail"


def test_nothing_is_timed_but_devices() -> None:
    found = evidence()
    row = found.documents["bench"]["parts"]["copies"]["rows"]["segment of a frontend"]
    row["rate_to_bare"] = "fake: no timing"
    assert verdict("one DMA straight", found)[0] == "not run"
    assert kind_of({"cupy": "0-fake"}, {}) == "fake"


def test_a_step_that_hangs_costs_its_limit_and_no_other(tmp_path: Path) -> None:
    sleeps = "import subprocess; subprocess.run(['sleep', '600'])"
    step = Step("hangs", "", 5, lambda *_: ["-c", sleeps], lambda *_: None, on=())
    found = Evidence()
    outcome = take(step, found, tmp_path, 100)
    assert (outcome.status, outcome.reason) == ("stopped", "not done after 5 s")
    assert found.missing["hangs"].endswith("not done after 5 s")
    assert "Traceback" in outcome.output  # the program was asked to end before it was killed
    assert take(step, found, tmp_path, 1).reason == "no time was left"


def test_a_host_without_devices(tmp_path: Path) -> None:
    """The program runs to its end, and reports every claim as not run, with the reason."""
    done = completed(
        sys.executable,
        "-m",
        "bench.gpu_day",
        "--output",
        tmp_path,
        environ=os.environ | {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 3, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [claim["id"] for claim in report["claims"]] == [claim.id for claim in CLAIMS]
    assert report["counts"] == {"pass": 0, "fail": 0, "not run": len(CLAIMS)}
    assert all(claim["reason"] for claim in report["claims"])
    assert "no CUDA device" in report["steps"][1]["reason"]
    text = (tmp_path / "report.html").read_text()
    assert all(f"<td>{claim.id}</td>" in text for claim in CLAIMS)


def test_the_page_is_whole_by_itself() -> None:
    found = evidence()
    claim = {"id": "G1", "status": "pass", "words": "<words>", "number": "1", "reason": ""}
    step = {
        "name": "bench",
        "status": "done",
        "what": "",
        "reason": "",
        "took_s": 2.0,
        "output": "x",
    }
    report = {
        "counts": {"pass": 1, "fail": 0, "not run": 0},
        "machine": {},
        "commit": "",
        "date": "",
        "cuda": "real",
        "took_s": 2.0,
        "claims": [claim],
        "steps": [step],
        "findings": found.documents,
    }
    text = page.html(report)
    assert text.count("<svg") == 3  # of claims, copies, steps
    assert "&lt;words&gt;" in text
    assert "20" in text
    assert not re.search(r"""(src|href)=|url\(|@import|<script""", text)


@pytest.mark.fake_cuda
def test_on_the_fake(cuda_environment: dict[str, str], tmp_path: Path) -> None:
    """Claims that need no real device are decided. Times are not measured."""
    done = completed(
        sys.executable,
        "-m",
        "bench.gpu_day",
        "--only",
        "doctor,torch",
        "--output",
        tmp_path,
        environ=os.environ | cuda_environment,
    )
    assert done.returncode == 3, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    by_words = {claim["words"]: claim for claim in report["claims"]}
    assert report["cuda"] == ("stand-in" if standin.active() else "fake")
    doctor = by_words["The doctor's trials run in processes of their own"]
    assert doctor["status"] == "pass"
    assert "ok" in doctor["number"]
    assert "precompiled" in by_words["torch with CUDA"]["reason"]
    assert by_words["that process alone uses its GPU"]["reason"] == "step tests was not asked for"


def test_rounds_and_deaths() -> None:
    lost = {"rounds": 20, "lost_bytes": 0}
    rounds = {"http": lost, "grpc": lost, "problems": []}
    deaths = {"back_after_ms": [2.0, None, 4.0], "bytes": 1 << 30, "problems": ["late"]}
    found = Evidence("real", {"rounds": {"parts": {"rounds": rounds, "deaths": deaths}}})
    told = "20 over http: 0 bytes lost, 20 over grpc: 0 bytes lost"
    assert verdict("else with `unregister`", found) == ("pass", told, "")
    told = "1024 MiB back after 3 ms (median of 2)"
    assert verdict("ends with the process", found)[:2] == ("fail", told)
    assert "has not measured executors" in verdict("some hundred MiB", found)[2]
