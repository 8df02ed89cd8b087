"""Choice of a request's path: a lane or HTTP, and which tensors go through shared memory. A
refusal that is caused by shared memory is retried without that memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Set
from typing import Any

from msgspec import Struct, field

from shmserve.client.http_stream import HttpAnswers, generate_request
from shmserve.client.lane_answers import LaneAnswers
from shmserve.client.memory.block_pool import BlockPool
from shmserve.client.memory.shared_pools import SharedMemoryPools
from shmserve.client.output_sizes import DescribedModel, OutputSizes, stream_windows
from shmserve.client.placed_request import PoolOf, RequestAttempt
from shmserve.client.result import ClientCall, Result
from shmserve.client.result_reader import ResultReader
from shmserve.client.result_stream import AnswerSource
from shmserve.client.service_calls import model_path
from shmserve.client.wire.http_transport import Reply, Transport, left_s
from shmserve.client.wire.inference_error import InferenceError
from shmserve.client.wire.lanes import Lanes, converse
from shmserve.protocol.control.lane_messages import INLINE_BYTES, LaneAnswer
from shmserve.protocol.decoding import json_decoder

_REPEATS = 4
# After these statuses the request has ended or never started. After other errors the server may
# still be running the request.
_ENDED = frozenset({500, 501, 502, 503})
_REFUSED = frozenset({400, 403, 404, 501})
# Parts of the server's messages for an output larger than expected: with a window, and in a lane's
# message
_TOO_LARGE = ("should be at least", "no window of shared memory")
_HOST, _GPU = "host", "gpu"  # kinds of memory
_NOTHING: Set[str] = frozenset()
_decode = json_decoder()


class Requester(Struct, eq=False):
    """Sender of a client's requests. Thread-safe. `_lanes`: the client's lanes; None: HTTP only.
    `_shared`: raise InferenceError for inputs of `INLINE_BYTES` or more without a place in shared
    memory."""

    _transport: Transport
    _pools: SharedMemoryPools
    _lanes: Lanes | None
    _shared: bool = False
    _models: dict[tuple[str, str], DescribedModel] = {}
    _decoupled: dict[tuple[str, str], bool] = {}
    _barred: dict[str, set[str]] = {}  # kinds of memory that a model does not take
    _sizes: OutputSizes = field(default_factory=OutputSizes)

    def run(self, call: ClientCall) -> Result:
        """Send a request and return the result. Retry a refusal that shared memory has caused."""
        return self.run_until(call, time.monotonic() + call.timeout_s)

    def run_until(self, call: ClientCall, until: float) -> Result:
        """Do as `run`, with a deadline (`time.monotonic`) instead of the call's timeout."""
        described = self._model((call.model, call.version), until)
        names = described.names if call.outputs is None else call.outputs
        key = (call.model, call.version)
        shapes = tuple(sorted([tensor.signature for tensor in call.inputs]))
        barred = self._barred.get(call.model, _NOTHING)
        for repeat in range(_REPEATS + 1):
            expected = self._sizes.expected(key, shapes, described, names)
            use_lane = self._lanes is not None and expected.known
            attempt = RequestAttempt(
                self._pool_of(barred), call.inputs, expected.sizes, call.device, inline=use_lane
            )
            reply: Reply | LaneAnswer
            try:
                if self._shared:
                    self._check_shared(attempt)
                answer, result = self._over_lane(attempt, call, until, use_lane)
                if answer is None:
                    reply = self._send(attempt, call, until)
                    if reply.status == 200:
                        result = ResultReader(attempt.windows, call.device).of_http(
                            reply, call.model
                        )
                else:
                    reply = answer
                if result is not None:
                    self._sizes.learn(key, shapes, result)
                    return result
            finally:
                attempt.close()
            if repeat == _REPEATS or not _is_ours(attempt, reply):
                break
            if _is_too_large(reply):
                self._sizes.mistaken(key, names)
            else:
                barred = self._barred_next(call.model, attempt, reply, repeat, barred)
        raise self._refused(call, reply)

    def input_types(self, model: str, version: str, until: float) -> Mapping[str, str]:
        """Return the datatypes of a model's inputs by name. Return an empty mapping if the server
        does not describe the model: the request itself will report the error."""
        try:
            return self._model((model, version), until).inputs
        except InferenceError:
            return {}

    def forget(self, model: str, version: str) -> None:
        """Forget what is cached of a model, which may have been loaded anew since."""
        self._models.pop((model, version), None)
        self._decoupled.pop((model, version), None)

    def begin(self, call: ClientCall, largest: int) -> AnswerSource:
        """Start a request with any number of answers. `largest`: window size in bytes of an output
        whose size the metadata leaves open. Raise InferenceError if the request could not be
        started, as `run`."""
        until = time.monotonic() + call.timeout_s
        if not self._is_decoupled(call, until):
            return OneAnswer(functools.partial(self.run_until, call, until))
        described = self._model((call.model, call.version), until)
        answers = self._begin_on_lane(call, described, largest, until)
        if answers is not None:
            return answers
        if self._shared and (large := [t.name for t in call.inputs if t.nbytes >= INLINE_BYTES]):
            raise InferenceError(0, f"input '{large[0]}' has no place in shared memory: no lane")
        body = generate_request(call, described)
        path = model_path(call.model, call.version) + "/generate_stream"
        try:
            return HttpAnswers(self._transport.events(path, body, until), call, described)
        except InferenceError as ex:
            self._forget(call, ex.status)
            raise

    def _begin_on_lane(
        self, call: ClientCall, described: DescribedModel, largest: int, until: float
    ) -> AnswerSource | None:
        """Start a stream over a lane, and wait for the first answer. None: no lane was free."""
        key = (call.model, call.version)
        names = described.names if call.outputs is None else call.outputs
        sizes = stream_windows(described, names, largest)
        barred = self._barred.get(call.model, _NOTHING)
        for repeat in range(_REPEATS + 1):
            if self._lanes is None:
                return None
            answers = None
            attempt = RequestAttempt(self._pool_of(barred), call.inputs, sizes, None, inline=True)
            try:
                if self._shared:
                    self._check_shared(attempt)
                request = attempt.lane_request(call.parameters, call.request_id, True)
                if request is None:
                    return None
                begun = converse(self._lanes, key, request, attempt.shared, until)
                if begun is None:
                    return None
                first, _ = begun
                refused = first.final and _is_ours(attempt, first) and not _is_too_large(first)
                if not refused or repeat == _REPEATS:
                    if first.final:
                        self._forget(call, first.status)
                    answers = LaneAnswers(self._lanes, begun, attempt, request, call, until)
                    return answers
            except BaseException:
                attempt.taint()
                raise
            finally:
                if answers is None:
                    attempt.close()
            barred = self._barred_next(call.model, attempt, first, repeat, barred)
        return None

    def _check_shared(self, attempt: RequestAttempt) -> None:
        name = attempt.outside()
        if name is None:
            return
        reason = self._pools.why_not or "there is no room (max_bytes), or the model takes none"
        raise InferenceError(0, f"input '{name}' has no place in shared memory: {reason}")

    def _pool_of(self, barred: Set[str]) -> PoolOf:
        if not barred:
            return self._pools.on

        def pool_of(device: int | None) -> BlockPool | None:
            kind = _HOST if device is None else _GPU
            return self._pools.on(device) if kind not in barred else None

        return pool_of

    def _barred_next(
        self,
        model: str,
        attempt: RequestAttempt,
        reply: Reply | LaneAnswer,
        repeat: int,
        barred: Set[str],
    ) -> Set[str]:
        """Return the kinds of memory to avoid in the next attempt. After a 404 on the first
        attempt, register all memory again and avoid no further kind: the server may have been
        restarted and have lost the regions."""
        if not repeat and reply.status == 404 and self._pools.register_again():
            return barred
        return barred | self._bar(model, attempt, reply.error)

    def _bar(self, model: str, attempt: RequestAttempt, reason: str) -> set[str]:
        """Return the kinds of memory that a refusal rules out, and remember the model's own."""
        if attempt.on_gpu and "CUDA" in reason:
            self._barred.setdefault(model, set()).add(_GPU)
            return {_GPU}
        if "takes no client shared memory" in reason:
            self._barred[model] = {_HOST, _GPU}
        return {_HOST, _GPU}

    def _over_lane(
        self, attempt: RequestAttempt, call: ClientCall, until: float, use_lane: bool
    ) -> tuple[LaneAnswer | None, Result | None]:
        """Return a lane's answer, and the result of a success. No answer: no lane was free."""
        request = None
        if self._lanes is not None and use_lane:
            request = attempt.lane_request(call.parameters, call.request_id)
        if self._lanes is None or request is None:
            return None, None
        key = (call.model, call.version)
        try:
            begun = converse(self._lanes, key, request, attempt.shared, until)
        except BaseException:
            attempt.taint()
            raise
        if begun is None:
            return None, None
        answer, lane = begun
        if answer.status != 200:
            return answer, None
        reader = ResultReader(attempt.windows, call.device)
        return answer, reader.of_lane(
            answer, call.model, call.request_id, lane.opened, call.receipt
        )

    def _send(self, attempt: RequestAttempt, call: ClientCall, until: float) -> Reply:
        headers, body = attempt.request(call.parameters, call.request_id)
        if call.receipt:
            headers["shmserve-receipt"] = "1"
        path = model_path(call.model, call.version) + "/infer"
        ended = False
        try:
            reply = self._transport.request("POST", path, headers, body, left_s(until))
            ended = reply.status < 499 or reply.status in _ENDED
            return reply
        finally:
            if not ended:
                attempt.taint()

    def _refused(self, call: ClientCall, reply: Reply | LaneAnswer) -> InferenceError:
        self._forget(call, reply.status)
        return InferenceError(reply.status, reply.error)

    def _forget(self, call: ClientCall, status: int) -> None:
        """Forget the cached model if a refusal may come from outdated metadata."""
        if 400 <= status < 500 or status == 501:
            self.forget(call.model, call.version)

    def _model(self, key: tuple[str, str], until: float) -> DescribedModel:
        described = self._models.get(key)
        if described is None:
            described = DescribedModel.from_metadata(self._get(model_path(*key), until))
            self._models[key] = described
        return described

    def _is_decoupled(self, call: ClientCall, until: float) -> bool:
        key = (call.model, call.version)
        decoupled = self._decoupled.get(key)
        if decoupled is None:
            config = self._get(model_path(*key) + "/config", until)
            policy = config.get("model_transaction_policy") or {}
            decoupled = self._decoupled[key] = bool(policy.get("decoupled"))
        return decoupled

    def _get(self, path: str, until: float) -> Any:
        reply = self._transport.request("GET", path, timeout_s=left_s(until))
        if reply.status != 200:
            raise InferenceError(reply.status, reply.error)
        return _decode(reply.body.data)


class OneAnswer:
    """Stream of a model that answers once; implements `result_stream.AnswerSource`."""

    def __init__(self, run: Callable[[], Result]) -> None:
        self._run: Callable[[], Result] | None = run

    def next(self) -> Result | None:
        """Return the answer, then None."""
        run, self._run = self._run, None
        return run() if run is not None else None

    def close(self) -> None:
        """Do nothing: the answer holds no resources of the stream."""


def _is_ours(attempt: RequestAttempt, reply: Reply | LaneAnswer) -> bool:
    """Return True if the server refused the client's memory, False for any other refusal."""
    return reply.status in _REFUSED and attempt.is_blamed(reply.error)


def _is_too_large(reply: Reply | LaneAnswer) -> bool:
    return any(words in reply.error for words in _TOO_LARGE)
