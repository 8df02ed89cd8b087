"""Datatypes of the protocol with numpy's types: the rows of `datatype_table.py`, by name."""

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import ml_dtypes
import numpy as np
from msgspec import structs

from shmserve.tensor.datatype_table import ROWS, DatatypeRow


class Datatype(DatatypeRow, frozen=True, kw_only=True):
    """A row of the table, with the numpy type."""

    numpy: np.dtype[Any]

    @property
    def classifiable(self) -> bool:
        """True if elements are numbers that a classification can rank."""
        return self.json_ok and self.numpy.kind in "iuf"


Objects = Sequence[Any] | np.ndarray[Any, Any]


def _datatype(row: DatatypeRow) -> Datatype:
    dtype = np.dtype(getattr(ml_dtypes, row.numpy_name) if row.extension else row.numpy_name)
    return Datatype(**structs.asdict(row), numpy=dtype)


_ALL: Final = tuple(map(_datatype, ROWS))

DATATYPES: Final[dict[str, Datatype]] = {d.name: d for d in _ALL}
BY_CONFIG_NAME: Final[dict[str, Datatype]] = {d.config_name: d for d in _ALL}
_BY_NUMPY: Final[dict[np.dtype[Any], Datatype]] = {d.numpy: d for d in _ALL}


def from_numpy(dtype: np.dtype[Any]) -> Datatype | None:
    """Return the datatype of a numpy array, or None. Strings, bytes and objects are BYTES."""
    datatype = _BY_NUMPY.get(dtype)
    if datatype is None and dtype.kind in "SUO":
        return DATATYPES["BYTES"]
    if datatype is None and not dtype.isnative:
        return None
    return datatype


def object_array(elements: Objects, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return an array of unconverted Python objects, such as bytes or text, with a shape."""
    array = np.empty(prod(shape), np.object_)
    array[:] = elements
    return array.reshape(shape)
