"""How large a model's outputs will be, as far as one can know before asking for them."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from shmserve.client import tensors

_MANY = 1024
_SMALL = 4096  # below this a response body, or a lane's answer, carries it as fast
_UNKNOWN: tuple[str, tuple[int, ...]] = (tensors.BYTES, ())


class ModelOutputs(Struct, frozen=True):
    """A model as its metadata describes it: outputs with datatype and shape."""

    outputs: dict[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def from_metadata(cls, metadata: Any) -> ModelOutputs:
        return cls({o["name"]: (o["datatype"], tuple(o["shape"])) for o in metadata["outputs"]})


class OutputSizes:
    """Static shapes tell; else the sizes of an earlier answer to inputs of the same shapes.
    Outputs that turned out larger once are not guessed again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Hashable, dict[str, int]] = {}
        self._unsure: set[tuple[Hashable, str]] = set()

    def expected(
        self, key: Hashable, shapes: Hashable, model: ModelOutputs, names: Iterable[str]
    ) -> dict[str, int | None]:
        """Bytes by output; None: unknown, or not worth shared memory."""
        with self._lock:
            seen = self._seen.get((key, shapes), {})
            sizes: dict[str, int | None] = {}
            for name in names:
                datatype, shape = model.outputs.get(name, _UNKNOWN)
                size = tensors.nbytes_of(datatype, shape)
                size = seen.get(name) if size is None else size
                small = size is None or size < _SMALL
                sizes[name] = None if small or (key, name) in self._unsure else size
            return sizes

    def are_known(
        self, key: Hashable, shapes: Hashable, model: ModelOutputs, names: Iterable[str]
    ) -> bool:
        """Whether the bytes of each of these are known, be they few or many."""
        with self._lock:
            seen = self._seen.get((key, shapes), {})
            return not any(
                (key, name) in self._unsure
                or (
                    name not in seen
                    and tensors.nbytes_of(*model.outputs.get(name, _UNKNOWN)) is None
                )
                for name in names
            )

    def learn(self, key: Hashable, shapes: Hashable, arrays: Mapping[str, Any]) -> None:
        sizes = {name: a.nbytes for name, a in arrays.items() if a.dtype.kind != "O"}
        with self._lock:
            if len(self._seen) >= _MANY:
                self._seen.clear()
            self._seen[key, shapes] = sizes

    def mistaken(self, key: Hashable, names: Iterable[str]) -> None:
        """An answer did not fit."""
        with self._lock:
            if len(self._unsure) < _MANY:
                self._unsure.update((key, name) for name in names)
