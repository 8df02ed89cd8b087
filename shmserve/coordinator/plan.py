"""What the coordinator writes down, so that its successor goes on where it was killed.

The file `registry.models` holds every model with its incarnations: what serves, what is being
loaded, what was unloaded, with which overrides. It is replaced as a whole before anything that
was decided is published or acknowledged. Who lives is not in it: that is told by the published
registry and by the processes themselves.
"""

from __future__ import annotations

import os

import msgspec
from msgspec import Struct

from shmserve.core.control.lifecycle import State
from shmserve.core.control.reconciler import Fleet
from shmserve.core.control.records import Incarnation, InstanceRecord, ModelRecord, VersionRecord
from shmserve.protocol.control.link_messages import Instance
from shmserve.tensor.spec import ModelSpec

FILE = "registry.models"


class InstancePlan(Struct, frozen=True):
    """One instance. `failed`: why it never will be loaded; empty: that is not so."""

    instance: Instance
    loaded: bool
    failed: str


class VersionPlan(Struct, frozen=True):
    spec: ModelSpec
    instances: tuple[InstancePlan, ...]


class IncarnationPlan(Struct, frozen=True):
    number: int
    versions: tuple[VersionPlan, ...]
    failures: dict[str, str]
    fingerprint: str
    overrides: str


class ModelPlan(Struct, frozen=True):
    """`ModelRecord` without incarnations that go: nobody needs them any more."""

    name: str
    required: bool
    serving: IncarnationPlan | None
    coming: IncarnationPlan | None
    unloaded: dict[str, ModelSpec]
    refused: dict[str, str]
    loading: bool


class Plan(Struct, frozen=True):
    """All of it, for one epoch. `tried`: what model control has tried by itself."""

    epoch: str
    next_number: int
    failures: dict[str, str]
    models: tuple[ModelPlan, ...]
    tried: dict[str, str] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Plan).decode


class PlanFile:
    """The file, and what is in it."""

    def __init__(self, run_dir: str, epoch: str) -> None:
        self._path = os.path.join(run_dir, FILE)
        self._epoch = epoch
        self._written = b""

    def read(self) -> Plan | None:
        """What a predecessor of the same epoch wrote, or None."""
        try:
            with open(self._path, "rb") as file:
                plan = _decode(file.read())
        except (OSError, msgspec.DecodeError):
            return None
        return plan if plan.epoch == self._epoch else None

    def write(self, fleet: Fleet, instances: dict[str, Instance], tried: dict[str, str]) -> None:
        """Replace it, if something has changed."""
        plan = describe(self._epoch, fleet, instances, tried)
        data = _encode(plan)
        if data != self._written:
            with open(self._path + ".new", "wb") as file:
                file.write(data)
            os.replace(self._path + ".new", self._path)
            self._written = data


def describe(
    epoch: str, fleet: Fleet, instances: dict[str, Instance], tried: dict[str, str]
) -> Plan:
    """What must not be forgotten of a fleet."""
    models = tuple(_model(model, instances) for model in fleet.models.by_name.values())
    return Plan(epoch, fleet.models.next_number, fleet.failures, models, tried)


def restore(plan: Plan, fleet: Fleet, deadline: float, now: float) -> dict[str, Instance]:
    """Put a plan into an empty fleet; its instances by name."""
    instances: dict[str, Instance] = {}
    fleet.models.next_number = plan.next_number
    for model in plan.models:
        record = ModelRecord(
            model.name,
            model.required,
            unloaded=model.unloaded,
            refused=model.refused,
            loading=model.loading,
        )
        if model.serving is not None:
            record.serving = _incarnation(model.serving, instances, deadline, now)
        if model.coming is not None:
            record.coming = _incarnation(model.coming, instances, deadline, now)
        fleet.models.restore(record)
    return instances


def _model(model: ModelRecord, instances: dict[str, Instance]) -> ModelPlan:
    return ModelPlan(
        model.name,
        model.required,
        _plan(model.serving, instances),
        _plan(model.coming, instances),
        model.unloaded,
        model.refused,
        model.loading,
    )


def _plan(
    incarnation: Incarnation | None, instances: dict[str, Instance]
) -> IncarnationPlan | None:
    if incarnation is None:
        return None
    versions = tuple(
        VersionPlan(
            version.spec,
            tuple(
                InstancePlan(
                    instances[r.name], r.loaded, r.reason if r.state is State.FAILED else ""
                )
                for r in version.instances
            ),
        )
        for version in incarnation.versions
    )
    return IncarnationPlan(
        incarnation.number,
        versions,
        incarnation.failures,
        incarnation.fingerprint,
        incarnation.overrides,
    )


def _incarnation(
    plan: IncarnationPlan, instances: dict[str, Instance], deadline: float, now: float
) -> Incarnation:
    versions = []
    for version in plan.versions:
        records = []
        for one in version.instances:
            record = InstanceRecord(
                one.instance.name,
                since=now,
                loaded=one.loaded,
                deadline=deadline,
                device=one.instance.device,
            )
            if one.failed:
                record.state, record.reason = State.FAILED, one.failed
            records.append(record)
            instances[record.name] = one.instance
        loaded = any(record.loaded for record in records)
        versions.append(VersionRecord(version.spec, records, loaded))
    return Incarnation(plan.number, versions, plan.failures, plan.fingerprint, plan.overrides)
