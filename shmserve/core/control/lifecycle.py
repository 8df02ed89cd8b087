"""The life of a model instance, and pauses between restarts of its process. Pure.

The coordinator tracks every instance through `TRANSITIONS`. The supervisor asks `Restarts` how long
to wait. Time enters as an argument, in seconds of any monotonic clock.

A process that died is started again, at once the first time, then after growing pauses. A load that
failed (the model's own initialisation raised, its configuration is bad) is final: FAILED, no
restart loop. So is a load that takes longer than `load_timeout_s`, and a load whose processes have
ended three times, as long as the instance has never been loaded. An instance that has been loaded
is tried for ever. The reason of a FAILED instance is published, and the instance is tried again
when somebody loads the model.
"""

from __future__ import annotations

from enum import Enum

from shmserve.errors import ProtocolViolation


class State(Enum):
    WANTED = "WANTED"  # should run; no process of it is known
    STARTING = "STARTING"  # a process was started; it has no link (yet, or any more)
    LOADING = "LOADING"  # its process has a link and loads the model
    READY = "READY"  # takes requests
    BACKOFF = "BACKOFF"  # its process ended; the supervisor starts it again when it is due
    STOPPING = "STOPPING"  # left out of what should run until its process has ended
    FAILED = "FAILED"  # the model cannot be loaded; nothing happens until it is wanted anew


class Event(Enum):
    """What happens to an instance, and who tells."""

    STARTED = "STARTED"  # supervisor: a process of it runs
    CONNECTED = "CONNECTED"  # its executor: hello
    LOADED = "LOADED"  # its executor: the model takes requests
    LOAD_FAILED = "LOAD_FAILED"  # its executor: the model cannot be loaded
    LOST = "LOST"  # its executor's link has ended
    EXITED = "EXITED"  # supervisor: its process has ended
    STOP = "STOP"  # watchdog: its process must go
    WANT = "WANT"  # somebody wants a failed model loaded again


# Started and Exited come from the supervisor, the others from the executor's own link:
# they may overtake each other, hence the self-loops, and a failed load of a process that
# is known to have ended.
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.WANTED: {
        Event.STARTED: State.STARTING,
        Event.CONNECTED: State.LOADING,
        Event.LOAD_FAILED: State.FAILED,
        Event.EXITED: State.BACKOFF,
    },
    State.STARTING: {
        Event.STARTED: State.STARTING,
        Event.CONNECTED: State.LOADING,
        Event.LOAD_FAILED: State.FAILED,
        Event.EXITED: State.BACKOFF,
        Event.STOP: State.STOPPING,
    },
    State.LOADING: {
        Event.STARTED: State.LOADING,
        Event.CONNECTED: State.LOADING,
        Event.LOADED: State.READY,
        Event.LOAD_FAILED: State.FAILED,
        Event.LOST: State.STARTING,
        Event.EXITED: State.BACKOFF,
        Event.STOP: State.STOPPING,
    },
    State.READY: {
        Event.STARTED: State.READY,
        Event.CONNECTED: State.READY,
        Event.LOADED: State.READY,
        Event.LOST: State.STARTING,
        Event.EXITED: State.BACKOFF,
        Event.STOP: State.STOPPING,
    },
    State.BACKOFF: {
        Event.STARTED: State.STARTING,
        Event.CONNECTED: State.LOADING,
        Event.LOAD_FAILED: State.FAILED,
        Event.EXITED: State.BACKOFF,
    },
    State.STOPPING: {
        Event.STARTED: State.STOPPING,
        Event.CONNECTED: State.STOPPING,
        Event.LOADED: State.STOPPING,
        Event.LOAD_FAILED: State.FAILED,
        Event.LOST: State.STOPPING,
        Event.EXITED: State.WANTED,
        Event.STOP: State.STOPPING,
    },
    State.FAILED: {
        Event.STARTED: State.FAILED,
        Event.LOAD_FAILED: State.FAILED,
        Event.LOST: State.FAILED,
        Event.EXITED: State.FAILED,
        Event.WANT: State.WANTED,
    },
}


def step(state: State, event: Event, instance: str) -> State:
    """The state after `event`.

    Raises:
        ProtocolViolation: the event cannot happen in this state; whoever told it is wrong.
    """
    after = TRANSITIONS[state].get(event)
    if after is None:
        raise ProtocolViolation(f"{event.value} in state {state.value} of instance {instance}")
    return after


class Restarts:
    """When to start a process again: at once, then after longer and longer pauses.

    The pause is 0, `base_s`, 2 * `base_s`, ... up to `cap_s`, and 0 again for a process
    that had run for `stable_s`.
    """

    def __init__(self, base_s: float = 0.5, cap_s: float = 30.0, stable_s: float = 10.0) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._stable_s = stable_s
        self._started_at: float | None = None
        self.failures = 0  # ends in a row, each after less than `stable_s`

    def started(self, now: float) -> None:
        self._started_at = now

    def ended(self, now: float, *, at_once: bool = True) -> float:
        """Note an end; the time at which to start again.

        Args:
            now: the time of the end.
            at_once: False: wait `base_s` even the first time (the process chose to
                exit, so whoever knows why may be about to take it off the list).
        """
        if self._started_at is not None and now - self._started_at >= self._stable_s:
            self.failures = 0
        exponent = min(self.failures - 1, 32)
        pause = 0.0 if self.failures == 0 else min(self._cap_s, self._base_s * 2**exponent)
        self.failures += 1
        self._started_at = None
        return now + (pause if at_once else max(pause, self._base_s))
