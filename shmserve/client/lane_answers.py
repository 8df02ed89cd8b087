"""Stream over a lane: receives answers and sends credit for the answers taken."""

import contextlib
import time

from shmserve.client.placed_request import RequestAttempt
from shmserve.client.result import ClientCall, Result
from shmserve.client.result_reader import ResultReader
from shmserve.client.wire.cancel_scope import cancellable
from shmserve.client.wire.inference_error import LATE, InferenceError
from shmserve.client.wire.lanes import DIED, ClientLane, Key, Lanes
from shmserve.errors import PeerDied, ProtocolViolation
from shmserve.protocol.control import lane_messages as wire


class LaneAnswers:
    """Answers to one request over a lane.

    The final answer returns the lane and the memory. An earlier `close` ends the lane and so the
    request, and gives up memory that the executor may still write to.

    `begun`: first answer and its lane; this object owns the lane unless the first answer is final.
    `attempt`: places of the tensors; owned by this object. `until`: deadline of the stream
    (`time.monotonic`).
    """

    def __init__(
        self,
        lanes: Lanes,
        begun: tuple[wire.LaneAnswer, ClientLane],
        attempt: RequestAttempt,
        request: wire.LaneRequest,
        call: ClientCall,
        until: float,
    ) -> None:
        self._lanes = lanes
        self._key: Key = (call.model, call.version)
        first, self._lane = begun
        self._attempt = attempt
        self._request = request
        self._call = call
        self._reader = ResultReader(attempt.windows, call.device, True)
        self._first: wire.LaneAnswer | None = first
        self._until = until
        self._owed = 0  # answers taken for which no credit was sent yet
        self._open = True
        self._lane_open = not first.final

    def next(self) -> Result | InferenceError | None:
        """Return the next answer, as `result_stream.AnswerSource.next`."""
        if not self._open:
            return None
        answer, self._first = self._first or self._receive(), None
        result = self._taken(answer)
        self._owed += 1
        if answer.final:
            self._open = False
            if self._lane_open:
                self._lane_open = False
                self._lanes.give(self._key, self._lane)
            self._attempt.close()
        return result

    def close(self) -> None:
        """End the request. Idempotent."""
        if self._lane_open:
            self._lane_open = False
            self._lane.channel.close()
            self._attempt.taint()
        self._open = False
        self._attempt.close()

    def _taken(self, answer: wire.LaneAnswer) -> Result | InferenceError | None:
        if answer.status != 200:
            return InferenceError(answer.status, answer.error)
        if answer.final and not (answer.outputs or answer.parameters):
            return None
        call = self._call
        return self._reader.of_lane(
            answer, call.model, call.request_id, self._lane.opened, call.receipt
        )

    def _receive(self) -> wire.LaneAnswer:
        """Send credit for the answers taken, and return the next answer. Raise InferenceError if
        the executor died, the deadline passed, or the request was cancelled."""
        lane, request = self._lane, self._request
        left_s = self._until - time.monotonic()
        # Send credit now, so that the executor can tell a slow reader from a reader that has
        # stopped.
        if self._owed:
            owed, self._owed = self._owed, 0
            # answers sent before the executor died can still be received
            with contextlib.suppress(PeerDied):
                lane.channel.send(wire.encode(wire.LaneCredit(request.number, owed)))
        answer = None
        try:
            if left_s > 0:
                with cancellable(lane.channel.refuse):
                    answer = lane.receive(left_s)
        except (PeerDied, ProtocolViolation):
            raise InferenceError(502, DIED) from None
        if answer is None or answer.number != request.number:
            raise InferenceError(0, LATE)
        return answer
