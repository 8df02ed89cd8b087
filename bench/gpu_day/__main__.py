import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench.gpu_day
from bench.gpu_day import page
from bench.gpu_day.claims import CLAIMS
from bench.gpu_day.evidence import Evidence, decided
from bench.gpu_day.steps import STEPS, take
from bench.run import commit, machine

RESULTS = Path(__file__).resolve().parents[1] / "results"
SOME_FAILED, SOME_NOT_RUN = 1, 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_day",
        description=bench.gpu_day.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [step.name for step in STEPS]
    parser.add_argument("--only", default=",".join(names), help=f"of: {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=560, help="for all steps together")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu-day", help="a folder")
    options = parser.parse_args()
    options.only = {"devices", *options.only.split(",")}
    if unknown := options.only - set(names):
        parser.error(f"unknown steps: {', '.join(sorted(unknown))}")
    return options


def document(evidence: Evidence, outcomes: list[Any], begin: float) -> dict[str, Any]:
    """The report so far."""
    verdicts = {claim.id: decided(claim.decision, evidence) for claim in CLAIMS}
    counts = dict.fromkeys(("pass", "fail", "not run"), 0)
    for verdict in verdicts.values():
        counts[verdict.status] += 1
    return {
        "method": bench.gpu_day.__doc__,
        "machine": machine(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "cuda": evidence.kind,
        "took_s": round(time.monotonic() - begin, 1),
        "counts": counts,
        "claims": [{"id": c.id, "words": c.words, **asdict(verdicts[c.id])} for c in CLAIMS],
        "steps": [asdict(outcome) for outcome in outcomes],
        "findings": evidence.documents,
        "tests": dict(sorted(evidence.tests.items())),
    }


def main() -> int:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    evidence, outcomes, begin = Evidence(), [], time.monotonic()
    for step in STEPS:
        if step.name not in options.only:
            evidence.missing[step.name] = f"step {step.name} was not asked for"
    for step in STEPS:
        if step.name not in options.only:
            continue
        print(f"{step.name}: {step.what}", file=sys.stderr, flush=True)
        left = options.seconds - (time.monotonic() - begin)
        outcomes.append(take(step, evidence, options.output, left))
        told = outcomes[-1]
        print(f"  {told.status}, {told.took_s} s {told.reason}", file=sys.stderr, flush=True)
        # after each step, so that every interruption leaves a report
        report = document(evidence, outcomes, begin)
        _write(options.output / "report.json", json.dumps(report, indent=1) + "\n")
        _write(options.output / "report.html", page.html(report))
    for claim in report["claims"]:
        told = claim["number"] or claim["reason"]
        print(f"{claim['status']:7}  {claim['id']:4} {claim['words']}: {told}")
    print(", ".join(f"{count} {name}" for name, count in report["counts"].items()))
    print(f"the report: {options.output / 'report.html'}")
    broken = any(outcome.status in ("failed", "stopped") for outcome in outcomes)
    if report["counts"]["fail"] or broken:
        return SOME_FAILED
    return SOME_NOT_RUN if report["counts"]["not run"] else 0


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


if __name__ == "__main__":
    sys.exit(main())
