"""FP32 numbers as the shortest decimals that read back as the same number, in bulk.

JSON libraries print doubles. The double nearest to a short decimal prints as exactly that decimal.
So each FP32 number is rounded to the double with 6 significant digits, or with more (up to 9)
until the double converts back to the same FP32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Powers of ten that a double holds exactly. A quotient of two exact doubles is rounded once, so
# the result is the double nearest to the decimal text.
_EXACT = 22
_POWERS = np.array([10.0**exponent for exponent in range(_EXACT + 1)])
_FEWEST = 6
_WHOLE = 1e6  # integers below this limit are short already


def shortest(values: Array) -> Array:
    """Return doubles that print as the shortest decimals for these FP32 values."""
    with np.errstate(all="ignore"):  # NaN and Infinity stay unchanged
        doubles = values.astype(np.float64)
        plain = (doubles == np.rint(doubles)) & (np.abs(doubles) < _WHOLE)
        todo = np.flatnonzero(~plain & np.isfinite(doubles))
        if todo.size:
            doubles[todo] = _shorten(doubles[todo], values[todo])
    return doubles


def _shorten(doubles: Array, values: Array) -> Array:
    """Do the work of `shortest` for finite numbers other than small integers."""
    places = _FEWEST - 1 - np.floor(np.log10(np.abs(doubles))).astype(np.int64)
    if places.min() >= -_EXACT and places.max() <= _EXACT - 3:
        return _search(doubles, values, places)
    shortest = np.empty_like(doubles)
    near = (places >= -_EXACT) & (places <= _EXACT - 3)
    shortest[near] = _search(doubles[near], values[near], places[near])
    shortest[~near] = _one_by_one(values[~near])
    return shortest


def _search(doubles: Array, values: Array, places: Array) -> Array:
    # Most computed numbers need 8 digits, most typed numbers need 6.
    shortest = _rounded(doubles, places + 2)
    good = shortest.astype(np.float32) == values
    at = np.flatnonzero(good)
    for more in (1, 0):
        tried = _rounded(doubles[at], places[at] + more)
        same = tried.astype(np.float32) == values[at]
        at = at[same]
        shortest[at] = tried[same]
    at = np.flatnonzero(~good)
    if at.size:
        shortest[at] = _rounded(doubles[at], places[at] + 3)
        remaining = at[shortest[at].astype(np.float32) != values[at]]
        shortest[remaining] = _one_by_one(values[remaining])
    return shortest


def _rounded(doubles: Array, places: Array) -> Array:
    """Return the numbers rounded to `places` decimals. Negative places round before the point."""
    if places.size == 0 or places.min() >= 0:
        power = _POWERS[places]
        rounded: Array = np.rint(doubles * power) / power
        return rounded
    up, down = _POWERS[np.maximum(places, 0)], _POWERS[np.maximum(-places, 0)]
    above, below = np.rint(doubles * up) / up, np.rint(doubles / down) * down
    either: Array = np.where(places >= 0, above, below)
    return either


def _one_by_one(values: Array) -> Array:
    """Shorten the numbers by numpy's printing: as short, but ten times slower."""
    printed: Array = values.astype("U16").astype(np.float64)
    return printed
