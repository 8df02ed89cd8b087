"""Table of datatypes, with every fact in which they differ. A new datatype is a new row.

Source: Open Inference Protocol V2, "Tensor Data Types"; Triton adds BF16 (2 bytes, little-endian)
and its ModelConfig names (``TYPE_FP32``, ``TYPE_STRING``). The server adds numpy's types
(`dtypes.py`). The client, which may run without ml_dtypes, adds its own types
(`client/tensors.py`).
"""

from enum import IntEnum
from typing import Final

from msgspec import Struct


class DlpackCode(IntEnum):
    """DLPack's codes of element types (DLDataTypeCode)."""

    NONE = -1
    INT = 0
    UINT = 1
    FLOAT = 2
    BFLOAT = 4
    BOOL = 6


class DatatypeRow(Struct, frozen=True):
    """Facts about one datatype.

    Attributes:
        name: name in the protocol.
        numpy_name: name of the numpy type; for an extension type, name in the package ml_dtypes.
        itemsize: bytes of an element; 0 for BYTES, whose elements vary.
        contents_field: number of the field in InferTensorContents that holds the elements; 0: no
            field.
        dlpack: type code of DLPack.
        config_name: name in a model's configuration.
        json_ok: elements can travel as JSON. FP16 and BF16 travel in binary form only.
        extension: numpy has the type only through ml_dtypes.
        cupy: CuPy has arrays of the type.
    """

    name: str
    numpy_name: str
    itemsize: int
    contents_field: int
    dlpack: DlpackCode
    config_name: str
    json_ok: bool = True
    extension: bool = False
    cupy: bool = True


def _row(
    name: str, numpy_name: str, itemsize: int, contents_field: int, dlpack: DlpackCode, **more: bool
) -> DatatypeRow:
    return DatatypeRow(name, numpy_name, itemsize, contents_field, dlpack, f"TYPE_{name}", **more)


ROWS: Final = (
    _row("BOOL", "bool", 1, 1, DlpackCode.BOOL),
    _row("UINT8", "uint8", 1, 4, DlpackCode.UINT),
    _row("UINT16", "uint16", 2, 4, DlpackCode.UINT),
    _row("UINT32", "uint32", 4, 4, DlpackCode.UINT),
    _row("UINT64", "uint64", 8, 5, DlpackCode.UINT),
    _row("INT8", "int8", 1, 2, DlpackCode.INT),
    _row("INT16", "int16", 2, 2, DlpackCode.INT),
    _row("INT32", "int32", 4, 2, DlpackCode.INT),
    _row("INT64", "int64", 8, 3, DlpackCode.INT),
    _row("FP16", "float16", 2, 0, DlpackCode.FLOAT, json_ok=False),
    _row("BF16", "bfloat16", 2, 0, DlpackCode.BFLOAT, json_ok=False, extension=True),
    _row("FP32", "float32", 4, 6, DlpackCode.FLOAT),
    _row("FP64", "float64", 8, 7, DlpackCode.FLOAT),
    DatatypeRow("BYTES", "object", 0, 8, DlpackCode.NONE, "TYPE_STRING", cupy=False),
)
