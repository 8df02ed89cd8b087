"""Evidence left by the steps, and the decisions about claims."""

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
    """`number`: measured value with unit; `reason`: why the claim failed or was not run."""

    status: Status
    number: str = ""
    reason: str = ""


@dataclass
class Evidence:
    """For each step a JSON document, or the reason why the document is missing. `tests`: outcomes
    ("passed", "failed", "skipped: why") by "file::function"."""

    kind: str = "none"  # kind of CUDA: "real", "stand-in", "fake", "none"
    documents: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    tests: dict[str, list[str]] = field(default_factory=dict)

    def of(self, step: str) -> Any:
        """Return a step's document.

        Raises:
            NotRun: the step left no document.
        """
        if step not in self.documents:
            raise NotRun(self.missing.get(step, f"step {step} was not asked for"))
        return self.documents[step]

    def part(self, name: str) -> Any:
        """Return the bench's results for a part.

        Raises:
            NotRun: no step has measured the part.
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
    """Return the verdict, also if the evidence is missing or malformed."""
    try:
        return decision(evidence)
    except NotRun as ex:
        return Verdict("not run", reason=str(ex))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as ex:
        return Verdict(
            "fail", reason=f"what was measured is incomplete ({type(ex).__name__}: {ex})"
        )


def tests(*names: str) -> Decision:
    """Pass if at least one of the tests `names` ran and none failed. `names`:
    "test_device.py::test_…"."""

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
    """Decide by the flag from `read`, and report the number from `read`."""

    def decide(evidence: Evidence) -> Verdict:
        good, number = read(evidence)
        if NO_TIMING in number:
            raise NotRun(f"{evidence.kind}: {NO_TIMING}")
        return Verdict("pass" if good else "fail", number, "" if good else "not what is claimed")

    return decide


def never(reason: str) -> Decision:
    """Decide nothing: no step can check the claim."""

    def decide(_: Evidence) -> Verdict:
        raise NotRun(reason)

    return decide


def both(first: Decision, second: Decision) -> Decision:
    """Fail if either decision fails, and pass if both pass. A fault that no device shows on demand
    does not count. The numbers of both are reported."""

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
