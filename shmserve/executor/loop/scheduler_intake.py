"""Scheduler intake: puts an incoming request into a scheduler, or refuses the request.

The schedulers in `core/scheduling` decide how requests wait. An intake reads from the message and
the model's configuration what a scheduler must know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from msgspec import UNSET, Struct
from msgspec.structs import replace

from shmserve.core.scheduling.batch_policy import BatchPolicy
from shmserve.core.scheduling.batch_queue import BatchQueue, Waiting
from shmserve.core.scheduling.scheduler import Scheduler
from shmserve.errors import Code
from shmserve.executor.backend import BatchForm
from shmserve.executor.loop.run_statistics import RunStatistics
from shmserve.executor.loop.runner import Key, Requested
from shmserve.executor.peers.channels import Channels
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Answer, Execute
from shmserve.tensor.spec import ModelSpec

Push = Callable[[Key, Requested, int, int], None]


class SchedulerIntake(Struct, frozen=True):
    """Way of requests into a scheduler.

    Attributes:
        queue: the scheduler.
        push: puts a request into the scheduler, or sends a refusal. Arguments: key, connection and
            message, deadline (0: none), and the number of the caller.
        rejection: makes the answer to a request that the scheduler has rejected.
        in_order: True if requests of several connections must wait in the order they were sent.
        is_watched: True if the channels need attention while the model runs.

    On one gRPC stream, requests of one sequence to a decoupled model must not overtake each other.
    The stream sends a request only after the previous request has been sent
    (`RunOptions.on_sent`), and to the same executor if no status page lists the sequence yet
    (`BegunSequences`). The executor takes all requests that have come by then in the order of
    `sent_ns`, over all connections.
    """

    queue: Scheduler[Key, Requested]
    push: Push
    is_watched: bool
    in_order: bool = False
    # clients compare the whole text
    rejection: Callable[[Execute], Answer] = lambda message: refusal(
        message, "Request timeout expired"
    )


class BatchIntake:
    """Intake of a model with `dynamic_batching`. `form`: how the backend takes a batch."""

    def __init__(
        self,
        channels: Channels,
        workspace: Workspace,
        statistics: RunStatistics,
        policy: BatchPolicy,
        form: BatchForm,
    ) -> None:
        spec = workspace.spec
        self._takes_batches = form is not BatchForm.ALONE and policy.max_size > 1
        if not self._takes_batches:  # without batches a delay gains nothing
            policy = replace(policy, max_delay_ns=0)
        self.queue: BatchQueue[Key, Requested] = BatchQueue(policy)
        self._channels = channels
        # A model that calls others with its requests' sequence ids must know the ids' owner.
        self._calls_by_request = form is BatchForm.LISTED
        self._statistics = statistics
        self._ragged = ragged_inputs(spec, form is BatchForm.STACKED)
        batching = spec.config.dynamic_batching
        self._takes_turns = batching is UNSET or not batching.preserve_ordering

    def push(self, key: Key, requested: Requested, deadline_ns: int, caller: int) -> None:
        """Put a request into the queue, or refuse the request if the queue is full."""
        connection, message = requested
        priority, timeout = message.parameters.get("priority"), message.parameters.get("timeout")
        kind: Hashable = None
        if self._takes_batches:
            kind = batch_kind(message, self._ragged)
        if self._calls_by_request and message.sequence is not None and kind is not None:
            kind = (kind, message.sequence.owner)
        waiting = Waiting(
            key,
            requested,
            max(1, self._statistics.elements(message)),
            key if kind is None else kind,
            min(message.sent_ns, time.monotonic_ns()),
            deadline_ns,
            caller=caller if self._takes_turns else 0,
        )
        timeout_ns = timeout * 1000 if isinstance(timeout, int) else 0  # microseconds
        if not self.queue.push(waiting, priority, timeout_ns):
            self._channels.send(connection, overflow(message, "Exceeds maximum queue size"), [])


def ragged_inputs(spec: ModelSpec, is_stacked: bool) -> frozenset[str]:
    """Return the inputs whose shapes may differ within a batch: none if rows are stacked."""
    if is_stacked:
        return frozenset()
    return frozenset(e.name for e in spec.config.input if e.allow_ragged_batch)


def batch_kind(message: Execute, ragged: frozenset[str]) -> Hashable:
    """Return a value that all requests of a batch have in common, or None for a request without
    inputs. Requests for different outputs share a batch."""
    if not message.inputs:
        return None
    return frozenset(
        (tensor.name, None if tensor.name in ragged else tensor.shape[1:])
        for tensor in message.inputs
    )


def refusal(message: Execute, text: str) -> Answer:
    """Return the answer to a request for which there is no room or no time."""
    return Answer(message.request, error_code=Code.UNAVAILABLE, error=text, refused=True)


def overflow(message: Execute, text: str) -> Answer:
    """Return the answer to a request that finds no room."""
    return refusal(message, f"[request id: {message.id or '<id_unknown>'}] {text}")
