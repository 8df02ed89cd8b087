"""Command ``shmserve check``: tells whether a server would run. One line a finding, exit status 1
on a problem."""

import argparse
import os
import signal
import sys
from pathlib import Path

import msgspec

from shmserve import config, model_places, single_models
from shmserve.cli.inspecting import try_load
from shmserve.cli.serving import serve_options
from shmserve.config import Settings
from shmserve.coordinator import pool_sizing
from shmserve.coordinator.models import desired_models
from shmserve.coordinator.models.desired_models import DesiredModels
from shmserve.core.registry import ALL, ANY
from shmserve.errors import ConfigError
from shmserve.executor import backends
from shmserve.executor.process import environments
from shmserve.frontends.oip.restricted_apis import check_settings
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.triton_config import backend_kinds, model_config
from shmserve.repository import folder_reader, no_models
from shmserve.tensor.spec import ModelSpec
from shmserve.transport import extras, listen_addresses
from shmserve.transport.processes import raise_file_limit
from shmserve.transport.trust import key_file, tls


def main(arguments: argparse.Namespace) -> int:
    for sentence in serve_options.take(arguments, os.environ):
        print(f"note  {sentence}")
    reading = config.read()
    for warning in reading.warnings:
        print(f"note  {warning}")
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:  # SIGTERM alone would leave temporary folders and a loading process
        return run(reading.settings, arguments.load)
    finally:
        signal.signal(signal.SIGTERM, before)


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
        everything = msgspec.structs.replace(settings, model_control="none")
        present = desired_models.choose(everything, scan)
    except ConfigError as ex:
        print(f"FAIL  {ex.message}")
        return 1
    short = _short_of_memory(settings, desired)
    return 1 if not _models_would_do(settings, desired, present, load) or short else 0


def _models_would_do(
    settings: Settings, desired: DesiredModels, present: DesiredModels, load: bool
) -> bool:
    """Print the findings on models. Return True if the service would be ready. `present`: all
    models of the repository, of which the service starts with `desired`."""
    skipped = present.skipped()
    for line in skipped:
        print(f"{'warn' if present.is_empty else 'note'}  {line}")
    if present.is_empty and not _may_be_empty(settings, bool(skipped)):
        return False
    started = {spec.name for spec, _ in desired.versions}
    started |= {name.partition("/")[0] for name in desired.failures}
    fine, broken = _models(settings, present, started, load)
    failures = {**present.failures, **desired.failures}
    for name, reason in sorted(failures.items()):
        broken.add(name.partition("/")[0])
        finding = _finding(settings, name.partition("/")[0], started)
        print(f"{finding}  model {name}: {reason}{_where(settings, name)}")
    broken, fine = broken & started, fine & started
    if broken and not fine:
        print("FAIL  none of the models can be served")
        return False
    absent = [name for name in settings.ready_requires if name not in (*ALL, *ANY, *broken, *fine)]
    for name in absent:
        where = "load_models" if settings.model_control == "explicit" else "the repository"
        print(f"FAIL  ready_requires: '{name}' is no model of {where}")
    return not absent and not any(_is_required(settings, name) for name in broken)


def _models(
    settings: Settings, present: DesiredModels, started: set[str], load: bool
) -> tuple[set[str], set[str]]:
    """Print the findings on readable versions. Return the names of models with a good version, and
    of models with a bad version. `started`: models of the service's start."""
    fine: set[str] = set()
    broken: set[str] = set()
    names = {spec.name for spec, _ in present.versions}
    for spec, instances in present.versions:
        model = f"model {spec.name} version {spec.version}"
        unstarted = "" if spec.name in started else ", not in load_models"
        try:
            advice = [_look(spec, instances, names, settings)]
            if load and spec.name in started and instances:
                advice += _load(instances[0], settings)
        except ConfigError as ex:
            broken.add(spec.name)
            print(f"{_finding(settings, spec.name, started)}  {model}: {ex.message}{unstarted}")
            continue
        fine.add(spec.name)
        kind, number = ("step", len(spec.steps)) if spec.steps else ("instance", len(instances))
        count = f"{number} {kind}{'' if number == 1 else 's'}"
        print(f"ok    {model}: {spec.backend}, {count}{unstarted}")
        notes = model_config.of_spec(spec, folder_reader.kinds()).notes
        for note in filter(None, (*notes, *advice)):
            print(f"note  {model}: {note}")
    return fine, broken


def _may_be_empty(settings: Settings, is_mistake: bool) -> bool:
    """Print a finding on a repository without models. Return True if the service may start.
    `is_mistake`: True if folders are there, none of which is a model."""
    later = settings.model_control != "none" or model_places.fetches(settings)
    if is_mistake and not later:
        print("FAIL  model_repository has no model")
        return False
    print(
        "warn  model_repository has no model: nothing will be served until one is there"
        " (a folder with 1/model.py or alike, and config.pbtxt)"
    )
    return True


def _look(
    spec: ModelSpec, instances: tuple[Instance, ...], names: set[str], settings: Settings
) -> str:
    """Return a note on a version, or "". `names`: models of the repository. Raise ConfigError with
    the reason if the files tell that the version cannot be served."""
    if reason := _missing_steps(spec, names):
        raise ConfigError(reason)
    if not instances:
        return ""
    if environments.choose(instances[0], settings.allow_model_code) is not None:
        return ""  # another Python may take other code, and has other packages
    if reason := try_load.code_problem(Path(instances[0].directory) / spec.version):
        raise ConfigError(reason)
    backends.check_extra(spec.backend)
    if spec.backend == backend_kinds.ONNXRUNTIME:
        from shmserve.executor.backends.onnx import graph_file  # numpy, for these models only

        return graph_file.check(spec, instances[0].directory)
    return environments.unmet(instances[0])


def _load(instance: Instance, settings: Settings) -> list[str]:
    """Load an instance in a process of its own. Return the warnings. Raise ConfigError with the
    reason of a failure."""
    reason, warnings = try_load.problem(instance, settings)
    if reason:
        raise ConfigError(reason)
    return [text.removeprefix(f"model '{instance.spec.name}': ") for text in warnings]


def _is_required(settings: Settings, name: str) -> bool:
    """Return True if the service is not ready without this model."""
    return settings.ready_requires == ALL or name in settings.ready_requires


def _finding(settings: Settings, name: str, started: set[str]) -> str:
    """Return the level of a broken model: only required models of the service's start are
    failures."""
    return "FAIL" if name in started and _is_required(settings, name) else "warn"


def _short_of_memory(settings: Settings, desired: DesiredModels) -> bool:
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
    """Return the folder of a model or a version, for operators, with what to do if the folder is
    MLServer's. Clients must not see paths."""
    for entry in settings.model_repository:
        single = model_places.single_of(entry)
        if single and name.split("/")[0] == single[0]:
            folder = single[1]
        else:
            folder = os.path.join(os.path.abspath(entry), name)
            folder = folder if os.path.isdir(folder) else os.path.dirname(folder)
        if os.path.isdir(folder):
            advice = no_models.of_mlserver(folder)
            return f" [{folder}]{advice and f'; {advice}'}"
    return ""


def _missing_steps(spec: ModelSpec, names: set[str]) -> str:
    """Return the models that an ensemble lacks, as text. Loading checks the steps' tensors."""
    missing = sorted({step.model for step in spec.steps} - names)
    return f"steps are not served: {', '.join(missing)}" if missing else ""
