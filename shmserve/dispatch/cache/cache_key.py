"""Key of a cached response: a digest of everything that a response depends on.

The key holds nothing of one host: no region, slot, address, pid, path or revision number. Two
servers compute the same key for equal requests, over any protocol. Format 1 is the SHA-256 of

    a MessagePack array, maps sorted by key:
        the format's number
        models: [name, version, steps] of the model, then, for an ensemble, of the models of its
            steps, depth first; steps: [model, version, inputs, outputs] each
        names of the requested outputs, in the order of the request; empty for all outputs
        parameters for the model, except `priority` and `timeout`
        inputs, sorted by name: [name, datatype, shape, number of bytes]
    the inputs' bytes, in the same order, as binary tensor data

A changed format gets a new number. The key names a model, not the model's files: the `revisions`
beside the key tell whether a response still holds. A revision is a host's own count, so a cache
shared by several hosts would have to compare digests of the files instead.

A request with client memory has no key: frontends never map such memory.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256

from msgspec import UNSET, msgpack

from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.dispatch.outcome import RunOptions
from shmserve.tensor.spec import NamedTensor

FORMAT = 1
_ONLY_WHEN = {"priority", "timeout"}  # parameters without influence on the response
_encode = msgpack.Encoder(order="sorted").encode

Revisions = tuple[str, ...]
Models = list[tuple[str, str, list[tuple[object, ...]]]]  # names, versions and steps


def cache_key(
    entry: ModelEntry, snapshot: Snapshot, options: RunOptions, inputs: Sequence[NamedTensor]
) -> bytes:
    """Return the key of a request to a model with `revisions`."""
    models = models_of(entry, snapshot)
    parameters = {k: v for k, v in options.parameters.items() if k not in _ONLY_WHEN}
    ordered = sorted(inputs, key=lambda tensor: tensor.name)
    tensors = [(t.name, t.datatype, t.shape, t.view.nbytes) for t in ordered]
    # Where the CPU helps, SHA-256 is twice as fast as BLAKE2b.
    key = sha256(_encode((FORMAT, models, options.outputs, parameters, tensors)))
    for tensor in ordered:
        key.update(tensor.view)
    return key.digest()


def models_of(entry: ModelEntry, snapshot: Snapshot) -> Models:
    """Return the key's list of a model and, for an ensemble, of the models of its steps."""
    return [(e.spec.name, e.spec.version, _steps(e)) for e in _parts(entry, snapshot) if e]


def revisions(entry: ModelEntry, snapshot: Snapshot) -> Revisions | None:
    """Return the revision of each model that a response comes from. Return None if a model is not
    available now, or if responses depend on more than the request."""
    found = []
    for part in _parts(entry, snapshot):
        if part is None or part.spec.decoupled or part.spec.config.sequence_batching is not UNSET:
            return None
        if not part.spec.steps:
            if not part.instances:
                return None
            number = part.instances[0].name.partition("@")[2]
            found.append(f"{part.spec.name}/{part.spec.version}@{number}")
    return tuple(found)


def _parts(entry: ModelEntry, snapshot: Snapshot) -> Iterator[ModelEntry | None]:
    """Yield a model, then the models of its steps; None for a step whose model is not ready."""
    yield entry
    for step in entry.spec.steps:
        part = snapshot.ready_entries.get((step.model, step.version))
        yield from _parts(part, snapshot) if part is not None else (None,)


def _steps(entry: ModelEntry) -> list[tuple[object, ...]]:
    return [(step.model, step.version, step.inputs, step.outputs) for step in entry.spec.steps]
