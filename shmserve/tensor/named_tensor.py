"""Named tensor: the bytes of a tensor, and what it is, wherever it lies."""

from __future__ import annotations

from typing import Protocol


class NamedTensor(Protocol):
    """A tensor's bytes, and what it is."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def view(self) -> memoryview: ...
