"""The loop of a model with `sequence_batching`: batches of requests, each of another sequence.

A second thread always looks after the channels while the model runs: frontends look at what this
executor publishes of its sequences before they send, and must not wait for the model for it.
"""

from __future__ import annotations

import time

from msgspec.structs import replace

from shmserve.core.scheduling.batch_policy import BatchPolicy
from shmserve.core.scheduling.sequence_policy import SequencePolicy
from shmserve.core.scheduling.sequence_queue import SequenceId, SequenceQueue, Step
from shmserve.errors import Code, InvalidArgument
from shmserve.executor.batch_runner import BatchMember
from shmserve.executor.loop.batch_loop import BatchLoop
from shmserve.executor.loop.channels import Channels
from shmserve.executor.loop.connections import FrontendConnection
from shmserve.executor.loop.serving_loop import Key, Requested
from shmserve.executor.rate_limited import SharedResources
from shmserve.executor.runner import cancelled
from shmserve.executor.sequences.sequence_backend import SequenceBackend, flags_of, sequence_of
from shmserve.executor.sequences.sequence_tensors import Flags
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Answer, Execute
from shmserve.protocol.oip.validation import UNKNOWN_ID

_MOST_NUMBERS = (1 << 31) - 1


class SequenceLoop(BatchLoop):
    """Serves one loaded backend as `BatchLoop` does; implements the queue's `Listener`."""

    def __init__(
        self,
        backend: SequenceBackend,
        workspace: Workspace,
        channels: Channels,
        segment_idle_s: float,
        policy: SequencePolicy,
        resources: SharedResources | None = None,
    ) -> None:
        if not backend.takes_batches:
            policy = policy.one_by_one()
        batches = BatchPolicy(policy.max_size)
        super().__init__(backend, workspace, channels, segment_idle_s, batches, resources)
        if backend.stacks:
            self._ragged = set()
        self._watches = True
        self._sequence_backend = backend
        self._sequences: SequenceQueue[Key, Requested] = SequenceQueue(policy, self)
        self._queue = self._sequences
        if policy.by_slot:
            backend.slot_of = self._sequences.slot_of
        self._iterative = workspace.spec.config.is_iterative
        self._living: set[SequenceId] = set()
        self._last_number = 0
        channels.status.show_free_slots(self._sequences.free_slots)

    def began(self, sequence: SequenceId) -> None:
        self._living.add(sequence)
        if not self._iterative:  # nothing will come for one that is a single request
            self._status.show_sequence(sequence)
        self._status.show_free_slots(self._sequences.free_slots)

    def ended(self, sequence: SequenceId) -> None:
        self._living.discard(sequence)
        if not self._iterative:
            self._status.hide_sequence(sequence)
        self._status.show_free_slots(self._sequences.free_slots)
        self._sequence_backend.states.forget(sequence)

    def _push(self, connection: FrontendConnection, message: Execute) -> None:
        if self._iterative:
            message = self._as_sequence(message)
        sequence, flags = sequence_of(message.parameters), flags_of(message.parameters)
        try:
            self._check(sequence, flags.start, message)
        except InvalidArgument as ex:
            self._answer(connection, message, ex.code, ex.message)
            return
        if flags.start and not self._sequences.has_room_for(sequence):
            self._refuse((connection, message), "Exceeds maximum number of sequences")
            return
        arrived_ns = min(message.sent_ns, time.monotonic_ns())
        self._sequences.push(sequence, self._step(connection, message, flags, arrived_ns))

    def _step(
        self, connection: FrontendConnection, message: Execute, flags: Flags, arrived_ns: int
    ) -> Step[Key, Requested]:
        return Step(
            (connection, message.request),
            (connection, message),
            1,
            self._kind(message) or frozenset(message.outputs or self._workspace.outputs),
            arrived_ns,
            message.deadline_ns,
            start=flags.start,
            end=flags.end or self._iterative,
        )

    def _as_sequence(self, message: Execute) -> Execute:
        """A request that is a sequence of its own. The model is not told which run is its last
        one: the model itself says that."""
        sequence = sequence_of(message.parameters) or self._number()
        told = {"sequence_id": sequence, "sequence_start": True, "sequence_end": False}
        return replace(message, parameters={**message.parameters, **told})

    def _number(self) -> int:
        """For a sequence whose client gave it none; fits every type of a control input. From the
        end that clients do not begin with."""
        while True:
            self._last_number = (self._last_number or _MOST_NUMBERS + 1) - 1 or _MOST_NUMBERS
            if self._last_number not in self._living:
                return self._last_number

    def _again(self, connection: FrontendConnection, message: Execute) -> Step[Key, Requested]:
        """The next run of a request that has been rescheduled."""
        parameters = {**message.parameters, "sequence_start": False}
        message = replace(message, parameters=parameters)
        return self._step(connection, message, flags_of(parameters), time.monotonic_ns())

    def _check(self, sequence: SequenceId, is_start: bool, message: Execute) -> None:
        """Whether the request can be a part of its sequence; Triton's words where it cannot."""
        name = self._workspace.spec.name
        if self._statistics.elements(message) != 1:
            raise InvalidArgument(
                f"inference request to model '{name}' must specify batch-size 1 due to "
                "requirements of sequence batcher"
            )
        if not sequence:
            raise InvalidArgument(
                f"inference request to model '{name}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        self._sequence_backend.controls.check(sequence)
        if self._iterative and sequence in self._living:
            raise InvalidArgument(f"sequence {sequence} of model '{name}' has not ended yet")
        if not is_start and not self._sequences.knows(sequence):
            raise InvalidArgument(self._unknown(sequence))

    def _unknown(self, sequence: SequenceId) -> str:
        return (
            f"inference request for sequence {sequence} to model '{self._workspace.spec.name}' "
            "must specify the START flag on the first request of the sequence"
        )

    def _tell(self, overdue: list[Requested], rejected: list[Requested]) -> None:
        super()._tell(overdue, [])
        for connection, message in rejected:
            text = self._unknown(sequence_of(message.parameters))
            self._answer(connection, message, Code.INVALID_ARGUMENT, text)

    def _answer(
        self, connection: FrontendConnection, message: Execute, code: str, text: str
    ) -> None:
        text = f"[request id: {message.id or UNKNOWN_ID}] {text}"
        answer = Answer(message.request, error_code=code, error=text, refused=True)
        self._channels.send(connection, answer, [])

    def _serve(self, batch: list[Requested]) -> None:
        self._forget_states(batch)
        super()._serve(batch)

    def _forget_states(self, batch: list[Requested]) -> None:
        for _, message in batch:
            if flags_of(message.parameters).start:  # also of one that is here and begins anew
                self._sequence_backend.states.forget(sequence_of(message.parameters))

    def _has_run(self, members: list[BatchMember]) -> None:
        ran = [member for member in members if not member.has_failed]
        if self._iterative and ran:
            self._statistics.iterated(len(ran), ran[0].run)
        again: dict[Key, Step[Key, Requested]] = {}
        for member in members:
            connection, message = member.connection, member.message
            sequence = sequence_of(message.parameters)
            self._sequence_backend.states.settle(sequence, not member.has_failed)
            key = (connection, message.request)
            if member.rescheduled and self._running[key]:
                again[key] = self._again(connection, message)
            elif member.rescheduled:
                member.rescheduled = False
                retained = self._runner.let_go(*key)
                member.answer = replace(cancelled(message.request), retained=retained)
        self._sequences.done(time.monotonic_ns(), again)

    def _count(self, members: list[BatchMember]) -> None:
        if not self._iterative:
            super()._count(members)
            return
        for member in members:
            if not (member.rescheduled or member.has_failed):
                self._statistics.finished(member.answer.timing)
