"""Sequence intake: requests of a model with `sequence_batching`, each a step of its sequence."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

from msgspec.structs import replace

from shmserve.core.scheduling.sequence_names import SequenceId, SequenceName, SequenceNames
from shmserve.core.scheduling.sequence_policy import SequencePolicy
from shmserve.core.scheduling.sequence_queue import SequenceQueue
from shmserve.core.scheduling.sequence_slots import Step
from shmserve.errors import Code, InvalidArgument
from shmserve.executor.loop.run_statistics import RunStatistics
from shmserve.executor.loop.runner import IsCancelled, Key, Requested, Runner, RunOutcome, cancelled
from shmserve.executor.loop.scheduler_intake import batch_kind, overflow, ragged_inputs, refusal
from shmserve.executor.peers.channels import Channels
from shmserve.executor.peers.frontend_connections import FrontendConnection
from shmserve.executor.tensors.workspace import Workspace
from shmserve.executor.wrappers.sequence_backend import SequenceBackend, flags_of, sequence_of
from shmserve.executor.wrappers.sequence_tensors import States
from shmserve.observe import flight_recorder
from shmserve.protocol.control.data_messages import Answer, Execute


class SequenceIntake:
    """Intake of a model with `sequence_batching`; implements the scheduler's `Listener`."""

    def __init__(
        self,
        backend: SequenceBackend,
        channels: Channels,
        workspace: Workspace,
        statistics: RunStatistics,
        policy: SequencePolicy,
    ) -> None:
        if not backend.takes_batches:
            policy = policy.one_by_one()
        self.queue: SequenceQueue[Key, Requested] = SequenceQueue(policy, self)
        if policy.by_slot:
            backend.slot_of = self.queue.slot_of
        self._backend = backend
        self._channels = channels
        self._status = channels.status
        self._spec = spec = workspace.spec
        self._outputs = workspace.outputs
        self._statistics = statistics
        self._ragged = ragged_inputs(spec, backend.stacks)
        self._iterative = spec.config.is_iterative
        self._names = SequenceNames()
        self._status.show_free_slots(self.queue.free_slots)

    # ------------------------------------------------------------------ the listener

    def began(self, sequence: SequenceId) -> None:
        """Publish a sequence, unless the sequence is a single request (iterative)."""
        name = self._names.name_of(sequence)
        if name is not None and not self._iterative:
            self._status.show_sequence(name)
        self._status.show_free_slots(self.queue.free_slots)

    def ended(self, sequence: SequenceId) -> None:
        """Publish the end of a sequence, and forget the states."""
        name = self._names.name_of(sequence)
        if name is not None and not self._iterative:
            self._status.hide_sequence(name)
        self._names.end(sequence)
        self._status.show_free_slots(self.queue.free_slots)
        self._backend.states.forget(sequence)

    def gave_way(self, sequence: SequenceId) -> None:
        """Record the event. The client learns that the sequence has ended from the refusal of the
        next request."""
        model = f"idle sequences of model '{self._spec.name}'"
        flight_recorder.record("limit reached", model, "max_caller_share")

    def gave_up(self, items: list[Requested]) -> None:
        """Refuse the requests of a sequence that has waited too long for a slot."""
        for connection, message in items:
            answer = refusal(message, "timeout of the corresponding sequence has been expired")
            self._channels.send(connection, answer, [])

    # ------------------------------------------------------------------ the intake

    def push(self, key: Key, requested: Requested, deadline_ns: int, caller: int) -> None:
        """Put a request into its sequence's queue, or refuse the request."""
        connection, message = requested
        sequence = self._names.find(message.sequence)
        try:
            self._check(message, sequence)
        except InvalidArgument as ex:
            self._channels.send(connection, _invalid(message, ex.message), [])
            return
        if sequence is None:
            if not self.queue.has_room_for(caller):
                answer = overflow(message, "Exceeds maximum number of sequences")
                self._channels.send(connection, answer, [])
                return
            sequence = self._names.begin(message.sequence)
        message = self._for_model(message, sequence)
        arrived_ns = min(message.sent_ns, time.monotonic_ns())
        timeout = message.parameters.get("timeout")  # microseconds
        expires_ns = arrived_ns + timeout * 1000 if isinstance(timeout, int) and timeout else 0
        self.queue.push(sequence, self._step(connection, message, arrived_ns, expires_ns))

    def rejection(self, message: Execute) -> Answer:
        """Return the answer to a request of a sequence that has not begun, because the start never
        ran."""
        assert message.sequence is not None  # only a named sequence has more than one request
        return _invalid(message, self._unknown(message.sequence))

    def again(self, connection: FrontendConnection, message: Execute) -> Step[Key, Requested]:
        """Return the next run of a request that has been rescheduled."""
        message = replace(message, parameters={**message.parameters, "sequence_start": False})
        if self._spec.decoupled:  # only the first run has a deadline
            message = replace(message, deadline_ns=0)
        return self._step(connection, message, time.monotonic_ns())

    def _step(
        self, connection: FrontendConnection, message: Execute, arrived_ns: int, expires_ns: int = 0
    ) -> Step[Key, Requested]:
        flags = flags_of(message.parameters)
        return Step(
            (connection, message.request),
            (connection, message),
            1,
            self._kind(message),
            arrived_ns,
            message.deadline_ns,
            expires_ns=expires_ns,
            caller=message.caller_number,
            start=flags.start,
            end=flags.end or self._iterative,
        )

    def _kind(self, message: Execute) -> Hashable:
        """Return a value that all steps of a run have in common. In a shared tensor, an output of
        a single step could fail all steps, and no step may run twice."""
        kind = batch_kind(message, self._ragged)
        if not self._backend.stacks:
            return kind
        return kind, frozenset(message.outputs or self._outputs)

    def _for_model(self, message: Execute, sequence: SequenceId) -> Execute:
        """Return the request with the sequence's id for the model. A request of an iterative model
        begins a sequence. The end flag stays unset, because the model decides which run is the
        last."""
        parameters = message.parameters
        if self._iterative:
            flags = {"sequence_start": True, "sequence_end": False}
            parameters = {**parameters, "sequence_id": sequence, **flags}
        elif sequence != parameters["sequence_id"]:
            parameters = {**parameters, "sequence_id": sequence}
        else:
            return message
        return replace(message, parameters=parameters)

    def _check(self, message: Execute, sequence: SequenceId | None) -> None:
        """Check that the request can be a part of the sequence. `sequence`: the model's id of the
        sequence, if the sequence lives. Raise InvalidArgument if the request cannot, with Triton's
        text where Triton has the check."""
        name, named = self._spec.name, message.sequence
        if self._statistics.elements(message) != 1:
            raise InvalidArgument(
                f"inference request to model '{name}' must specify batch-size 1 due to "
                "requirements of sequence batcher"
            )
        if named is not None:
            self._backend.controls.check(named.id)
        if self._iterative:
            if named is not None and sequence is not None:
                raise InvalidArgument(f"sequence {named.id} of model '{name}' has not ended yet")
            return
        if named is None:
            raise InvalidArgument(
                f"inference request to model '{name}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        if flags_of(message.parameters).start:
            return
        if sequence is None or not self.queue.knows(sequence):
            raise InvalidArgument(self._unknown(named))

    def _unknown(self, sequence: SequenceName) -> str:
        return (
            f"inference request for sequence {sequence.id} to model '{self._spec.name}' "
            "must specify the START flag on the first request of the sequence"
        )


def _invalid(message: Execute, text: str) -> Answer:
    return Answer(message.request, error_code=Code.INVALID_ARGUMENT, error=text)


class SequenceRunner:
    """Implements `Runner` around `inner`, a batch or stream runner. `states`: states of the
    sequences."""

    def __init__(
        self, inner: Runner, intake: SequenceIntake, states: States, is_cancelled: IsCancelled
    ) -> None:
        self._inner = inner
        self._intake = intake
        self._states = states
        self._is_cancelled = is_cancelled
        self.withdraw = inner.withdraw
        self.rest = inner.rest

    def run(self, batch: Sequence[Requested], now_ns: int) -> Sequence[RunOutcome]:
        """Run requests of different sequences, then let their next requests run."""
        for _, message in batch:
            if flags_of(message.parameters).start:  # also a living sequence may begin anew
                self._states.forget(sequence_of(message.parameters))
        outcomes = self._inner.run(batch, now_ns)
        again: dict[Key, Step[Key, Requested]] = {}
        for outcome in outcomes:
            connection, message = outcome.connection, outcome.message
            sequence = sequence_of(message.parameters)
            self._states.settle(sequence, not outcome.has_failed)
            if not outcome.rescheduled:
                continue
            if self._is_cancelled(connection, message.request):
                outcome.cancel(self._inner.withdraw(connection, cancelled(message.request)))
            else:
                again[connection, message.request] = self._intake.again(connection, message)
        self._intake.queue.done(time.monotonic_ns(), again)
        return outcomes
