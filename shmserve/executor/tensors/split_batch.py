"""Split batch: the response to a batch that ran as one request, taken apart for its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from shmserve.errors import Internal
from shmserve.executor.backend import Output, Response


def split(
    responses: Sequence[Response], parts_of: Callable[[Output], list[Any]], copied: Sequence[int]
) -> list[Response]:
    """Return a response for each request of a batch. An error is the error of all.

    Args:
        parts_of: returns the part of each request of an output.
        copied: bytes that were copied for each request.

    Raises:
        Internal: the model gave not one response, or as `parts_of`.
    """
    if len(responses) != 1:
        raise Internal(f"the model gave {len(responses)} responses to 1 batch")
    response = responses[0]
    if response.error is not None:
        return [response] * len(copied)
    outputs = [(o.name, o.datatype, parts_of(o)) for o in response.outputs]
    return [
        Response(
            tuple(Output(name, datatype, parts[index]) for name, datatype, parts in outputs),
            parameters=response.parameters,
            copied=nbytes,
        )
        for index, nbytes in enumerate(copied)
    ]


def split_rows(output: Output, sizes: Sequence[int], what: str = "rows") -> list[Any]:
    """Return parts of these sizes, which lie behind each other.

    Raises:
        Internal: the output has another size than the batch.
    """
    array, total = output.array, sum(sizes)
    if array.shape[:1] != (total,):
        shape = list(array.shape)
        raise Internal(
            f"output '{output.name}' has shape {shape}, but the batch has {total} {what}"
        )
    ends = accumulate(sizes)
    return [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]
