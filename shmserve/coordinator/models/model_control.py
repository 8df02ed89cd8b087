"""Requests to load and unload models, and the repository's own changes in poll mode.

Requests for one model are done one after the other, those for different models side by side.
Whoever asked may go away meanwhile: nothing that was begun is given up for that. What came
along with a request (`overrides`) belongs to this module from the moment the message is here;
it is removed when no incarnation is made of it any more.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

import msgspec

from shmserve import ids
from shmserve.config import Settings
from shmserve.coordinator.background import Background
from shmserve.coordinator.models import model_reader as reading
from shmserve.coordinator.models.desired_models import Library
from shmserve.coordinator.models.model_reader import Reading
from shmserve.coordinator.models.supervisor_sync import Orders
from shmserve.core.control.effects import Effect
from shmserve.core.control.reconciler import Fleet
from shmserve.core.control.records import Incarnation, InstanceRecord, VersionRecord
from shmserve.core.control.rollout import told
from shmserve.errors import Code
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.control.model_messages import LoadModel, ModelAnswer, UnloadModel
from shmserve.protocol.messages import FromCoordinator
from shmserve.tensor.spec import ModelSpec
from shmserve.transport import rundir

_log = logging.getLogger(__name__)

_WAITING = 64  # requests for one model, and models with requests
_MODELS = 1024
_SWEEP_S = 10.0
NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"

Perform = Callable[[list[Effect]], None]


class _Stage(Enum):
    QUEUED = auto()
    READING = auto()
    LOADING = auto()


class _Request:
    """One request; `ticket` 0: the repository has changed, nobody asked."""

    __slots__ = ("asker", "kept", "load", "name", "overrides", "removed", "stage", "ticket")

    def __init__(self, name: str, load: bool, asker: str = "", ticket: int = 0) -> None:
        self.name = name
        self.load = load
        self.asker = asker
        self.ticket = ticket
        self.overrides = ""
        self.removed = False  # unload: the model's folder is gone
        self.kept = False  # an incarnation is made of the overrides
        self.stage = _Stage.QUEUED


class ModelControl:
    """See the module. `perform` publishes and writes down before it returns."""

    def __init__(
        self,
        settings: Settings,
        run_dir: str,
        fleet: Fleet,
        library: Library,
        background: Background,
        orders: Orders,
        send: Callable[[str, FromCoordinator], None],
        perform: Perform,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._fleet = fleet
        self._library = library
        self._background = background
        self._orders = orders
        self._send = send
        self._perform = perform
        self._queues: dict[str, deque[_Request]] = {}
        self._poll_at = time.monotonic() + settings.poll_interval_s
        self._polling = False
        self._sweep_at = 0.0
        self.tried: dict[str, str] = {}  # poll: model -> fingerprint it was last loaded with

    # ---------------------------------------------------------------------- requests

    def ask(self, asker: str, message: LoadModel | UnloadModel) -> None:
        """A frontend wants a model loaded or unloaded."""
        load = isinstance(message, LoadModel)
        request = _Request(message.name, load, asker, message.ticket)
        if isinstance(message, LoadModel):
            request.overrides = message.overrides
        refusal = self._refusal(request)
        if refusal:
            self._answer(request, *refusal)
        else:
            self._queues.setdefault(request.name, deque()).append(request)

    def turn(self, now: float) -> None:
        """Go on with everything that can go on."""
        for name in list(self._queues):
            self._advance(name, now)
        if self._settings.model_control == "poll" and now >= self._poll_at:
            self._poll(now)
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            self._sweep()

    def forgotten(self, overrides: str) -> None:
        """No incarnation is made of these any more."""
        self._background.submit(
            functools.partial(reading.remove, self._run_dir, overrides), lambda _: None
        )

    def _refusal(self, request: _Request) -> tuple[str, str] | None:
        if self._settings.model_control != "explicit":
            return Code.UNAVAILABLE, NOT_EXPLICIT
        if self._fleet.draining:
            return Code.UNAVAILABLE, "the server is about to stop"
        bad_overrides = request.overrides and not rundir.is_overrides(request.overrides)
        if not ids.is_model_name(request.name) or bad_overrides:
            return Code.INVALID_ARGUMENT, "invalid model name"
        if len(self._queues.get(request.name, ())) >= _WAITING or len(self._queues) >= _MODELS:
            return Code.UNAVAILABLE, "too many requests to load models wait"
        return None

    # ------------------------------------------------------------------ one request

    def _advance(self, name: str, now: float) -> None:
        waiting = self._queues[name]
        while waiting:
            request = waiting[0]
            model = self._fleet.models.by_name.get(name)
            if request.stage is _Stage.READING or (model is not None and model.changing):
                return
            if request.stage is _Stage.LOADING:
                error = model.error if model is not None else ""
                self._finish(request, *self._failure(name, error))
            elif request.load:
                self._begin(request)
            else:
                effects = self._fleet.models.unload(name, now, removed=request.removed)
                self._perform(self._fleet.excuse(name) + effects)
                _log.info("model unloaded model=%s", name)
                self._finish(request)
        del self._queues[name]

    def _begin(self, request: _Request) -> None:
        request.stage = _Stage.READING
        work = functools.partial(
            reading.read,
            self._library,
            self._settings.model_repository,
            self._run_dir,
            request.name,
            request.overrides,
        )
        if not self._background.submit(work, functools.partial(self._read, request)):
            self._finish(request, Code.UNAVAILABLE, "too many requests to load models wait")

    def _read(self, request: _Request, found: Reading | Exception) -> None:
        """What the background has found of the model."""
        now = time.monotonic()
        if isinstance(found, Exception):
            self._finish(request, Code.INTERNAL, f"failed to load '{request.name}'")
            return
        if found.error_code == Code.NOT_FOUND:
            text = f"failed to load '{request.name}', failed to poll from model repository"
            self._finish(request, Code.NOT_FOUND, text)
            return
        models = self._fleet.models
        model = models.by_name.get(request.name)
        serving = model.serving if model is not None else None
        if found.error_code or (found.failures and serving is not None and serving.working):
            problems = found.failures or {"": found.error}
            self._perform(self._fleet.excuse(request.name) + models.refuse(request.name, problems))
            begin = "failed to load" if found.error_code else "load failed for model"
            self._finish(request, *self._failure(request.name, told(problems), begin))
        elif (
            serving is not None
            and serving.fingerprint == found.fingerprint
            and not serving.problems()
        ):
            self._finish(request)  # it is loaded like that already
        else:
            request.kept, request.stage = found.kept, _Stage.LOADING
            incarnation = self._incarnation(found, request.overrides if found.kept else "")
            _log.info("loading model=%s incarnation=%d", request.name, incarnation.number)
            self._perform(
                self._fleet.excuse(request.name) + models.load(request.name, incarnation, now)
            )

    def _incarnation(self, found: Reading, overrides: str) -> Incarnation:
        number = self._fleet.models.number()
        versions = []
        for spec, instances in found.versions:
            versions.append(self.version(spec, instances, number))
        return Incarnation(number, versions, dict(found.failures), found.fingerprint, overrides)

    def version(
        self, spec: ModelSpec, instances: tuple[Instance, ...], number: int
    ) -> VersionRecord:
        """A version's record in an incarnation; its instances can be ordered from now on."""
        records = []
        for instance in instances:
            name = ids.reborn(instance.name, number)
            self._orders.instances[name] = msgspec.structs.replace(instance, name=name)
            records.append(InstanceRecord(name, device=instance.device))
        return VersionRecord(spec, records)

    def _failure(
        self, name: str, reason: str, begin: str = "load failed for model"
    ) -> tuple[str, str]:
        """A refusal that begins as Triton's: its clients tell a bad configuration by that."""
        if not reason:
            return "", ""
        _log.error("model not loaded model=%s reason=%s", name, reason)
        return Code.INVALID_ARGUMENT, f"{begin} '{name}': {reason}"

    def _finish(self, request: _Request, code: str = "", error: str = "") -> None:
        """The first request of its model has been done."""
        waiting = self._queues.get(request.name)
        if waiting and waiting[0] is request:
            waiting.popleft()
        self._answer(request, code, error)

    def _answer(self, request: _Request, code: str, error: str) -> None:
        if request.ticket:
            self._send(request.asker, ModelAnswer(request.ticket, str(code), error))
        if request.overrides and not request.kept:
            self.forgotten(request.overrides)

    # ---------------------------------------------------------------------- the disk

    def _poll(self, now: float) -> None:
        self._poll_at = now + self._settings.poll_interval_s
        if self._polling or self._fleet.draining:
            return
        work = functools.partial(self._library.survey, self._settings.model_repository)
        self._polling = self._background.submit(work, self._surveyed)

    def _surveyed(self, found: dict[str, str] | Exception) -> None:
        """The repository as it is now: load what is new or different, unload what is gone."""
        self._polling = False
        if isinstance(found, Exception):
            return
        served = {n: m for n, m in self._fleet.models.by_name.items() if not m.removed}
        failed = {name.split("/")[0] for name in self._fleet.failures}
        for name in (served.keys() | failed) - found.keys():
            if name in self._queues:
                continue
            self.tried.pop(name, None)
            request = _Request(name, False)
            request.removed = True
            self._queues.setdefault(name, deque()).append(request)
        for name, mark in found.items():
            changed = self.tried.get(name) != mark and ids.is_model_name(name)
            if changed and name not in self._queues:
                self.tried[name] = mark
                self._queues.setdefault(name, deque()).append(_Request(name, True))

    def _sweep(self) -> None:
        """Remove overrides that nobody will ask about any more."""
        folder = rundir.overrides(self._run_dir)
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return
        known = {r.overrides for waiting in self._queues.values() for r in waiting}
        for model in self._fleet.models.by_name.values():
            known |= {incarnation.overrides for incarnation in model.incarnations()}
        for name in names:
            try:
                age_s = time.time() - os.stat(os.path.join(folder, name)).st_mtime
            except FileNotFoundError:
                continue
            asker = name.rpartition("-")[0]
            limit_s = self._settings.load_timeout_s if asker in self._fleet.processes else 0.0
            if name not in known and age_s > limit_s + 3 * _SWEEP_S:
                self.forgotten(name)
