"""``shmserve doctor``: what this host has and what it lacks, one line a finding.

Missing parts of GPU support are notes on a host without devices, warnings on one with devices,
and failures (exit status 1) where they are asked for.
"""

from __future__ import annotations

import argparse
import platform
import re
import resource
from collections.abc import Iterator

import msgspec

from shmserve import config
from shmserve.cli import gpu_findings
from shmserve.cli.findings import Finding, Level
from shmserve.config import Settings
from shmserve.coordinator import pool_sizing
from shmserve.observe import gpus

_PYTHON = (3, 11)
_KERNEL = (5, 14)  # populating and advising shared memory without touching it


def main(arguments: argparse.Namespace) -> int:
    return run(config.load(), arguments.gpu, arguments.json)


def run(settings: Settings, gpu: bool, as_json: bool) -> int:
    """Look, try and print; returns the exit status. `gpu`: this host must have working GPUs."""
    results = list(findings(settings, gpu))
    if as_json:
        print(msgspec.json.encode(results).decode())
    else:
        print("\n".join(finding.line() for finding in results))
    return 1 if any(finding.level == "FAIL" for finding in results) else 0


def findings(settings: Settings, gpu: bool) -> Iterator[Finding]:
    """All of them, the host's first."""
    has_devices = bool(gpus.present())
    yield _version("Python", platform.python_version(), _PYTHON)
    yield _version("Linux", platform.release(), _KERNEL)
    yield _memory(settings)
    yield _locked_memory(has_devices)
    lacking: Level = "FAIL" if gpu else "warn" if has_devices else "note"
    yield from gpu_findings.findings(lacking)


def _version(subject: str, text: str, needed: tuple[int, int]) -> Finding:
    numbers = tuple(int(number) for number in re.findall(r"\d+", text)[:2])
    if numbers >= needed:
        return Finding("ok", subject, text)
    least = ".".join(map(str, needed))
    return Finding("FAIL", subject, text, f"{least} or newer is needed")


def _memory(settings: Settings) -> Finding:
    """The pool as `shmserve check` has it."""
    pool, advice = pool_sizing.host_pool(settings.pool_bytes)
    text = f"{pool_sizing.shm_space()[0] >> 20} MiB, pool of {pool >> 20} MiB"
    return Finding("warn" if advice else "ok", pool_sizing.SHM, text, advice)


def _locked_memory(has_devices: bool) -> Finding:
    """Memory is locked for a GPU's DMA only."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("ok", "locked memory", "unlimited")
    todo = "a service with GPUs wants LimitMEMLOCK=infinity (in a shell: ulimit -l unlimited)"
    level: Level = "warn" if has_devices else "note"
    return Finding(level, "locked memory", f"at most {limit >> 10} KiB", todo)
