"""Classification extension: the k greatest values of an output as ``value:index[:label]``."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from shmserve.tensor.dtypes import DATATYPES


def top_classes(
    view: memoryview,
    datatype: str,
    shape: tuple[int, ...],
    k: int,
    labels: tuple[str, ...],
    batched: bool,
) -> tuple[list[bytes], tuple[int, ...]]:
    """The elements and the shape of the BYTES tensor that replaces the output.

    Per row of the batch if the model batches, else of the whole tensor; greatest
    first, the lower index first among equals, NaN last.
    """
    array = np.frombuffer(view, DATATYPES[datatype].numpy)
    rows, rest = (shape[0], shape[1:]) if batched and shape else (1, shape)
    table = array.reshape(rows, prod(rest))
    k = min(k, table.shape[1])
    elements = [text for row in table for text in _row(row, k, labels)]
    return elements, (rows, k) if batched else (k,)


def _row(row: np.ndarray[Any, Any], k: int, labels: tuple[str, ...]) -> list[bytes]:
    floating = row.dtype.kind == "f"
    key = np.where(np.isnan(row), -np.inf, row) if floating else row
    # Sorting the reversed row and reading it backwards keeps equal values in order
    order = row.size - 1 - np.argsort(key[::-1], kind="stable")[::-1][:k]
    texts = []
    for index in order.tolist():
        value = row[index].item()
        text = f"{value:f}:{index}" if floating else f"{value}:{index}"
        if index < len(labels):
            text = f"{text}:{labels[index]}"
        texts.append(text.encode())
    return texts
