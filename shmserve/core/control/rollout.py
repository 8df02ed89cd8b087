"""Rollout: models by name, with the serving, coming and leaving revisions.

Part of `core.control.reconciler`, and as pure. A load makes a new revision: the model's versions
as read at that time, with instances of their own (`digits/1/0@7` is an instance of revision 7).

- Where nothing serves, the revision is published at once, version by version as they are loaded.
- Where a revision serves, the new revision takes over when all its instances take requests, so
  that capacity never dips. Then the old revision leaves.
- If any instance of the new revision cannot be loaded, the new revision leaves and the old one
  serves on. The load request gets the reason.

A leaving revision stays desired for `LINGER_S`, so that requests which have just looked it up find
their executor. Then its executors get SIGTERM, and SIGKILL after the longest request.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.core.control.records import InstanceRecord, ModelRecord, Revision, VersionRecord
from shmserve.core.effects import Desire, Effect, Forget, LogForOperators, Publish
from shmserve.core.registry import ModelEntry
from shmserve.errors import ProtocolViolation
from shmserve.log_fields import LogFields

LINGER_S = 0.5


class Rollouts:
    """All models by name, and the instances of all revisions by name."""

    def __init__(self, load_timeout_s: float) -> None:
        self._load_timeout_s = load_timeout_s
        self.by_name: dict[str, ModelRecord] = {}
        self.instances: dict[str, InstanceRecord] = {}
        # instance -> (model, version)
        self._homes: dict[str, tuple[ModelRecord, VersionRecord]] = {}
        self.next_number = 1

    def number(self) -> int:
        """Return a number for a new revision. All revisions at start have number 1."""
        self.next_number += 1
        return self.next_number

    def home(self, instance: str) -> tuple[ModelRecord, VersionRecord]:
        """Return the model and the version of an instance."""
        return self._homes[instance]

    def has(self, name: str, version: str) -> bool:
        """Return True if a revision of the model has the version."""
        model = self.by_name.get(name)
        revisions = model.revisions() if model is not None else ()
        return any(record.spec.version == version for r in revisions for record in r.versions)

    def unproven(self, record: InstanceRecord) -> bool:
        """Return True if an instance has never loaded its model, or its revision has not taken
        over yet."""
        coming = self._homes[record.name][0].coming
        return not record.loaded or (coming is not None and record in coming.instances())

    def entries(self) -> dict[str, dict[str, ModelEntry]]:
        published = {name: model.entries() for name, model in self.by_name.items()}
        return {name: entries for name, entries in published.items() if entries}

    # ---------------------------------------------------------------- load, unload

    def load(
        self,
        name: str,
        revision: Revision,
        now: float,
        *,
        required: bool = False,
        implied: bool = False,
    ) -> list[Effect]:
        """Load a model anew. Requires that the model is not `changing`: one load at a time."""
        model = self.by_name.setdefault(name, ModelRecord(name))
        assert not model.changing
        for version in revision.versions:
            for record in version.instances:
                record.begin_load(now, self._load_timeout_s)
        self._enter(model, revision)
        replaced = model.begin_load(revision, required, implied)
        if replaced is not None:
            self._leave(model, replaced, now, 0.0)
        return [Publish(), Desire(), *self.settle(model, now)]

    def unload(self, name: str, now: float, *, removed: bool = False) -> list[Effect]:
        """Stop serving a model. Accepted requests are finished. Requires that the model is not
        `changing`."""
        model = self.by_name.get(name)
        if model is None:
            return []
        assert not model.changing
        if model.serving is not None:
            self._leave(model, model.serving, now, LINGER_S)
        model.unload(removed)
        return [Publish(), Desire(), *self.settle(model, now)]

    def refuse(self, name: str, problems: dict[str, str]) -> list[Effect]:
        """Note a failed load of a model that could not even be described."""
        self.by_name.setdefault(name, ModelRecord(name)).refuse(problems)
        return [Publish()]

    def restore(self, models: Iterable[ModelRecord], next_number: int) -> None:
        """Restore models, and the next revision's number, from a checkpoint after a restart."""
        self.next_number = next_number
        for model in models:
            self.by_name[model.name] = model
            for revision in model.revisions():
                self._enter(model, revision)

    # ------------------------------------------------------------------ what follows

    def settle(self, model: ModelRecord, now: float) -> list[Effect]:
        """Finish loads with a known outcome, and forget revisions that have left."""
        effects: list[Effect] = []
        if model.coming is not None:
            effects = self._settle_coming(model, model.coming, now)
        elif model.loading and model.serving is not None and model.serving.settled:
            problems, failures = model.serving.problems(), model.serving.failures
            model.end_load(problems, {v: reason for v, reason in problems.items() if v in failures})
            effects = [Publish()]
        for revision in list(model.leaving):
            if all(record.gone for record in revision.instances()):
                model.leaving.remove(revision)
                effects.append(self._forget(revision))
        if model.removed and not model.leaving and model.serving is None:
            self.by_name.pop(model.name, None)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Dismiss instances whose time to leave has come, and settle all models."""
        effects: list[Effect] = []
        for model in list(self.by_name.values()):
            for revision in model.leaving:
                departing = [r for r in revision.instances() if not r.left and now >= r.leave_at]
                for record in departing:
                    record.dismiss(now)
                effects += [Desire()] if departing else []
            effects += self.settle(model, now)
        return effects

    def _settle_coming(self, model: ModelRecord, coming: Revision, now: float) -> list[Effect]:
        problems = coming.problems()
        old = model.serving
        assert old is not None
        if problems:
            model.end_load(problems, problems)
            self._leave(model, coming, now, 0.0)
            text = "load failed, the old model serves on"
            about = LogFields(model=model.name, reason=model.error)
            return [LogForOperators(text, about), Publish(), Desire()]
        if not coming.complete:
            return []
        model.replace(coming)
        self._leave(model, old, now, LINGER_S)
        return [Publish(), Desire()]

    def _enter(self, model: ModelRecord, revision: Revision) -> None:
        for version in revision.versions:
            for record in version.instances:
                if record.name in self.instances:
                    raise ProtocolViolation(f"a second instance {record.name}")
                self.instances[record.name] = record
                self._homes[record.name] = (model, version)

    def _leave(self, model: ModelRecord, revision: Revision, now: float, linger_s: float) -> None:
        model.leaving.append(revision)
        for record in revision.instances():
            record.linger(now + linger_s)
            if not linger_s or not record.live:
                record.dismiss(now)

    def _forget(self, revision: Revision) -> Effect:
        names = tuple(record.name for record in revision.instances())
        for name in names:
            del self.instances[name]
            del self._homes[name]
        return Forget(names, revision.overrides)
