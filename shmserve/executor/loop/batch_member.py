"""Batch member: one request of a batch, from its inputs to its answer.

A request fails alone if the cause is known to be that request: unreadable client memory, its own
error response, an output too large for its window. An exception from the backend fails the whole
batch.
"""

from __future__ import annotations

from msgspec.structs import replace

from shmserve.errors import ShmserveError
from shmserve.executor.backend import Response
from shmserve.executor.loop.runner import RunOutcome, error_of_placing
from shmserve.executor.tensors.batch import BatchedOutputs, GatheredBatch
from shmserve.executor.tensors.request import ExecutorRequest, Outputs
from shmserve.protocol.control.data_messages import Answer, Copied, Timing


class BatchMember(RunOutcome, eq=False):
    """One request of a batch.

    Attributes:
        answer: its timing is that of all runs of the request.
        run: duration of the last run alone.
        request: None until the inputs are there.
        gathered: bytes that were copied into the batch.
    """

    answer: Answer = Answer(0)
    run: Timing = Timing()
    request: ExecutorRequest | None = None
    outputs: Outputs | None = None
    gathered: int = 0

    def begin(self, request: ExecutorRequest, batch: GatheredBatch | None) -> None:
        """Have the model run the request. Bring the inputs into the batch if that is gathered.

        Raises:
            ShmserveError: as `GatheredBatch.add`.
        """
        self.request = request
        if batch is not None:
            self.gathered = batch.add(self.connection.frontend, self.message)

    def begin_again(self, request: ExecutorRequest) -> None:
        """Have the model run a rescheduled request once more."""
        request.run_again(self.message.parameters)
        self.request = request

    def fail_with_all(self, error: ShmserveError) -> None:
        """End the request with the error of the batch, unless it has failed already."""
        self.rescheduled = False
        if not self.has_failed:
            self.fail(error)

    def respond(
        self, request: ExecutorRequest, response: Response, gathered: GatheredBatch | None
    ) -> None:
        """Place what the model gives, unless the model wants the request once more."""
        self.rescheduled = request.rescheduled and response.error is None
        if self.rescheduled:
            return
        outputs = Outputs(request) if gathered is None else BatchedOutputs(request, gathered.offers)
        self.outputs = outputs
        error = error_of_placing(request, outputs, response)
        if error is not None:
            self.fail(error)
        else:
            number, tensors = self.message.request, tuple(outputs.tensors)
            self.answer = Answer(number, tensors, parameters=response.parameters)

    def finish(self) -> None:
        """Take back what the model was offered, and lease what it gave."""
        request, outputs = self.request, self.outputs
        if request is None:
            return
        if request.offers:
            request.drop_offers()
        if outputs is not None and self.has_failed:
            outputs.undo()
        elif outputs is not None:
            self.leases = outputs.lease()
            self.segments = [slot.segment for slot in outputs.slots]

    def count(self, run: Timing, share: tuple[int, int] | None) -> None:
        """Complete the answer: the duration, what was copied, and what the model kept.

        Args:
            run: duration of the run.
            share: bytes copied and moved of the request's rows of a gathered batch.
        """
        request, outputs = self.request, self.outputs
        if request is None:
            return
        self.run = run
        copied, moved = (0, 0) if self.rescheduled else request.take_counts()
        written, moved_out = (outputs.copied, outputs.moved) if outputs else (0, 0)
        if share is not None:
            copied, moved = share
        self.answer = replace(
            self.answer,
            timing=run,
            copied=Copied(self.gathered, written, moved + moved_out, copied),
            retained=() if self.rescheduled else request.retained(self.connection.frontend),
        )

    def add_earlier(self, spent: Timing) -> None:
        """Add the duration of earlier runs to that of the last one."""
        before, last = spent, self.run
        runs = before.input + before.infer + before.output
        timing = Timing(
            max(0, last.queue - runs),  # which counts from when the request was sent
            before.input + last.input,
            before.infer + last.infer,
            before.output + last.output,
        )
        self.answer = replace(self.answer, timing=timing)
