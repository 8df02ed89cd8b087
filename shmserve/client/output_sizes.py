"""How large a model's outputs will be, as far as one can know before asking for them."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from shmserve.client import tensors
from shmserve.protocol.control.lane_messages import INLINE_TOTAL

_MANY = 1024
_SMALL = 4096  # below this a response body, or a lane's answer, carries it as fast
_UNKNOWN: tuple[str, tuple[int, ...]] = (tensors.BYTES, ())


class ModelOutputs(Struct, frozen=True):
    """A model as its metadata describes it: outputs with datatype and shape, and the datatypes of
    its inputs."""

    outputs: dict[str, tuple[str, tuple[int, ...]]]
    inputs: dict[str, str] = {}

    @classmethod
    def from_metadata(cls, metadata: Any) -> ModelOutputs:
        return cls(
            {o["name"]: (o["datatype"], tuple(o["shape"])) for o in metadata["outputs"]},
            {i["name"]: i["datatype"] for i in metadata.get("inputs", ())},
        )


def stream_windows(
    model: ModelOutputs, names: Iterable[str], largest: int
) -> dict[str, int | None]:
    """Bytes of the windows that a stream's outputs need; None: messages carry it.

    Args:
        largest: bytes of an output whose size the model does not tell.
    """
    sizes: dict[str, int | None] = {}
    for name in names:
        size = tensors.nbytes_of(*model.outputs.get(name, _UNKNOWN))
        sizes[name] = largest if size is None else size
    inline = sum(size for size in sizes.values() if size is not None and size < _SMALL)
    least = 1 if inline > INLINE_TOTAL else _SMALL
    return {name: None if size is None or size < least else size for name, size in sizes.items()}


class ExpectedOutputs(Struct, frozen=True):
    """What is known of the outputs of requests that are alike.

    Attributes:
        sizes: bytes by output; None: unknown, or not worth shared memory.
        known: the bytes of each are known, be they few or many.
        names: of the outputs.
        model: as it was described.
    """

    sizes: dict[str, int | None]
    known: bool
    names: tuple[str, ...]
    model: ModelOutputs


class OutputSizes:
    """Static shapes tell; else the sizes of an earlier answer to inputs of the same shapes.
    Outputs that turned out larger once are not guessed again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Hashable, dict[str, int]] = {}
        self._unsure: set[tuple[Hashable, str]] = set()
        self._expected: dict[Hashable, ExpectedOutputs] = {}  # follows from the others

    def expected(
        self, key: Hashable, shapes: Hashable, model: ModelOutputs, names: tuple[str, ...]
    ) -> ExpectedOutputs:
        """`shapes`: of the inputs; `names`: of the outputs."""
        found = self._expected.get((key, shapes))
        if found is not None and found.model is model and found.names == names:
            return found
        with self._lock:
            seen, known = self._seen.get((key, shapes), {}), True
            sizes: dict[str, int | None] = {}
            for name in names:
                size = tensors.nbytes_of(*model.outputs.get(name, _UNKNOWN))
                size = seen.get(name) if size is None else size
                if (key, name) in self._unsure:
                    size = None
                known = known and size is not None
                sizes[name] = None if size is None or size < _SMALL else size
            if len(self._expected) >= _MANY:
                self._expected.clear()
            found = ExpectedOutputs(sizes, known, names, model)
            self._expected[key, shapes] = found
            return found

    def learn(self, key: Hashable, shapes: Hashable, arrays: Mapping[str, Any]) -> None:
        sizes = {name: a.nbytes for name, a in arrays.items() if a.dtype.kind != "O"}
        if self._seen.get((key, shapes)) == sizes:
            return
        with self._lock:
            if len(self._seen) >= _MANY:
                self._seen.clear()
            self._seen[key, shapes] = sizes
            self._expected.pop((key, shapes), None)

    def mistaken(self, key: Hashable, names: Iterable[str]) -> None:
        """An answer did not fit."""
        with self._lock:
            if len(self._unsure) < _MANY:
                self._unsure.update((key, name) for name in names)
            self._expected.clear()
