"""Expected sizes of a model's outputs, as far as a client can know before the answer."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from shmserve.client import tensors
from shmserve.protocol.control.lane_messages import INLINE_TOTAL

_MANY = 1024
_SMALL = 4096  # bytes; a smaller output travels as fast in a response body or a lane's answer
_UNKNOWN: tuple[str, tuple[int, ...]] = (tensors.BYTES, ())


class DescribedModel(Struct):
    """Model as its metadata describes it: datatypes and shapes of outputs, datatypes of inputs.
    `names`: names of the outputs."""

    outputs: dict[str, tuple[str, tuple[int, ...]]]
    inputs: dict[str, str] = {}
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.names = tuple(self.outputs)

    @classmethod
    def from_metadata(cls, metadata: Any) -> DescribedModel:
        return cls(
            {o["name"]: (o["datatype"], tuple(o["shape"])) for o in metadata["outputs"]},
            {tensor["name"]: tensor["datatype"] for tensor in metadata.get("inputs", ())},
        )


def stream_windows(
    model: DescribedModel, names: Iterable[str], largest: int
) -> dict[str, int | None]:
    """Return the window size in bytes of each output of a stream; None: the lane's messages carry
    the output. `largest`: size in bytes of an output whose size the metadata leaves open."""
    sizes: dict[str, int | None] = {}
    for name in names:
        size = tensors.nbytes_of(*model.outputs.get(name, _UNKNOWN))
        sizes[name] = largest if size is None else size
    inline = sum(size for size in sizes.values() if size is not None and size < _SMALL)
    smallest_window = 1 if inline > INLINE_TOTAL else _SMALL
    return {
        name: None if size is None or size < smallest_window else size
        for name, size in sizes.items()
    }


class ExpectedOutputs(Struct, frozen=True):
    """Expected outputs of requests for the same outputs with inputs of the same shapes.

    Attributes:
        sizes: bytes by output; None: unknown, or too small to benefit from shared memory.
        known: True if the size of every output is known, also of small outputs.
        names: names of the outputs.
        model: model description that the sizes are based on.
    """

    sizes: dict[str, int | None]
    known: bool
    names: tuple[str, ...]
    model: DescribedModel


class OutputSizes:
    """Table of output sizes. A size comes from a static shape, or else from an earlier answer to
    inputs of the same shapes. An output that once was larger than expected is never predicted
    again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Hashable, dict[str, int]] = {}
        self._unsure: set[tuple[Hashable, str]] = set()
        # cache, derived from the other tables
        self._expected: dict[Hashable, ExpectedOutputs] = {}

    def expected(
        self, key: Hashable, shapes: Hashable, model: DescribedModel, names: tuple[str, ...]
    ) -> ExpectedOutputs:
        """Return the expected outputs of a request. `shapes`: hashable description of the inputs'
        shapes. `names`: names of the requested outputs."""
        expected = self._expected.get((key, shapes))
        if expected is not None and expected.model is model and expected.names == names:
            return expected
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
            expected = ExpectedOutputs(sizes, known, names, model)
            self._expected[key, shapes] = expected
            return expected

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
        """Stop predicting these outputs: one was larger than expected."""
        with self._lock:
            if len(self._unsure) < _MANY:
                self._unsure.update((key, name) for name in names)
            self._expected.clear()
