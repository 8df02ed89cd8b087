"""Looking: polling for some microseconds before sleeping.

A process that sleeps costs its peer a wake-up, and resumes only when its processor has left idle:
10 to 60 us in all. Polling saves both, but pays only if the event comes soon, and must not take a
processor from a thread that could run. So:

- A wait begins with a look only if the last wait of the same kind was shorter than the budget.
- A look never exceeds the budget. After a look in vain, waits of this kind sleep at once until
  a wait is short again.
- Looks cost time from an account that grows by 1 % of real time. Looks with an event are free
  for a thread with more than `_ACTIVE` waits below `_QUICK_NS` in a row, and earn a quarter of
  their time.
- A `sched_yield` follows each poll in vain, without the interpreter's lock. If the processor is
  away for long, other programs need the time. Then looks are left out for 5 ms, and for twice as
  long each time, up to 2 s.
- Each process has at most one looking thread, and frontends and executors have none while several
  requests are under way.
- A process whose CPU quota (cgroup) was exhausted within the last second does not look.

So an idle process does not look, and a thread with pauses between requests looks for 1 % of the
time at most.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Literal

from shmserve.transport import cgroups

DEFAULT_US = 400
MAX_US = 1000  # as in the setting `look_us`
_SHARE = 100  # a hundredth of the time may be spent on looks that are not free
_SAVED_NS = 4_000_000  # limit of the account
_QUICK_NS = 1_000_000
_ACTIVE = 4  # quick waits in a row, after which looks are free
_REWARD = 4  # a free look earns this part of its time
_AWAY_NS = 200_000  # longest poll without an event; beyond, other programs need the processor
_LONG_AWAY_NS = 1_000_000  # longest poll with an event, likewise
_PAUSE_NS = 5_000_000
_MAX_PAUSE_NS = 2_000_000_000
_QUOTA_NS = 1_000_000_000  # between two checks of the quota

# os.sched_yield keeps the interpreter's lock before Python 3.12
give_way: Callable[[], object] = (
    os.sched_yield if sys.version_info >= (3, 12) else ctypes.CDLL(None).sched_yield
)

Poll = Callable[..., Any]

_turn = threading.Lock()  # held by the looking thread
_budget_ns: int | None = None  # the longest look


def permit(setting: Literal["auto"] | int) -> None:
    """Allow looks of at most `setting` microseconds in this process; 0 forbids looks. `auto`:
    `DEFAULT_US`, or 0 with fewer than two processors. Later calls change nothing. Raise ValueError
    for a number that is not between 0 and `MAX_US`."""
    global _budget_ns
    if setting != "auto" and not 0 <= setting <= MAX_US:
        raise ValueError(f"look_us: {setting} is not between 0 and {MAX_US}")
    if _budget_ns is None:
        if setting == "auto":
            setting = DEFAULT_US if cgroups.processors() >= 2 else 0
        _budget_ns = 1000 * setting


class LookingWait:
    """Waits of one thread, which may begin with a look. `poll` is called with a timeout in seconds
    and `args`, and returns something empty if the timeout passes."""

    __slots__ = (
        "_account_ns",
        "_args",
        "_clock",
        "_is_short",
        "_noted_at",
        "_pause_ns",
        "_poll",
        "_quick",
        "_quota_at",
        "_resume_at",
        "_throttled",
    )

    def __init__(
        self,
        poll: Poll,
        *args: object,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._poll = poll
        self._args = args
        self._clock = clock
        self._is_short = [False, False]  # by kind: the last wait was shorter than the budget
        self._quick = 0  # waits below `_QUICK_NS` in a row
        self._account_ns = _SAVED_NS  # as of `_noted_at`
        self._noted_at = 0
        self._pause_ns = _PAUSE_NS
        self._resume_at = 0  # time from which looks are allowed
        self._quota_at = 0
        self._throttled = -1

    def wait(self, timeout_s: float, kind: int = 0) -> Any:
        """Return what `poll` returns, waiting for at most `timeout_s` seconds. `kind`: 0 or 1;
        waits of one kind predict each other."""
        poll, args, is_short, budget_ns = self._poll, self._args, self._is_short, _budget_ns
        if not budget_ns or not timeout_s:
            return poll(timeout_s, *args)
        began = self._clock()
        if is_short[kind] and began >= self._resume_at and self._may_look(began):
            found, now = self._look(began, began + min(budget_ns, int(timeout_s * 1e9)))
            if found:
                return found
            is_short[kind] = False
            self._quick = 0
            timeout_s = max(0.0, timeout_s - (now - began) / 1e9)
            return poll(timeout_s, *args)
        found = poll(timeout_s, *args)
        took = self._clock() - began
        is_short[kind] = took < budget_ns
        self._quick = self._quick + 1 if took < _QUICK_NS else 0
        return found

    def _may_look(self, now: int) -> bool:
        """Return True if the account and the quota permit a look, and no other thread looks."""
        saved = self._account_ns + (now - self._noted_at) // _SHARE
        self._account_ns, self._noted_at = min(_SAVED_NS, saved), now
        if saved <= 0:
            return False
        if now >= self._quota_at and self._is_throttled(now):
            return False
        return _turn.acquire(blocking=False)

    def _look(self, began: int, end: int) -> tuple[Any, int]:
        """Poll until there is something, or the look must end. Return the result of the last poll
        and the time. Give up the turn to look."""
        poll, args, clock = self._poll, self._args, self._clock
        found, now = None, began
        try:
            found = poll(0, *args)
            while not found and now < end:
                give_way()
                found = poll(0, *args)
                last, now = now, clock()
                if now - last > (_LONG_AWAY_NS if found else _AWAY_NS):
                    self._resume_at = now + self._pause_ns
                    self._pause_ns = min(2 * self._pause_ns, _MAX_PAUSE_NS)
                    break
            else:
                if now > began and self._pause_ns > _PAUSE_NS:
                    self._pause_ns //= 2
        finally:
            _turn.release()
        self._quick += 1
        if found and self._quick > _ACTIVE:
            self._account_ns += (now - began) // _REWARD
        else:
            self._account_ns -= now - began
        return found, now

    def _is_throttled(self, now: int) -> bool:
        """Return True, and leave out looks for a while, if the processor quota was used up since
        the last check."""
        self._quota_at = now + _QUOTA_NS
        count, self._throttled = self._throttled, cgroups.throttled()
        if 0 <= count < self._throttled:
            self._resume_at = self._quota_at
            return True
        return False
