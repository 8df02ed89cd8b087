"""Named tensor: a tensor's bytes, in any memory, with name, datatype and shape."""

from __future__ import annotations

from typing import Protocol


class NamedTensor(Protocol):
    """A tensor's bytes with name, datatype and shape."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def view(self) -> memoryview: ...
