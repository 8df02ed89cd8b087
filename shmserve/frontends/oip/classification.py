"""Classification extension: the k greatest values of an output as ``value:index[:label]``."""

from math import prod
from typing import Any

import numpy as np

from shmserve.dispatch.outcome import OutputTensor
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.protocol.oip.request import InferOutput
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES

_BLOCK = 1 << 20  # elements examined at a time

Indices = np.ndarray[Any, np.dtype[np.int64]]


def classify(
    signature: ModelSignature, requested: InferOutput, tensor: OutputTensor
) -> tuple[str, tuple[int, ...], bytes]:
    """Return the datatype, shape and bytes of the classes that replace an output."""
    output = signature.outputs.get(requested.name)
    elements, shape = top_classes(
        tensor.view,
        tensor.datatype,
        tensor.shape,
        requested.classification,
        output.labels if output is not None else (),
        signature.spec.max_batch_size > 0,
    )
    return "BYTES", shape, bytes_codec.encode(elements)


def top_classes(
    view: memoryview,
    datatype: str,
    shape: tuple[int, ...],
    k: int,
    labels: tuple[str, ...],
    batched: bool,
) -> tuple[list[bytes], tuple[int, ...]]:
    """Return elements and shape of the BYTES tensor that replaces an output. The classes are chosen
    per row of the batch if the model batches, else from the whole tensor. The greatest value comes
    first, the lower index first among equal values, NaN last."""
    array = np.frombuffer(view, DATATYPES[datatype].numpy)
    rows, rest = (shape[0], shape[1:]) if batched and shape else (1, shape)
    table = array.reshape(rows, prod(rest))
    k = min(k, table.shape[1])
    elements = [text for row in table for text in _row(row, k, labels)]
    return elements, (rows, k) if batched else (k,)


def _row(row: np.ndarray[Any, Any], k: int, labels: tuple[str, ...]) -> list[bytes]:
    floating = row.dtype.kind == "f"
    texts = []
    for index in _greatest(row, k).tolist():
        value = row[index].item()
        text = f"{value:f}:{index}" if floating else f"{value}:{index}"
        if index < len(labels):
            text = f"{text}:{labels[index]}"
        texts.append(text.encode())
    return texts


def _greatest(row: np.ndarray[Any, Any], k: int) -> Indices:
    """Return the indices of the k greatest values, greatest first. Memory: k elements and a block.
    Time: nearly linear."""
    best: Indices = np.empty(0, np.int64)
    for start in range(0, row.size, _BLOCK):
        block = start + _selected(row[start : start + _BLOCK], k)
        best = np.concatenate((best, block))
        best = best[_selected(row[best], k)]
    # Sorting the reversed keys and reading the result backwards keeps equal values in order.
    return best[len(best) - 1 - np.argsort(_key(row[best])[::-1], kind="stable")[::-1]]


def _selected(values: np.ndarray[Any, Any], k: int) -> Indices:
    """Return the indices of the k greatest values in ascending order. Among equal values the lower
    indices are selected."""
    if k >= values.size:
        return np.arange(values.size)
    key = _key(values)
    least = np.partition(key, values.size - k)[values.size - k]
    greater = np.flatnonzero(key > least)
    equal = np.flatnonzero(key == least)[: k - greater.size]
    return np.sort(np.concatenate((greater, equal)))


def _key(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the keys by which values are compared: NaN counts as negative infinity."""
    return np.where(np.isnan(values), -np.inf, values) if values.dtype.kind == "f" else values
