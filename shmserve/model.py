"""Hints for models that are one Python file with type hints (docs/one_file.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from msgspec import Struct

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+(; ?[\w-]+=[\w.-]+)*", re.ASCII)
BATCHED = "__shmserve_batched__"  # attribute of functions


class Shape:
    """Shape of an array, for `Annotated[NDArray[np.float32], Shape("batch", 3)]`.

    `dims`: for each dimension its size, or a name (or -1) for any size. The name "batch", at the
    first place in all inputs and outputs, is the dimension along which requests are joined.
    """

    def __init__(self, *dims: int | str) -> None:
        for dim in dims:
            if isinstance(dim, bool) or not isinstance(dim, int | str) or dim in (0, ""):
                raise ValueError(f"Shape{dims}: a dimension is a size, -1 or a name, not {dim!r}")
            if isinstance(dim, int) and dim < -1:
                raise ValueError(f"Shape{dims}: the size {dim} is negative")
        if not dims:
            raise ValueError("Shape(): has no dimension; Shape(1) is the shape of a single value")
        if "batch" in dims[1:]:
            raise ValueError(f"Shape{dims}: 'batch' must be the first dimension")
        self.dims = dims

    @property
    def batched(self) -> bool:
        """True if the first dimension is the batch."""
        return self.dims[0] == "batch"


class ContentType:
    """Content type of an answer, for `-> Annotated[bytes, ContentType("image/png")]`: over HTTP the
    bytes are the body as they are. Raise ValueError for a text that is no media type."""

    def __init__(self, text: str) -> None:
        if not _MEDIA_TYPE.fullmatch(text):
            raise ValueError(f"ContentType({text!r}): write a type like image/png")
        self.text = text


class Batching(Struct, frozen=True):
    """Arguments of `batched`."""

    max_size: int
    delay_ms: float


def batched(max_size: int, delay_ms: float = 0) -> Callable[[_Function], _Function]:
    """Return a decorator that sets how a function with a batch dimension is batched.

    Args:
        max_size: largest number of rows of a batch.
        delay_ms: longest wait for more rows, in milliseconds.
    """
    if max_size < 1 or delay_ms < 0:
        raise ValueError(f"batched: max_size {max_size} is below 1, or delay_ms {delay_ms} below 0")

    def mark(function: _Function) -> _Function:
        setattr(function, BATCHED, Batching(max_size, delay_ms))
        return function

    return mark


class ModelRequest(Protocol):
    """Request behind the arguments. An argument with this hint gets the request; its further
    attributes are those of the native dialect (docs/native_models.md)."""

    id: str
    parameters: dict[str, Any]
    cancelled: bool

    def call(self, model: str, inputs: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Call another model of this server, and return its outputs by name."""
        ...

    def call_stream(
        self, model: str, inputs: Mapping[str, Any], **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Call another model of this server, and yield the outputs of each answer."""
        ...
