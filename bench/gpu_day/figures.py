"""Figures by which claims are decided: each function reads the evidence, and returns whether the
claim holds, and the number."""

from collections.abc import Callable
from statistics import median
from typing import Any

from bench.gpu_day.evidence import NO_TIMING, Decision, Evidence, NotRun

Found = tuple[bool, str]
MIB = 1 << 20


# --------------------------------------------------------------------------- devices, doctor


def _device(evidence: Evidence) -> dict[str, Any]:
    device: dict[str, Any] = evidence.of("devices")["devices"][0]
    return device


def driver(evidence: Evidence) -> Found:
    facts = evidence.of("devices")
    version = facts["driver"]
    return version >= 12000, f"driver for CUDA {version // 1000}.{version % 1000 // 10}"


def cupy(evidence: Evidence) -> Found:
    facts, device = evidence.of("devices"), _device(evidence)
    problems = [device[name] for name in ("kernel", "matrices") if device.get(name)]
    runtime = facts["runtime"]
    told = f"CuPy {facts['cupy']} of CUDA {runtime // 1000}.{runtime % 1000 // 10}"
    return not problems, ", ".join([told, *problems])


def other_cupy(evidence: Evidence) -> Found:
    if evidence.of("devices")["runtime"] < 13000:
        raise NotRun("this CuPy is for CUDA 12")
    return cupy(evidence)


def doctor(evidence: Evidence) -> Found:
    findings = evidence.of("doctor")
    levels = [finding["level"] for finding in findings]
    return "FAIL" not in levels, ", ".join(f"{levels.count(n)} {n}" for n in sorted(set(levels)))


def read_only(evidence: Evidence) -> Found:
    mode = evidence.part("copies")["rows"]["segment of a frontend"]["pinning"]
    return mode.startswith("registered"), mode


def mapped_again(evidence: Evidence) -> Found:
    mode = evidence.part("copies")["rows"]["segment of a frontend"]["pinning"]
    if mode == "registered read-only":
        raise NotRun("this device registers memory that may only be read")
    return mode == "registered by a writable mapping", mode


def _peers(evidence: Evidence) -> None:
    count = len(evidence.of("devices")["devices"])
    if count < 2 and evidence.kind == "real":
        raise NotRun("needs two devices: there is one")


def needs_two(decision: Decision) -> Decision:
    def decide(evidence: Evidence) -> Any:
        _peers(evidence)
        return decision(evidence)

    decide.names = getattr(decision, "names", ())  # type: ignore[attr-defined]
    return decide


# ------------------------------------------------------------------------------- the bench


def _sound(part: dict[str, Any]) -> bool:
    return not part["problems"]


def bandwidth(evidence: Evidence) -> Found:
    part = evidence.part("copies")
    row = part["rows"]["segment of a frontend"]
    if NO_TIMING in str(row["rate_to_bare"]):
        raise NotRun(f"{evidence.kind}: {NO_TIMING}")
    told = f"{row['gb_per_s']} GB/s, {row['rate_to_bare']} of a bare copy's (aim {part['aim']})"
    return _sound(part) and row["rate_to_bare"] >= part["aim"], told


def staged(evidence: Evidence) -> Found:
    part = evidence.part("copies")
    return _sound(part), f"{part['rows']['unknown memory']['rate_to_bare']} of a bare copy's rate"


def overlap(evidence: Evidence) -> Found:
    part = evidence.part("overlap")
    if not isinstance(part["two_to_one"], (int, float)):
        raise NotRun(f"{evidence.kind}: {NO_TIMING}")
    return _sound(part) and part[
        "two_to_one"
    ] > 1.15, f"{part['two_to_one']} times one caller's rate"


def counted(evidence: Evidence) -> Found:
    for size, row in evidence.part("regions")["rows"].items():
        count, unit = size.split()
        nbytes = int(count) * {"KiB": 1024, "MiB": MIB}[unit]
        copied = row["binary HTTP"]["copied_bytes"]["device"]
        if copied != 2 * nbytes:
            return False, f"{copied} bytes for two tensors of {nbytes}"
    return True, f"{copied} bytes for two tensors of {size}"


def in_place(evidence: Evidence) -> Found:
    part = evidence.part("regions")
    copied = [sum(row["CUDA region"]["copied_bytes"].values()) for row in part["rows"].values()]
    return _sound(part) and copied != [] and not any(copied), f"{sum(copied)} bytes copied"


def regions(evidence: Evidence) -> Found:
    part = evidence.part("regions")
    size, row = list(part["rows"].items())[-1]
    took = row["CUDA region"]["ms"]
    told = f"{took['p50']} ms" if isinstance(took, dict) else "not timed"
    return _sound(part), f"{size} in place: {told}"


def client_deaths(evidence: Evidence) -> Found:
    part = evidence.part("deaths")
    return _sound(part), _after(part["back_after_ms"], f"{part['bytes'] // MIB} MiB back")


def executor_deaths(evidence: Evidence) -> Found:
    part = evidence.part("executors")
    told = _after(part["back_after_ms"], "the memory is back")
    answers = _after(part["answers_after_ms"], "the next one answers")
    return _sound(part), f"{told}, {answers}"


def _after(times: Any, what: str) -> str:
    known = [t for t in times if t is not None] if isinstance(times, list) else []
    return f"{what} after {median(known):g} ms (median of {len(known)})" if known else f"{what}"


def context(evidence: Evidence) -> Found:
    told = evidence.part("executors")["context_bytes"]
    if not isinstance(told, list):
        raise NotRun(f"{evidence.kind}: memory of other processes is not counted")
    used = median(told) / MIB
    return 50 <= used <= 2048, f"{used:.0f} MiB"


def rounds(evidence: Evidence) -> Found:
    part = evidence.part("rounds")
    told = [
        f"{part[p]['rounds']} over {p}: {part[p]['lost_bytes']} bytes lost"
        for p in ("http", "grpc")
    ]
    return _sound(part), ", ".join(told)


def library(step: str) -> Callable[[Evidence], Found]:
    def read(evidence: Evidence) -> Found:
        told = evidence.of(step)
        return not told["problems"], told["number"]

    return read
