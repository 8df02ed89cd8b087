"""Command ``shmserve check``: tells whether a server would run. One line a finding, exit status 1
on a problem."""

import argparse
import os
from pathlib import Path

from shmserve import config, model_places
from shmserve.cli.inspecting import try_load
from shmserve.config import Settings
from shmserve.coordinator import pool_sizing
from shmserve.coordinator.models import desired_models
from shmserve.core.registry import ALL, ANY
from shmserve.errors import ConfigError
from shmserve.frontends.oip.restricted_apis import check_settings
from shmserve.protocol.triton_config import model_config
from shmserve.repository import folder_reader
from shmserve.supervisor import single_models
from shmserve.tensor.spec import ModelSpec
from shmserve.transport import extras, listen_addresses
from shmserve.transport.processes import raise_file_limit
from shmserve.transport.trust import key_file, tls


def main(arguments: argparse.Namespace) -> int:
    reading = config.read()
    for warning in reading.warnings:
        print(f"note  {warning}")
    return run(reading.settings, arguments.load)


def run(settings: Settings, load: bool = False) -> int:
    """Check settings that have been read, memory limits and the model repository.

    Without `load`, no model runs. This finds errors in configurations, missing files and code that
    is no Python, but no errors that only show when a model runs.
    """
    from shmserve.repository import scan

    print(f"ok    settings (run directory {config.run_dir(settings)})")
    with single_models.laid_out_elsewhere(settings) as settings:
        return check(settings, scan, load)


def check(settings: Settings, scan: desired_models.Scanner, load: bool = False) -> int:
    """Print the findings and return the exit status."""
    problems = list(model_places.missing_folders(settings))
    try:
        listen_addresses.check_http(settings)
    except ConfigError as ex:
        problems.insert(0, ex.message)
    for problem in problems:
        print(f"FAIL  {problem}")
    if problems:
        return 1
    try:
        check_settings(settings)
        key_file.read(settings)
        extras.require(settings)
        tls.certificates(settings, "http", "http/1.1")
        tls.certificates(settings, "grpc", "h2")
        desired = desired_models.choose(settings, scan)
    except ConfigError as ex:
        print(f"FAIL  {ex.message}")
        return 1
    short = _short_of_memory(settings, desired)
    return 1 if not _models_would_do(settings, desired, load) or short else 0


def _models_would_do(settings: Settings, desired: desired_models.DesiredModels, load: bool) -> bool:
    """Print the findings on models. Return True if the service would be ready."""
    broken = {name.partition("/")[0] for name in desired.failures}
    fine: set[str] = set()
    names = {spec.name for spec, _ in desired.versions}
    for spec, instances in desired.versions:
        reason = _missing_steps(spec, names)
        if instances and not reason:
            reason = try_load.code_problem(Path(instances[0].directory) / spec.version)
        if load and instances and not reason:
            reason = try_load.problem(instances[0], settings.load_timeout_s)
        if reason:
            broken.add(spec.name)
            finding = _finding(settings, spec.name)
            print(f"{finding}  model {spec.name} version {spec.version}: {reason}")
            continue
        fine.add(spec.name)
        kind, number = ("step", len(spec.steps)) if spec.steps else ("instance", len(instances))
        count = f"{number} {kind}{'' if number == 1 else 's'}"
        print(f"ok    model {spec.name} version {spec.version}: {spec.backend}, {count}")
        for note in model_config.of_spec(spec, folder_reader.kinds()).notes:
            print(f"note  model {spec.name} version {spec.version}: {note}")
    for name, reason in sorted(desired.failures.items()):
        finding = _finding(settings, name.partition("/")[0])
        print(f"{finding}  model {name}: {reason}{_where(settings, name)}")
    if broken and not fine:
        print("FAIL  none of the models can be served")
        return False
    absent = [name for name in settings.ready_requires if name not in (*ALL, *ANY, *broken, *fine)]
    for name in absent:
        print(f"FAIL  ready_requires: '{name}' is no model of the repository")
    return not absent and not any(_is_required(settings, name) for name in broken)


def _is_required(settings: Settings, name: str) -> bool:
    """Return True if the service is not ready without this model."""
    return settings.ready_requires == ALL or name in settings.ready_requires


def _finding(settings: Settings, name: str) -> str:
    """Return the level of a broken model: only required models are failures."""
    return "FAIL" if _is_required(settings, name) else "warn"


def _short_of_memory(settings: Settings, desired: desired_models.DesiredModels) -> bool:
    """Print the finding on the memory pool. Return True if the service would never be ready."""
    if problem := raise_file_limit():
        print(f"FAIL  memory: {problem}")
        return True
    pool, advice = pool_sizing.host_pool(settings.pool_bytes)
    instances = sum(len(instances) for _, instances in desired.versions)
    processes = settings.http_workers + settings.grpc_processes + instances
    sizes = (pool, processes, settings.arena_bytes, pool_sizing.largest_file())
    advice = " ".join(filter(None, (advice, pool_sizing.arena_size(*sizes)[1])))
    short = bool(pool_sizing.shortage(pool, pool, processes))
    finding = "FAIL" if short else "warn" if advice else "ok  "
    print(f"{finding}  memory: {advice or f'pool of {pool >> 20} MiB'}")
    return short


def _where(settings: Settings, name: str) -> str:
    """Return the folder of a model or a version, for operators: clients must not see paths."""
    for entry in settings.model_repository:
        single = model_places.single_of(entry)
        if single and name.split("/")[0] == single[0]:
            return f" [{single[1]}]"
        path = entry
        folder = os.path.join(os.path.abspath(path), name)
        if os.path.isdir(folder) or os.path.isdir(folder := os.path.dirname(folder)):
            return f" [{folder}]"
    return ""


def _missing_steps(spec: ModelSpec, names: set[str]) -> str:
    """Return the models that an ensemble lacks, as text. Loading checks the steps' tensors."""
    missing = sorted({step.model for step in spec.steps} - names)
    return f"steps are not served: {', '.join(missing)}" if missing else ""
