"""Checkpoint: file from which a coordinator's successor continues.

The file `registry.models` holds every model with its revisions: the serving revision, the revision
being loaded, unloaded versions, and the overrides of each revision. The coordinator replaces the
file as a whole before publishing or acknowledging a decision. While the file cannot be written,
the coordinator continues from memory.

A restarted coordinator starts from this file, not from the repository. Living processes are not in
the file: the coordinator finds executors through the published registry and their hellos, and
dismisses executors of leaving revisions.
"""

import os
from dataclasses import replace

import msgspec
from msgspec import Struct

from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import ModelRecord, Revision, VersionRecord
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.shm.replaced_file import ReplacedFile

FILE = "registry.models"

Instances = dict[str, Instance]  # by name


class Checkpoint(Struct, frozen=True):
    """Checkpoint of one epoch, without processes and leaving revisions. `tried`: fingerprints of
    models that model control tried on its own."""

    epoch: str
    next_number: int
    failures: dict[str, str]
    models: tuple[ModelRecord, ...]
    instances: Instances
    tried: dict[str, str] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgpack_decoder(Checkpoint)


class CheckpointFile:
    def __init__(self, run_dir: str, epoch: str) -> None:
        self.file = ReplacedFile(os.path.join(run_dir, FILE))
        self._epoch = epoch
        self._written = b""

    def read(self) -> Checkpoint | None:
        """Return the checkpoint of a predecessor in the same epoch. Return None if no such file
        can be read."""
        checkpoint: Checkpoint | None = self.file.read(_decode)
        return checkpoint if checkpoint and checkpoint.epoch == self._epoch else None

    def write(self, reconciler: Reconciler, instances: Instances, tried: dict[str, str]) -> None:
        """Replace the file if the state has changed. If writing fails, `file.late` is true."""
        data = _encode(describe(self._epoch, reconciler, instances, tried))
        if data != self._written and self.file.write(data):
            self._written = data


def describe(
    epoch: str, reconciler: Reconciler, instances: Instances, tried: dict[str, str]
) -> Checkpoint:
    """Return the state of a reconciler that must survive a restart."""
    models = tuple(_kept(model, instances) for model in reconciler.models.by_name.values())
    kept = [r.name for m in models for revision in m.revisions() for r in revision.instances()]
    number, failures = reconciler.models.next_number, reconciler.failures
    return Checkpoint(epoch, number, failures, models, {n: instances[n] for n in kept}, tried)


def _kept(model: ModelRecord, instances: Instances) -> ModelRecord:
    serving, coming = (
        None if revision is None else replace(revision, versions=_versions(revision, instances))
        for revision in (model.serving, model.coming)
    )
    return replace(model, serving=serving, coming=coming, leaving=[], error="", removed=False)


def _versions(revision: Revision, instances: Instances) -> list[VersionRecord]:
    return [
        VersionRecord(
            version.spec,
            [r.without_process(instances[r.name].device) for r in version.instances],
            any(r.loaded for r in version.instances),
        )
        for version in revision.versions
    ]
