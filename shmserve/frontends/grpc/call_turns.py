"""What a pool of gRPC calls has of each: its place and its turn; and the pool's own bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from msgspec import Struct


class PoolSize(Struct, frozen=True):
    """What a pool may hold.

    Attributes:
        threads: calls that run at a time.
        limit: calls that run or wait.
        share: the part of either that one caller, whoever is connected, may have.
        subject_share: the part of those that run which calls of one subject, a model, may have.
        subject_limit: calls of one subject that run or wait.
        grace_s: how long a call may be silent while others want what it has.
        silent_hold_threads: what silent calls have is a thread, not only a place.
    """

    threads: int
    limit: int
    share: float = 1.0
    grace_s: float = math.inf
    silent_hold_threads: bool = True
    subject_share: float = 1.0
    subject_limit: int = 1 << 30


class PoolPlace(Struct, eq=False):
    """A call's place in its pool. `caller`: whose, as `caller_numbers` numbers them; `uses`: the
    parties that have not left it yet."""

    caller: int
    uses: int = 1


class CallTurn(Struct, eq=False):
    """One call that waits to be run, or is.

    Attributes:
        line: its connection, of which there is one turn for each subject, since a call that may not
            run holds up those behind it.
        post: has an engine's loop run it; None: it is for a thread.
        subject: the model that it names; empty: none that is known.
    """

    line: Hashable
    place: PoolPlace
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    future: Future[Any] | None = None
    post: Callable[[Callable[[], object]], object] | None = None
    subject: bytes = b""
