"""Command ``shmserve doctor``: checks this host and its service. One line a finding.

A missing part of GPU support is a note on a host without devices and a warning on a host with
devices. With `--gpu`, a missing part is a failure (exit status 1).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
from collections.abc import Iterator

import msgspec

from shmserve import config
from shmserve.cli.inspecting import gpu_findings
from shmserve.cli.inspecting.findings import Finding, Level
from shmserve.config import Settings
from shmserve.coordinator import pool_sizing
from shmserve.core.registry import FRONTENDS
from shmserve.errors import Unavailable, UnreadableMessage
from shmserve.observe import gpus
from shmserve.shm.registry_page import RegistryReader
from shmserve.transport import rundir

_PYTHON = (3, 11)
# needed free bytes and inodes in the run directory's file system
_RUN_BYTES, _RUN_INODES = 1 << 20, 64
# first version that can populate and advise shared memory without touching pages
_KERNEL = (5, 14)


def main(arguments: argparse.Namespace) -> int:
    return run(config.load(), arguments.gpu, arguments.json)


def run(settings: Settings, gpu: bool, as_json: bool) -> int:
    """Check and print. Return the exit status.

    Args:
        gpu: fail unless this host has working GPUs.
    """
    results = list(findings(settings, gpu))
    if as_json:
        print(msgspec.json.encode(results).decode())
    else:
        print("\n".join(finding.line() for finding in results))
    return 1 if any(finding.level == "FAIL" for finding in results) else 0


def findings(settings: Settings, gpu: bool) -> Iterator[Finding]:
    """Yield all findings, the host's first."""
    has_devices = bool(gpus.present())
    yield _version("Python", platform.python_version(), _PYTHON)
    yield _version("Linux", platform.release(), _KERNEL)
    yield _memory(settings)
    yield _run_directory(settings)
    yield _locked_memory(has_devices)
    yield from _service(settings)
    lacking: Level = "FAIL" if gpu else "warn" if has_devices else "note"
    yield from gpu_findings.findings(lacking)


def _version(subject: str, text: str, needed: tuple[int, int]) -> Finding:
    numbers = tuple(int(number) for number in re.findall(r"\d+", text)[:2])
    if numbers >= needed:
        return Finding("ok", subject, text)
    least = ".".join(map(str, needed))
    return Finding("FAIL", subject, text, f"{least} or newer is needed")


def _memory(settings: Settings) -> Finding:
    """Return the finding on the pool, sized as by `shmserve check`."""
    pool, advice = pool_sizing.host_pool(settings.pool_bytes)
    text = f"{pool_sizing.shm_space()[0] >> 20} MiB, pool of {pool >> 20} MiB"
    return Finding("warn" if advice else "ok", pool_sizing.SHM, text, advice)


def _run_directory(settings: Settings) -> Finding:
    """Return the finding on free space and inodes where the run directory is, or will be."""
    folder = config.run_dir(settings)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    short = free < _RUN_BYTES or (space.f_files and space.f_favail < _RUN_INODES)
    text = f"{free >> 10} KiB and {space.f_favail} inodes are free"
    todo = "free space: without it the server cannot publish changes (run_dir)" if short else ""
    return Finding("warn" if short else "ok", "run directory", text, todo)


def _service(settings: Settings) -> Iterator[Finding]:
    """Yield whether the service of these settings is ready, if the service runs and is visible to
    this user."""
    run_dir = rundir.serving(config.base_dir(settings))
    try:
        if rundir.lock(run_dir, "master").holder() is None:
            return
        snapshot = RegistryReader(run_dir).current()
    except (OSError, Unavailable, UnreadableMessage):
        return
    if snapshot.ready:
        yield Finding("ok", "service", "ready")
        return
    reasons = [f"{FRONTENDS[kind]}: {reason}" for kind, reason in snapshot.unserved.items()]
    todo = "; ".join([*reasons, "the log says more"])
    level: Level = "FAIL" if reasons else "warn"
    yield Finding(level, "service", f"not ready: {snapshot.why_not_ready}", todo)


def _locked_memory(has_devices: bool) -> Finding:
    """Return the finding on locked memory, which only DMA of GPUs needs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("ok", "locked memory", "unlimited")
    todo = "set LimitMEMLOCK=infinity for a service with GPUs (in a shell: ulimit -l unlimited)"
    level: Level = "warn" if has_devices else "note"
    return Finding(level, "locked memory", f"at most {limit >> 10} KiB", todo)
