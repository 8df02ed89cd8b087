"""Model control: carries out requests to load and unload models, and changes of the repository in
poll mode.

Requests for one model run one after another; requests for different models run side by side. A
started request is finished even if its caller has gone. Files sent along with a request
(`overrides`) belong to this module as soon as the message arrives, and are removed once no
revision uses them.

A background thread reads disks. The frontend writes a configuration or files of a request to
`overrides/` in the run directory. The files are removed with the last revision that uses them, or
when the request fails. A sweep removes files of a frontend that died before asking.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from math import inf

from shmserve import ids
from shmserve.config import Settings
from shmserve.coordinator.models.control_request import ControlRequest, Stage
from shmserve.coordinator.models.remote_models import RemoteModels
from shmserve.coordinator.models.repository_jobs import ModelReader, RepositoryJobs
from shmserve.coordinator.models.repository_watch import RepositoryLook, RepositoryWatch
from shmserve.coordinator.models.supervisor_sync import SupervisorSync
from shmserve.core.control import compositions
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import Revision, in_words
from shmserve.core.effects import Effect
from shmserve.core.registry import ModelState
from shmserve.errors import Code
from shmserve.log_fields import log_fields
from shmserve.protocol.control import model_messages as wire
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.protocol.oip.load_request import NOT_EXPLICIT
from shmserve.transport import rundir

_log = logging.getLogger(__name__)

_WAITING = 64  # most requests for one model; below, most models with requests
_MODELS = 1024
_SWEEP_S = 10.0
_TOO_MANY = "too many requests to load models wait"

Refusal = tuple[str, str]  # code and text
Perform = Callable[[list[Effect]], None]


class ModelControl:
    """All requests to load and unload. `perform` writes down and publishes before returning."""

    def __init__(
        self,
        settings: Settings,
        reconciler: Reconciler,
        jobs: RepositoryJobs,
        sync: SupervisorSync,
        send: Callable[[str, FromCoordinator], None],
        perform: Perform,
    ) -> None:
        self._settings = settings
        self._reconciler = reconciler
        self._jobs = jobs
        self._sync = sync
        self.remote = RemoteModels(settings, sync, send)
        self._send = send
        self._perform = perform
        self._queues: dict[str, deque[ControlRequest]] = {}
        interval_s = settings.poll_interval_s if settings.model_control == "poll" else inf
        self._watch = RepositoryWatch(interval_s, time.monotonic() + interval_s)
        self._sweep_at = 0.0
        self._overrides_seen: dict[str, float] = {}  # time of the first sweep that saw the name

    # ---------------------------------------------------------------------- requests

    def ask(self, asker: str, message: wire.LoadModel | wire.UnloadModel) -> None:
        """Queue a frontend's request, or refuse the request."""
        load = isinstance(message, wire.LoadModel)
        overrides = message.overrides if isinstance(message, wire.LoadModel) else ""
        dependents = isinstance(message, wire.UnloadModel) and message.dependents
        request = ControlRequest(
            message.name, load, asker, message.ticket, overrides, dependents=dependents
        )
        refusal = self._refusal(request)
        if refusal:
            self._answer(request, *refusal)
        else:
            self._queues.setdefault(request.name, deque()).append(request)

    def turn(self, now: float) -> None:
        self.remote.tick(now)
        for name in list(self._queues):
            self._advance(name, now)
        if now >= self.due:
            self._watch.begin(now)
            if not self._jobs.survey(self._surveyed):
                self._watch.fail(now)
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            self._sweep(now)

    @property
    def watches(self) -> bool:
        """True if the repository is looked at again and again."""
        return self._watch.interval_s < inf

    @property
    def due(self) -> float:
        """Return when (monotonic) to look at the repository, which the start itself reads first
        (`Reconciler.scanned`)."""
        waits = self._reconciler.draining or not self._reconciler.complete
        return inf if waits else self._watch.next_look

    def _refusal(self, request: ControlRequest) -> Refusal | None:
        if self._settings.model_control != "explicit":
            return Code.UNAVAILABLE, NOT_EXPLICIT
        if not self._reconciler.complete:
            return Code.UNAVAILABLE, "the server has not read its repository yet"
        if self._reconciler.draining:
            return Code.UNAVAILABLE, "the server is about to stop"
        bad_overrides = request.overrides and not rundir.is_overrides(request.overrides)
        if not ids.is_model_name(request.name) or bad_overrides:
            return Code.INVALID_ARGUMENT, "invalid model name"
        if len(self._queues.get(request.name, ())) >= _WAITING or len(self._queues) >= _MODELS:
            return Code.UNAVAILABLE, _TOO_MANY
        return None

    # ------------------------------------------------------------------ one request

    def _advance(self, name: str, now: float) -> None:
        waiting = self._queues[name]
        while waiting:
            request = waiting[0]
            model = self._reconciler.models.by_name.get(name)
            reading = request.stage in (Stage.FETCHING, Stage.READING)
            if reading or (model is not None and model.changing):
                return
            if request.stage is Stage.STEPS:
                if self._loading_steps(request):
                    return
                self._load_ensemble(request, now)
            elif request.stage is Stage.LOADING:
                self._end_load(request, now)
            elif request.load and request.ticket and self.remote.there:
                request.stage = Stage.FETCHING
                self.remote.fetch((name,), now, functools.partial(self._fetched, request))
            elif request.load:
                self._begin_reading(request)
            else:
                steps = model.steps() if model is not None and request.dependents else set()
                effects = self._reconciler.models.unload(name, now, removed=request.removed)
                self._perform(self._reconciler.excuse(name) + effects)
                _log.info("model unloaded", extra=log_fields(model=name))
                self._unload_steps(steps, now)
                self._finish(request)
        del self._queues[name]
        self._watch.loaded(name, now)

    def _fetched(self, request: ControlRequest, message: wire.ModelsFetched) -> None:
        """Go on once the fetcher is done. If the store could not be reached, an older copy in the
        cache is good enough."""
        problem = message.problems.get(request.name, "")
        if problem and not message.unlisted:
            reason = f"failed to load '{request.name}': "
            self._finish(request, *self._failure(request.name, problem, reason))
        else:
            self._begin_reading(request)

    def _begin_reading(self, request: ControlRequest) -> None:
        request.stage = Stage.READING
        done = functools.partial(self._read, request)
        if not self._jobs.read(request.name, request.overrides, done):
            self._finish(request, Code.UNAVAILABLE, _TOO_MANY)

    def _read(self, request: ControlRequest, read: ModelReader | Exception) -> None:
        """Go on once the background thread has read the model's folder."""
        now, name = time.monotonic(), request.name
        if isinstance(read, Exception):
            self._finish(request, Code.INTERNAL, f"failed to load '{name}'")
            return
        if read.error_code == Code.NOT_FOUND:
            text = (
                f"failed to load '{name}', failed to poll from model repository:"
                " no folder of model_repository has that name"
            )
            self._finish(request, Code.NOT_FOUND, text)
            return
        models = self._reconciler.models
        model = models.by_name.get(name)
        serving = model.serving if model is not None else None
        if read.error_code or (read.failures and serving is not None and serving.working):
            problems = read.failures or {"": read.error}
            self._perform(self._reconciler.excuse(name) + models.refuse(name, problems))
            begin = f"failed to load '{name}': " if read.error_code else ""
            self._finish(request, *self._failure(name, in_words(problems), begin))
        elif any(spec.steps for spec, _ in read.versions):
            request.found, request.stage = read, Stage.STEPS
            self._load_steps(request)
        elif serving and serving.fingerprint == read.fingerprint and not serving.problems():
            assert model is not None
            if not request.implied:
                model.implied = False
            self._finish(request)  # already loaded from identical files
        else:
            self._load(request, read, now)

    def _load(self, request: ControlRequest, read: ModelReader, now: float) -> None:
        name = request.name
        request.kept, request.stage, request.begun_at = read.kept, Stage.LOADING, now
        revision = self._revision(read, request.overrides if read.kept else "")
        request.revision = revision.number
        _log.info("loading", extra=log_fields(model=name, revision=revision.number))
        effects = self._reconciler.models.load(name, revision, now, implied=request.implied)
        self._perform(self._reconciler.excuse(name) + effects)

    def _end_load(self, request: ControlRequest, now: float) -> None:
        name, reason = request.name, self._error(request.name)
        model = self._reconciler.models.by_name.get(name)
        serving = model.serving if model is not None else None
        if not reason:
            took_s = round(now - request.begun_at, 2)
            _log.info("model loaded", extra=log_fields(model=name, seconds=took_s))
        elif serving is None or serving.number == request.revision:  # else the rollout has logged
            _log.error("model not loaded", extra=log_fields(model=name, reason=reason))
        self._finish(request, *_in_tritons_words(name, reason))

    # --------------------------------------------------------------------- ensembles

    def _load_steps(self, request: ControlRequest) -> None:
        """Request the models of an ensemble that are not served yet."""
        for name in sorted(request.steps()):
            model = self._reconciler.models.by_name.get(name)
            needed = model is None or not model.working
            if needed and name not in self._queues and len(self._queues) < _MODELS:
                self._queues[name] = deque([ControlRequest(name, True, implied=True)])

    def _loading_steps(self, request: ControlRequest) -> bool:
        """Return True while a model of the ensemble is still being loaded."""
        by_name = self._reconciler.models.by_name
        return any(
            (model in by_name and by_name[model].changing)
            or (model in self._queues and not self._waits_for(model, request.name))
            for model in request.steps()
        )

    def _waits_for(self, name: str, other: str) -> bool:
        """Return True if ensemble `name` waits for `other`, directly or through steps. Without
        this check two ensembles could wait for each other forever."""
        seen: set[str] = set()
        coming = [name]
        while coming:
            name = coming.pop()
            if name == other:
                return True
            if name not in seen and self._queues.get(name):
                seen.add(name)
                coming += self._queues[name][0].steps()
        return False

    def _load_ensemble(self, request: ControlRequest, now: float) -> None:
        """Load an ensemble whose models are loaded or have failed. A usable ensemble is never
        replaced by an unusable revision."""
        read, models = request.found, self._reconciler.models
        assert read is not None
        specs = [spec for spec, _ in read.versions]
        problems = compositions.problems(models.entries(), request.name, specs)
        serving = compositions.compose(models.entries()).get(request.name, {})
        if problems and any(entry.state is ModelState.READY for entry in serving.values()):
            self._perform(models.refuse(request.name, problems))
            self._finish(request, *self._failure(request.name, in_words(problems)))
        else:
            self._load(request, read, now)

    def _unload_steps(self, names: set[str], now: float) -> None:
        """Unload models of an unloaded ensemble, if loaded for ensembles only and no longer
        needed."""
        by_name = self._reconciler.models.by_name
        needed = {step for model in by_name.values() for step in model.steps()}
        coming = [request for queue in self._queues.values() for request in queue if request.load]
        needed |= {step for request in coming for step in request.steps()}
        for name in sorted(names - needed):
            if name in by_name and by_name[name].implied and name not in self._queues:
                self._queues[name] = deque([ControlRequest(name, False, dependents=True)])
                self._advance(name, now)

    def _error(self, name: str) -> str:
        """Return why the latest, finished load of a model failed, or ""."""
        models = self._reconciler.models
        model = models.by_name.get(name)
        if model is None or model.error or model.serving is None:
            return model.error if model is not None else ""
        specs = [version.spec for version in model.serving.versions if version.spec.steps]
        return in_words(compositions.problems(models.entries(), name, specs)) if specs else ""

    def _revision(self, read: ModelReader, overrides: str) -> Revision:
        number = self._reconciler.models.number()
        versions = [self._sync.version(*version, number) for version in read.versions]
        return Revision(number, versions, dict(read.failures), read.fingerprint, overrides)

    def _failure(self, name: str, reason: str, begin: str = "") -> Refusal:
        """Log a refused load, and return the refusal."""
        model = self._reconciler.models.by_name.get(name)
        old = ", the old model serves on" if model is not None and model.working else ""
        _log.error("model not loaded%s", old, extra=log_fields(model=name, reason=reason))
        return _in_tritons_words(name, reason, begin)

    def _finish(self, request: ControlRequest, code: str = "", error: str = "") -> None:
        """Remove and answer the first request of a model's queue."""
        waiting = self._queues.get(request.name)
        if waiting and waiting[0] is request:
            waiting.popleft()
        self._answer(request, code, error)

    def _answer(self, request: ControlRequest, code: str, error: str) -> None:
        if request.ticket:
            self._send(request.asker, wire.ModelAnswer(request.ticket, str(code), error))
        if request.overrides and not request.kept:
            self._jobs.remove(request.overrides)

    # ---------------------------------------------------------------------- the disk

    def renew(self) -> None:
        """Load again, from the cache, each model that has changed since loading."""
        if self._settings.model_control != "explicit":
            self._watch.ask(time.monotonic())
            return
        for name, model in self._reconciler.models.by_name.items():
            serving = model.serving
            if serving is not None and not serving.overrides and name not in self._queues:
                self._queues[name] = deque([ControlRequest(name, True, implied=model.implied)])

    def _surveyed(self, look: RepositoryLook | Exception) -> None:
        """Compare the repository with the loaded models: load new and changed models, unload
        removed models."""
        now, tried = time.monotonic(), self._jobs.tried
        if isinstance(look, Exception):
            self._watch.fail(now)
            return
        known = {n for n, m in self._reconciler.models.by_name.items() if not m.removed}
        known |= {name.split("/")[0] for name in self._reconciler.failures}
        for name, mark in self._watch.end(look, tried, known, self._queues.keys(), now).items():
            tried.pop(name, None)
            if mark:
                tried[name] = mark
            self._queues[name] = deque([ControlRequest(name, bool(mark), removed=not mark)])

    def _sweep(self, now: float) -> None:
        """Remove overrides that no request or revision uses, once a request for them can no longer
        come."""
        known = {r.overrides for waiting in self._queues.values() for r in waiting}
        for model in self._reconciler.models.by_name.values():
            known |= {revision.overrides for revision in model.revisions()}
        # not the files' own times: the clock may jump
        seen = self._overrides_seen
        self._overrides_seen = {name: seen.get(name, now) for name in self._jobs.overrides()}
        for name, first_seen in self._overrides_seen.items():
            asker = name.rpartition("-")[0]
            limit_s = self._settings.load_timeout_s if asker in self._reconciler.processes else 0.0
            if name not in known and now - first_seen > limit_s + 3 * _SWEEP_S:
                self._jobs.remove(name)


def _in_tritons_words(name: str, reason: str, begin: str = "") -> Refusal:
    """Return a refusal in Triton's words; empty without a reason. Clients of Triton recognize a bad
    configuration by the start of the text."""
    text = f"{begin}load failed for model '{name}': {reason}"
    return (Code.INVALID_ARGUMENT, text) if reason else ("", "")
