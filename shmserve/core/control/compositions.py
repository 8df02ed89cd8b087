"""Ensembles and pipelines in the registry: they are in the state that their models make.

The registry knows an ensemble as a model with steps that is loaded; whether it can be used
is decided here, for each snapshot anew, from the models of its steps.
"""

from __future__ import annotations

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
    """An ensemble is in this state for this reason: its steps are not ready."""

    def __init__(self, state: ModelState, reason: str) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


class _Composer:
    """Decides each ensemble of `models` once, those that it consists of before."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._decided: dict[tuple[str, str], ModelEntry] = {}
        self._open: list[tuple[str, str]] = []  # ensembles that are being decided

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
        """A pipeline of these models, "name" or "name/version" each."""
        wanted = [step.partition("/")[::2] for step in steps]
        bare = tuple(EnsembleStep(*step, inputs={}, outputs={}) for step in wanted)
        spec = ModelSpec(name, "1", PIPELINE, PIPELINE, 0, (), (), steps=bare)
        entry = ModelEntry(spec, ModelState.UNAVAILABLE, required=False)
        try:
            entries = self._ready(f"pipeline '{name}'", wanted)
            made = replace(entry, spec=make(name, [e.spec for e in entries]))
        except _Waiting as ex:
            return replace(entry, state=ex.state, reason=ex.reason)
        except ConfigError as ex:
            return replace(entry, reason=ex.message)
        return _usable(made, entries)

    def _ready(self, what: str, steps: Sequence[tuple[str, str]]) -> list[ModelEntry]:
        """The models of the steps, which are all READY.

        Raises:
            _Waiting: one is not.
            ConfigError: an ensemble among them has itself as a step.
        """
        entries = []
        for name, version in steps:
            versions = self._models.get(name, {})
            known = [self.entry(e) for v, e in versions.items() if version in ("", v)]
            ordered = sorted(known, key=lambda e: int(e.spec.version), reverse=True)
            ready = next((e for e in ordered if e.state is ModelState.READY), None)
            if ready is None:
                which = f"'{name}'" + (f" version {version}" if version else "")
                raise _waiting(f"{what} depends on {which}", ordered)
            entries.append(ready)
        return entries


def _waiting(what: str, known: Sequence[ModelEntry]) -> _Waiting:
    if not known:
        return _Waiting(ModelState.UNAVAILABLE, f"{what}, which is not found")
    if any(entry.state is ModelState.LOADING for entry in known):
        return _Waiting(ModelState.LOADING, f"{what}, which is loading")
    why = f" ({known[0].reason})" if known[0].reason else ""
    return _Waiting(ModelState.UNAVAILABLE, f"{what}, which is not ready{why}")


def _usable(entry: ModelEntry, steps: Sequence[ModelEntry]) -> ModelEntry:
    """READY; with the instances of all steps, unless one has none now."""
    spec = ensemble_graph.composed(entry.spec, [step.spec for step in steps])
    every = all(step.instances for step in steps)
    live = tuple(dict.fromkeys(i for step in steps for i in step.instances)) if every else ()
    return replace(entry, spec=spec, state=ModelState.READY, instances=live, reason="")


def compose(models: Models) -> Models:
    """The registry's models with ensembles in their states; those that are loaded are LOADING
    in `models`."""
    composer = _Composer(models)
    return {
        name: {version: composer.entry(entry) for version, entry in versions.items()}
        for name, versions in models.items()
    }


def with_pipelines(
    composed: Models, pipelines: Mapping[str, Sequence[str]], make: MakePipeline
) -> Models:
    """These models and the pipelines of them.

    Args:
        composed: as by `compose`.
        pipelines: name -> models, unless there is a model of that name.
        make: the spec of a pipeline of such models.
    """
    composer = _Composer(composed)
    return composed | {
        name: {"1": composer.pipeline(name, steps, make)}
        for name, steps in pipelines.items()
        if name not in composed
    }


def problems(models: Models, name: str, specs: Sequence[ModelSpec]) -> dict[str, str]:
    """Version -> why it could not be used, of these versions of an ensemble that is not loaded
    yet; of the loaded models, `models`, some may be others of its versions."""
    coming = {spec.version: ModelEntry(spec, ModelState.LOADING) for spec in specs}
    entries = compose(models | {name: coming})[name]
    return {v: e.reason for v, e in entries.items() if e.state is ModelState.UNAVAILABLE}
