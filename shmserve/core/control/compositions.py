"""Compositions: the states of ensembles and pipelines in the registry, derived from their models.

The registry's records keep an ensemble as a loaded model with steps. The functions here decide for
each snapshot whether the ensemble can be used, from the models of its steps.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from shmserve.core.registry import ModelEntry, ModelState
from shmserve.core.scheduling import ensemble_graph
from shmserve.core.scheduling.ensemble_graph import PIPELINE
from shmserve.errors import ConfigError
from shmserve.tensor.spec import EnsembleStep, ModelSpec

Models = dict[str, dict[str, ModelEntry]]  # name -> version -> entry
MakePipeline = Callable[[str, Sequence[ModelSpec]], ModelSpec]  # raises ConfigError


class _Waiting(Exception):
    """State of an ensemble whose steps are not ready, and the reason."""

    def __init__(self, state: ModelState, reason: str) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


class _Composer:
    """Decides the state of each ensemble of `models` once, inner ensembles first."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._decided: dict[tuple[str, str], ModelEntry] = {}
        self._open: list[tuple[str, str]] = []  # ensembles under decision

    def entry(self, entry: ModelEntry) -> ModelEntry:
        spec = entry.spec
        key = (spec.name, spec.version)
        if not spec.steps or entry.state is not ModelState.LOADING:
            return entry
        if key in self._open:
            raise ConfigError(f"ensemble '{spec.name}' is a step of itself")
        if key not in self._decided:
            self._open.append(key)
            self._decided[key] = self._ensemble(entry)
            self._open.pop()
        return self._decided[key]

    def _ensemble(self, entry: ModelEntry) -> ModelEntry:
        spec = entry.spec
        try:
            steps = self._ready(
                f"ensemble '{spec.name}'", [(step.model, step.version) for step in spec.steps]
            )
            ensemble_graph.check_models(spec, [step.spec for step in steps])
        except _Waiting as ex:
            return replace(entry, state=ex.state, reason=ex.reason)
        except ConfigError as ex:
            return replace(entry, state=ModelState.UNAVAILABLE, reason=ex.message)
        return _usable(entry, steps)

    def pipeline(self, name: str, steps: Sequence[str], make: MakePipeline) -> ModelEntry:
        """Return the entry of a pipeline of these models, each "name" or "name/version"."""
        step_ids = [step.partition("/")[::2] for step in steps]
        bare = tuple(EnsembleStep(*step, inputs={}, outputs={}) for step in step_ids)
        spec = ModelSpec(name, "1", PIPELINE, PIPELINE, 0, (), (), steps=bare)
        entry = ModelEntry(spec, ModelState.UNAVAILABLE, required=False)
        try:
            entries = self._ready(f"pipeline '{name}'", step_ids)
            complete = replace(entry, spec=make(name, [e.spec for e in entries]))
        except _Waiting as ex:
            return replace(entry, state=ex.state, reason=ex.reason)
        except ConfigError as ex:
            return replace(entry, reason=ex.message)
        return _usable(complete, entries)

    def _ready(self, what: str, steps: Sequence[tuple[str, str]]) -> list[ModelEntry]:
        """Return the READY models of the steps."""
        entries = []
        for name, version in steps:
            versions = self._models.get(name, {})
            candidates = [self.entry(e) for v, e in versions.items() if version in ("", v)]
            ordered = sorted(candidates, key=lambda e: int(e.spec.version), reverse=True)
            ready = next((e for e in ordered if e.state is ModelState.READY), None)
            if ready is None:
                which = f"'{name}'" + (f" version {version}" if version else "")
                raise _waiting(f"{what} depends on {which}", ordered)
            entries.append(ready)
        return entries


def _waiting(what: str, candidates: Sequence[ModelEntry]) -> _Waiting:
    if not candidates:
        return _Waiting(ModelState.UNAVAILABLE, f"{what}, which is not found")
    if any(entry.state is ModelState.LOADING for entry in candidates):
        return _Waiting(ModelState.LOADING, f"{what}, which is loading")
    reason = f" ({candidates[0].reason})" if candidates[0].reason else ""
    return _Waiting(ModelState.UNAVAILABLE, f"{what}, which is not ready{reason}")


def _usable(entry: ModelEntry, steps: Sequence[ModelEntry]) -> ModelEntry:
    """Return the entry as READY, with the instances of all steps, or without instances if a step
    has none now."""
    spec = ensemble_graph.composed(entry.spec, [step.spec for step in steps])
    every = all(step.instances for step in steps)
    live = tuple(dict.fromkeys(i for step in steps for i in step.instances)) if every else ()
    return replace(entry, spec=spec, state=ModelState.READY, instances=live, reason="")


def compose(models: Models) -> Models:
    """Return the registry's models with the states of ensembles decided. Loaded ensembles are
    LOADING in `models`."""
    composer = _Composer(models)
    return {
        name: {version: composer.entry(entry) for version, entry in versions.items()}
        for name, versions in models.items()
    }


def with_pipelines(
    composed: Models, pipelines: Mapping[str, Sequence[str]], make: MakePipeline
) -> Models:
    """Return these models, with pipelines added. `composed`: models as returned by `compose`.
    `pipelines`: pipeline name -> models; a model's name is skipped. `make`: function that makes the
    spec of a pipeline from its models' specs."""
    composer = _Composer(composed)
    return composed | {
        name: {"1": composer.pipeline(name, steps, make)}
        for name, steps in pipelines.items()
        if name not in composed
    }


def problems(models: Models, name: str, specs: Sequence[ModelSpec]) -> dict[str, str]:
    """Return version -> reason for unusable versions of an ensemble that is not loaded yet.
    `models`: the loaded models, perhaps with other versions of the ensemble."""
    coming = {spec.version: ModelEntry(spec, ModelState.LOADING) for spec in specs}
    entries = compose(models | {name: coming})[name]
    return {v: e.reason for v, e in entries.items() if e.state is ModelState.UNAVAILABLE}
