"""What the steps have found, and how a claim is decided by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "not run"]
NO_TIMING = "no timing"
NO_FAULT = "a fault that no device shows on demand: tested on the fake of CUDA alone"


class NotRun(Exception):
    """Why something cannot be decided here."""


@dataclass(frozen=True)
class Verdict:
    """`number`: what was found, with its unit; `reason`: why it failed or was not run."""

    status: Status
    number: str = ""
    reason: str = ""


@dataclass
class Evidence:
    """By step: its JSON document, or why there is none. `tests`: outcomes ("passed", "failed",
    "skipped: why") by "file::function"."""

    kind: str = "none"  # of CUDA: "real", "stand-in", "fake", "none"
    documents: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    tests: dict[str, list[str]] = field(default_factory=dict)

    def of(self, step: str) -> Any:
        """A step's document.

        Raises:
            NotRun: it left none.
        """
        if step not in self.documents:
            raise NotRun(self.missing.get(step, f"step {step} was not asked for"))
        return self.documents[step]

    def part(self, name: str) -> Any:
        """What the bench has measured of a part.

        Raises:
            NotRun: nothing.
        """
        for step in ("bench", "deaths", "rounds"):
            parts = self.documents.get(step, {}).get("parts", {})
            if name in parts:
                return parts[name]
        step = (
            name if name == "rounds" else "deaths" if name in ("deaths", "executors") else "bench"
        )
        raise NotRun(self.missing.get(step, f"step {step} has not measured {name}"))


Decision = Callable[[Evidence], Verdict]


def decided(decision: Decision, evidence: Evidence) -> Verdict:
    """The verdict, whatever the evidence is like."""
    try:
        return decision(evidence)
    except NotRun as ex:
        return Verdict("not run", reason=str(ex))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as ex:
        return Verdict(
            "fail", reason=f"what was measured is incomplete ({type(ex).__name__}: {ex})"
        )


def tests(*names: str) -> Decision:
    """Passes if some of these tests ran and none failed. `names`: "test_device.py::test_…"."""

    def decide(evidence: Evidence) -> Verdict:
        found = [outcome for name in names for outcome in evidence.tests.get(name, [])]
        failed = [name for name in names if "failed" in evidence.tests.get(name, [])]
        passed = found.count("passed")
        if failed:
            return Verdict(
                "fail", f"{passed} of {len(found)} tests", f"failed: {', '.join(failed)}"
            )
        if not passed:
            raise NotRun(next(_why(found), "") or _absent(evidence, names))
        return Verdict("pass", f"{passed} tests")

    decide.names = names  # type: ignore[attr-defined]
    return decide


def _why(outcomes: list[str]) -> Iterator[str]:
    return (o.removeprefix("skipped: ") for o in outcomes if o.startswith("skipped"))


def _absent(evidence: Evidence, names: tuple[str, ...]) -> str:
    step = "torch" if names[0].startswith("tests/torch") else "tests"
    if step in evidence.missing:
        return evidence.missing[step]
    if evidence.kind == "real":
        return NO_FAULT
    return "its tests were not reached"


def figure(read: Callable[[Evidence], tuple[bool, str]]) -> Decision:
    """Passes if `read` says so; with the number that it gives."""

    def decide(evidence: Evidence) -> Verdict:
        good, number = read(evidence)
        if NO_TIMING in number:
            raise NotRun(f"{evidence.kind}: {NO_TIMING}")
        return Verdict("pass" if good else "fail", number, "" if good else "not what is claimed")

    return decide


def never(reason: str) -> Decision:
    """Nothing here decides it."""

    def decide(_: Evidence) -> Verdict:
        raise NotRun(reason)

    return decide


def both(first: Decision, second: Decision) -> Decision:
    """Fails if one fails, and passes if both do; what no device shows on demand does not count.
    Numbers of both."""

    def decide(evidence: Evidence) -> Verdict:
        found = [decided(first, evidence), decided(second, evidence)]
        verdicts = [verdict for verdict in found if verdict.reason != NO_FAULT] or found
        order: tuple[Status, ...] = ("fail", "not run", "pass")
        status = next(s for s in order if s in {v.status for v in verdicts})
        number = ", ".join(filter(None, (v.number for v in verdicts)))
        reason = "; ".join(dict.fromkeys(v.reason for v in verdicts if v.status == status))
        return Verdict(status, number, reason)

    decide.names = (*getattr(first, "names", ()), *getattr(second, "names", ()))  # type: ignore[attr-defined]
    return decide
