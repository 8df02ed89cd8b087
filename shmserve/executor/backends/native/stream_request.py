"""Stream request of the native dialect: a decoupled model sends any number of answers to a
request.

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

from typing import Any

from shmserve.errors import ShmserveError
from shmserve.executor.backend import Response
from shmserve.executor.backends.native.dialect import NativeRequest


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
        """End the stream.

        Raises:
            ProtocolViolation: `finish` was called before.
        """
        responses = self._request.responses
        assert responses is not None
        responses.send(None, final=True)

    def __del__(self) -> None:
        if self._request.responses is not None:
            self._request.responses.abandoned()
