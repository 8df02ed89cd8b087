"""Stream dialect: runs decoupled models of the native dialect."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Any

from shmserve.errors import Internal
from shmserve.executor.backend import Request, Response
from shmserve.executor.backends.model_errors import from_exception
from shmserve.executor.backends.native.dialect import NativeDialect
from shmserve.executor.backends.native.request_forms import RequestForm
from shmserve.executor.backends.native.stream_request import StreamRequest

_log = logging.getLogger(__name__)


class NativeStreamDialect(NativeDialect):
    """Runs a class `Model` of a decoupled model."""

    def _request_class(self, form: RequestForm | None) -> type[Any]:
        return StreamRequest if form is None else form.stream

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        for request in requests:
            assert request.responses is not None
            try:
                self._stream(request)
            except (Exception, SystemExit) as ex:
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
