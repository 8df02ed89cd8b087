"""Checkpoint: file from which a coordinator's successor continues.

The file `registry.models` holds every model with its revisions: the serving revision, the revision
being loaded, unloaded versions, and the overrides of each revision. The coordinator replaces the
file as a whole before publishing or acknowledging a decision. While the file cannot be written,
the coordinator continues from memory.

A restarted coordinator starts from this file, not from the repository. Living processes are not in
the file: the coordinator finds executors through the published registry and their hellos, and
dismisses executors of leaving revisions.
"""

from __future__ import annotations

import os

import msgspec
from msgspec import Struct

from shmserve.core.control.lifecycle import State
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import InstanceRecord, ModelRecord, Revision, VersionRecord
from shmserve.errors import UnreadableMessage
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.shm.replaced_file import ReplacedFile
from shmserve.tensor.spec import ModelSpec

FILE = "registry.models"

Instances = dict[str, Instance]  # by name


class InstanceCheckpoint(Struct, frozen=True):
    """Instance with its state. `failed`: reason why the instance will never be loaded, or
    empty."""

    instance: Instance
    loaded: bool
    failed: str


class VersionCheckpoint(Struct, frozen=True):
    spec: ModelSpec
    instances: tuple[InstanceCheckpoint, ...]


class RevisionCheckpoint(Struct, frozen=True):
    number: int
    versions: tuple[VersionCheckpoint, ...]
    failures: dict[str, str]
    fingerprint: str
    overrides: str


class ModelCheckpoint(Struct, frozen=True):
    """`ModelRecord` without leaving revisions, which a successor does not need."""

    name: str
    required: bool
    serving: RevisionCheckpoint | None
    coming: RevisionCheckpoint | None
    unloaded: dict[str, ModelSpec]
    refused: dict[str, str]
    loading: bool
    implied: bool = False


class Checkpoint(Struct, frozen=True):
    """Checkpoint of one epoch. `tried`: fingerprints of models that model control tried on its
    own."""

    epoch: str
    next_number: int
    failures: dict[str, str]
    models: tuple[ModelCheckpoint, ...]
    tried: dict[str, str] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgpack_decoder(Checkpoint)


class CheckpointFile:
    def __init__(self, run_dir: str, epoch: str) -> None:
        self._path = os.path.join(run_dir, FILE)
        self.file = ReplacedFile(self._path)
        self._epoch = epoch
        self._written = b""

    def read(self) -> Checkpoint | None:
        """Return the checkpoint of a predecessor in the same epoch. Return None if no such file
        can be read."""
        try:
            with open(self._path, "rb") as file:
                checkpoint: Checkpoint = _decode(file.read())
        except (OSError, UnreadableMessage):
            return None
        return checkpoint if checkpoint.epoch == self._epoch else None

    def write(self, reconciler: Reconciler, instances: Instances, tried: dict[str, str]) -> None:
        """Replace the file if the state has changed. If writing fails, `file.late` is true."""
        data = _encode(describe(self._epoch, reconciler, instances, tried))
        if data != self._written and self.file.write(data):
            self._written = data


def describe(
    epoch: str, reconciler: Reconciler, instances: Instances, tried: dict[str, str]
) -> Checkpoint:
    """Return the state of a reconciler that must survive a restart."""
    models = tuple(
        ModelCheckpoint(
            model.name,
            model.required,
            _describe(model.serving, instances),
            _describe(model.coming, instances),
            model.unloaded,
            model.refused,
            model.loading,
            model.implied,
        )
        for model in reconciler.models.by_name.values()
    )
    return Checkpoint(epoch, reconciler.models.next_number, reconciler.failures, models, tried)


def restore(
    checkpoint: Checkpoint, reconciler: Reconciler, deadline: float, now: float
) -> dict[str, Instance]:
    """Put a checkpoint into an empty reconciler. Return the checkpoint's instances by name."""
    instances: dict[str, Instance] = {}
    records = []
    for model in checkpoint.models:
        serving, coming = (
            None if revision is None else _revision(revision, instances, deadline, now)
            for revision in (model.serving, model.coming)
        )
        record = ModelRecord(
            model.name,
            model.required,
            serving,
            coming,
            unloaded=model.unloaded,
            refused=model.refused,
            loading=model.loading,
            implied=model.implied,
        )
        records.append(record)
    reconciler.models.restore(records, checkpoint.next_number)
    return instances


def _describe(revision: Revision | None, instances: Instances) -> RevisionCheckpoint | None:
    if revision is None:
        return None
    versions = tuple(
        VersionCheckpoint(
            version.spec,
            tuple(
                InstanceCheckpoint(
                    instances[r.name], r.loaded, r.reason if r.state is State.FAILED else ""
                )
                for r in version.instances
            ),
        )
        for version in revision.versions
    )
    return RevisionCheckpoint(
        revision.number, versions, revision.failures, revision.fingerprint, revision.overrides
    )


def _revision(
    saved: RevisionCheckpoint, instances: Instances, deadline: float, now: float
) -> Revision:
    versions = []
    for version in saved.versions:
        records = []
        for entry in version.instances:
            instance = instances[entry.instance.name] = entry.instance
            record = InstanceRecord(
                instance.name,
                State.FAILED if entry.failed else State.WANTED,
                now,
                reason=entry.failed,
                deadline=deadline,
                loaded=entry.loaded,
                device=instance.device,
            )
            records.append(record)
        loaded = any(record.loaded for record in records)
        versions.append(VersionRecord(version.spec, records, loaded))
    return Revision(saved.number, versions, saved.failures, saved.fingerprint, saved.overrides)
