"""Stream dialect: runs decoupled models of the native dialect, which send any number of answers to
a request.

    class Model:
        def infer(self, request):                   # a generator: one request at a time
            for i in range(3):
                out = request.output("OUT", (1,))   # for the next answer only
                out[:] = i
                yield                               # or: yield {"OUT": array}

or, with threads of its own and any number of requests under way:

        def infer(self, request):
            threading.Thread(target=self.answer, args=(request,)).start()
        def answer(self, request):
            request.send({"OUT": array})
            request.finish()

With `device_tensors` (see `dialect`), the instance's GPU becomes current in each thread that asks
for a tensor.

A generator whose request is cancelled is closed at its `yield`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Any

from shmserve.errors import Internal, ShmserveError
from shmserve.executor.backend import Request, Response
from shmserve.executor.backends.model_errors import from_exception
from shmserve.executor.backends.native.dialect import NativeDialect, NativeRequest
from shmserve.executor.backends.native.request_forms import RequestForm


class StreamRequest(NativeRequest):
    """Request of a decoupled model. The model may keep the request, and use it from any one
    thread."""

    __slots__ = ()

    def send(self, outputs: Any = None) -> None:
        """Send an answer: arrays from `output(...)` since the last answer, and the given
        `outputs`, as other models return them. Waits while the client is behind. Answers to a
        `cancelled` request are dropped.

        Raises:
            ProtocolViolation: after `finish`.
        """
        responses = self._request.responses
        assert responses is not None
        try:
            response = self.answer(outputs, partial=True)
        except ShmserveError as ex:
            response = Response(error=ex)
        responses.send(response)

    def finish(self) -> None:
        """End the stream. Raise ProtocolViolation if `finish` was called before."""
        responses = self._request.responses
        assert responses is not None
        responses.send(None, final=True)

    def __del__(self) -> None:
        if self._request.responses is not None:
            self._request.responses.abandoned()


_log = logging.getLogger(__name__)


class NativeStreamDialect(NativeDialect):
    def _request_class(self, form: RequestForm | None) -> type[Any]:
        return StreamRequest if form is None else form.stream

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        for request in requests:
            assert request.responses is not None
            try:
                self._stream(request)
            except BaseException as ex:
                request.responses.fail(from_exception(ex, _log, "infer failed"))
        return ()

    def _stream(self, request: Request) -> None:
        view = self._request(request, self._check, self._device, self._models)
        answers = self._model.infer(view)
        if isinstance(answers, Generator):
            for outputs in answers:
                view.send(outputs)
                if request.cancelled:
                    answers.close()
            view.finish()
        elif answers is not None:
            kind = type(answers).__name__
            raise Internal(
                f"infer of a decoupled model must yield, or send and return None: got {kind}"
            )
