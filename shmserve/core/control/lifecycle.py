"""Lifecycle: the states of a model instance, and pauses between restarts of its process. Pure.

The coordinator tracks every instance through `TRANSITIONS`. The supervisor asks `Restarts` how
long to wait. Time enters as an argument, in seconds of any monotonic clock.

A dead process is started again, at once the first time, then after growing pauses. A failed load
(the model's own initialisation raised, its configuration is bad) is final: FAILED, no restart
loop. A load longer than `load_timeout_s` is final as well, and so is a load whose processes have
ended three times, if the instance has never been loaded. An instance that has been loaded is
restarted for ever. The reason of a FAILED instance is published. Loading the model again retries
the instance.
"""

from enum import Enum

from shmserve.errors import ProtocolViolation


class State(Enum):
    WANTED = "WANTED"  # should run; no process is known
    STARTING = "STARTING"  # a process was started; has no link (yet, or any more)
    LOADING = "LOADING"  # the process has a link and loads the model
    READY = "READY"  # takes requests
    BACKOFF = "BACKOFF"  # the process ended; the supervisor restarts it when due
    STOPPING = "STOPPING"  # not desired until the process has ended
    FAILED = "FAILED"  # the model cannot be loaded; final until the model is wanted anew


class Event(Enum):
    """Event of an instance, with its reporter."""

    STARTED = "STARTED"  # supervisor: a process of the instance runs
    CONNECTED = "CONNECTED"  # executor: hello
    LOADED = "LOADED"  # executor: the model takes requests
    LOAD_FAILED = "LOAD_FAILED"  # executor: the model cannot be loaded
    LOST = "LOST"  # the executor's link has ended
    EXITED = "EXITED"  # supervisor: the process has ended
    STOP = "STOP"  # watchdog: the process must go
    WANT = "WANT"  # a request to load the failed model again


# STARTED and EXITED come from the supervisor, the other events from the executor's own link.
# Events of the two sources may overtake each other, hence the self-loops, and a failed load of a
# process known to have ended.
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
    """Return the state after `event`. Raise ProtocolViolation if the event cannot happen in the
    state, because the reporter is wrong."""
    after = TRANSITIONS[state].get(event)
    if after is None:
        raise ProtocolViolation(f"{event.value} in state {state.value} of instance {instance}")
    return after


class Restarts:
    """Restart times of a process: at once, then after growing pauses.

    The pause is 0, `base_s`, 2 * `base_s`, ... up to `cap_s`, and 0 again after a run of at least
    `stable_s`.
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
        """Note an end of the process; return the time to start again. `now`: time of the end.
        `at_once`: if False, wait at least `base_s` even the first time, for a process that chose
        to exit and may soon not be desired any more."""
        if self._started_at is not None and now - self._started_at >= self._stable_s:
            self.failures = 0
        exponent = min(self.failures - 1, 32)
        pause = 0.0 if self.failures == 0 else min(self._cap_s, self._base_s * 2**exponent)
        self.failures += 1
        self._started_at = None
        return now + (pause if at_once else max(pause, self._base_s))
