"""Findings of `shmserve doctor` on GPUs: driver, packages, and trials of both."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata, util
from typing import Any

import msgspec

from shmserve.cli.inspecting.findings import Finding, Level
from shmserve.cli.inspecting.trials import Trial, TrialFailed
from shmserve.core import device_names as numbering
from shmserve.core.device_names import Gpu
from shmserve.cuda.device_trials import CudaFacts, DeviceFacts, LibraryFacts
from shmserve.observe import gpus, nvml

Environ = Mapping[str, str]
_EXTRA = "pip install 'shmserve[gpu]'"
_DRIVER = "for GPUs install the driver, 525 or newer"
_FILES = ("nvidiactl", "nvidia-uvm")
_NVRTC = "if NVRTC is missing: pip install 'cupy-cuda12x[ctk]'"
_CUBLAS = "models that need cuBLAS cannot run: pip install 'cupy-cuda12x[ctk]'"
_NO_IPC = "without CUDA's IPC clients cannot use CUDA regions; it needs /dev/shm, too"
_STAGED = "copies of inputs from HTTP and gRPC are slower"


def findings(lacking: Level) -> Iterator[Finding]:
    """Yield all findings. `lacking` is the level for a part that is missing or does not work."""
    present = gpus.present()
    yield _driver(lacking, present)
    if present:
        yield from _present(present)
        yield from _visible(lacking, present)
    yield _package(bool(present))
    yield from _cupy(lacking, gpus.visible_devices())
    yield _library("onnxruntime", "onnx", "onnxruntime-gpu", bool(present))
    yield _library("torch", "torch", "a build for CUDA", bool(present))


# ------------------------------------------------------------------------------- the driver


def _driver(lacking: Level, present: Sequence[Gpu]) -> Finding:
    library = nvml.bindings()
    version = library and nvml.bounded(library.nvmlSystemGetDriverVersion)
    if version:
        return Finding("ok", "NVIDIA driver", version)
    if present:
        return Finding("ok", "NVIDIA driver", "loaded, of unknown version")
    return Finding(lacking, "NVIDIA driver", "none is loaded, models run on the CPU", _DRIVER)


def _device_files(lacking: Level) -> Iterator[Finding]:
    """Yield problems with the driver's device files. CUDA creates missing files with a set-uid
    program, which services are not allowed to run."""
    for name in _FILES:
        path = os.path.join(gpus.DEV, name)
        if not os.path.exists(path):
            todo = "have root run `nvidia-modprobe -u -c 0` when the host starts"
            yield Finding(lacking, path, "is not there", todo)
        elif not os.access(path, os.R_OK | os.W_OK):
            todo = "give this user access, also by the service's DeviceAllow"
            yield Finding(lacking, path, "cannot be opened", todo)


def _present(present: Sequence[Gpu]) -> Iterator[Finding]:
    library = nvml.bindings()
    for index, gpu in enumerate(present):
        description = library and nvml.bounded(partial(_description, library, index))
        mig = f", MIG mode with {len(gpu.parts)} devices" if gpu.mig else ""
        yield Finding("ok", f"GPU {index}", (description or "of unknown name") + mig)


def _description(library: Any, index: int) -> str:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    memory = library.nvmlDeviceGetMemoryInfo(handle).total
    return f"{library.nvmlDeviceGetName(handle)}, {memory >> 20} MiB"


def _visible(lacking: Level, present: Sequence[Gpu]) -> Iterator[Finding]:
    """Yield the number of GPUs that a server started in this environment would use."""
    setting = os.environ.get(numbering.VARIABLE)
    tokens = gpus.visible_devices()
    parts = [part for gpu in present for part in gpu.parts]
    value = "not set" if setting is None else f"'{setting}'"
    text = f"{value}, devices that a server sees: {len(tokens)}"
    if not tokens:
        yield Finding(lacking, numbering.VARIABLE, text, "name existing devices")
    elif len(parts) > 1 and not (setting or "").startswith("MIG-"):
        todo = f"CUDA shows one MIG device; for all of them set it to {','.join(parts)}"
        yield Finding("note", numbering.VARIABLE, text, todo)
    else:
        yield Finding("ok", numbering.VARIABLE, text)


def _package(has_devices: bool) -> Finding:
    if util.find_spec("pynvml") is not None:
        return Finding("ok", "nvidia-ml-py", _version("nvidia-ml-py"))
    text = "not installed: no metrics of GPUs, and devices are counted by their files"
    return Finding("warn" if has_devices else "note", "nvidia-ml-py", text, _EXTRA)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "installed"


# ------------------------------------------------------------------------------------- CuPy


def _cupy(lacking: Level, tokens: Sequence[str]) -> Iterator[Finding]:
    if util.find_spec("cupy") is None:
        yield Finding(lacking, "CuPy", "not installed", _EXTRA)
        return
    names = sorted({d.name for d in metadata.distributions() if (d.name or "").startswith("cupy")})
    if len(names) > 1:
        yield Finding(lacking, "CuPy", f"installed {len(names)} times", f"keep one of {names}")
    for environ, first, count in _views(tokens):
        yield from _trials(lacking, environ, first, count)


def _views(tokens: Sequence[str]) -> Iterator[tuple[Environ, int, int]]:
    """Yield environments that together show every device. Each comes with the number of the first
    device and the number of devices."""
    if not tokens or not tokens[0].startswith("MIG-"):
        yield os.environ, 0, len(tokens)
        return
    for ordinal, token in enumerate(tokens):
        yield {**os.environ, numbering.VARIABLE: token}, ordinal, 1


def _trials(lacking: Level, environ: Environ, first: int, count: int) -> Iterator[Finding]:
    try:
        with Trial("devices", environ) as trial:
            facts = trial.result(CudaFacts)
    except TrialFailed as ex:
        yield Finding(lacking, "CuPy", str(ex))
        return
    if first == 0:
        yield _versions(lacking, facts)
    if len(facts.devices) != count:
        text = f"CUDA shows {len(facts.devices)} devices, not {count}"
        yield Finding(lacking, "CuPy", text, f"look at {numbering.VARIABLE} and the kernel's log")
        yield from _device_files(lacking)
    shared = _shared(environ, len(facts.devices)) if facts.devices else []
    for ordinal, (device, sharing) in enumerate(zip(facts.devices, shared, strict=True)):
        yield from _device(lacking, f"device {first + ordinal}", device, sharing)
        if len(device.peers) + 1 < len(facts.devices):
            others = ", ".join(map(str, device.peers)) or "none"
            text = f"reaches the memory of devices: {others}"
            yield Finding("note", f"device {first + ordinal}", text)


def _versions(lacking: Level, facts: CudaFacts) -> Finding:
    text = f"{facts.cupy} for CUDA {_dotted(facts.runtime)}" if facts.cupy else ""
    if facts.driver and facts.driver // 1000 < facts.runtime // 1000:
        todo = "install a newer driver, or CuPy for that version"
        text = f"{text}, but the driver is for CUDA {_dotted(facts.driver)}"
        return Finding(lacking, "CuPy", text, todo)
    if facts.error:
        return Finding(lacking, "CuPy", ": ".join(filter(None, [text, facts.error])))
    return Finding("ok", "CuPy", text)


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _device(lacking: Level, subject: str, device: DeviceFacts, sharing: str) -> Iterator[Finding]:
    text = f"{device.name}, {device.nbytes >> 20} MiB, compute capability {device.capability}"
    yield Finding("ok", subject, text)
    slower: Level = "note" if lacking == "note" else "warn"
    limit = "copies are slower; raise the limit of locked memory"
    yield _tried(lacking, subject, "compile and run kernels", device.kernel, _NVRTC)
    yield _tried(slower, subject, "multiply matrices", device.matrices, _CUBLAS)
    yield _tried(lacking, subject, "share memory with other processes", sharing, _NO_IPC)
    yield _tried(slower, subject, "pin shared memory", device.pin_writable, limit)
    yield _tried(slower, subject, "pin memory of frontends", device.pin_foreign, _STAGED)


def _tried(level: Level, subject: str, action: str, error: str, todo: str) -> Finding:
    if error:
        return Finding(level, subject, f"cannot {action}: {error}", todo)
    return Finding("ok", subject, f"can {action}")


def _shared(environ: Environ, count: int) -> list[str]:
    """Return for each device the reason why another process cannot use its memory, or ""."""
    try:
        with Trial("export", environ) as exporter:
            handles = msgspec.json.encode(exporter.result(list[str]))
            with Trial("open", environ, handles) as opener:
                return opener.result(list[str])
    except TrialFailed as ex:
        return [str(ex)] * count


# ---------------------------------------------------------------------- other libraries


def _library(name: str, extra: str, better: str, has_devices: bool) -> Finding:
    """Return the finding on an optional library. A build without CUDA also works, on the CPU."""
    if util.find_spec(name) is None:
        return Finding("note", name, "not installed", f"pip install 'shmserve[{extra}]'")
    if not has_devices:
        return Finding("ok", name, _version(name))
    try:
        with Trial(name, os.environ) as trial:
            facts = trial.result(LibraryFacts)
    except TrialFailed as ex:
        return Finding("warn", name, str(ex))
    text = f"{facts.version} ({facts.cuda})"
    if facts.usable:
        return Finding("ok", name, text)
    return Finding("note", name, f"{text} cannot use GPUs", f"install {better}")
