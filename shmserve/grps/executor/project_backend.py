"""The `grps` backend: runs a GRPS project in an executor.

Requests run in threads, as many at a time as the project's max_concurrency. A project's code may
wait meanwhile, for an engine with a thread of its own or for a batch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from shmserve._generated import grps_pb2
from shmserve.errors import Internal, InvalidArgument, ModelFailure
from shmserve.executor.backend import CPU, BatchForm, Context, Request, Response
from shmserve.executor.backends.model_errors import from_exception, from_load, sanitised
from shmserve.grps.executor import framework, message_answers
from shmserve.grps.executor.context import GrpsContext, mark_success
from shmserve.grps.executor.flask_request import request_of
from shmserve.grps.executor.flask_response import answer_of
from shmserve.grps.executor.message_answers import Answers
from shmserve.grps.executor.project_models import ProjectModels
from shmserve.grps.protocol import model_parameters
from shmserve.grps.protocol.custom_http import HttpAnswer
from shmserve.grps.repository import project_files
from shmserve.tensor.spec import ModelSpec

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # seconds between checks whether a request that waits for a thread was cancelled
_EMPTY_ANSWER = (HttpAnswer(200, (("Content-Type", "text/plain"),)), b"")


class GrpsBackend:
    chooses_device = True
    device = CPU  # device of the requests' tensors; a project may use other devices by itself
    reads_on_device = False
    batching = BatchForm.ALONE  # each step of a dag has a batch of its own (`batcher`)

    def __init__(self) -> None:
        self._models: ProjectModels | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._stream_type = model_parameters.STREAM_TYPE

    def load(self, context: Context) -> ModelSpec:
        spec = context.spec
        project = project_files.read(context.directory, spec.version, spec.name)
        for remark in project.remarks:
            log.info("%s", remark)
        framework.install()
        os.chdir(project.root)  # paths in a project's files and code are relative to the project
        try:
            self._models = ProjectModels(project)
        except BaseException as ex:
            raise from_load(ex, log, context.instance) from ex
        self._stream_type = model_parameters.stream_type(spec.parameters)
        self._free = threading.Semaphore(project.max_concurrency)
        self._pool = ThreadPoolExecutor(project.max_concurrency, "grps")
        return spec

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        if self._pool is None:
            raise Internal("the model is not loaded")
        for request in requests:
            if request.responses is None:
                raise Internal("a GRPS project answers in streams only")
            out = Answers(request, request.responses)
            # Take no more requests than there are threads. Other requests wait in the executor's
            # queue, where they have a deadline and can be cancelled.
            while not self._free.acquire(timeout=_LOOK_S):
                if out.cancelled:
                    out.end()
                    break
            else:
                self._pool.submit(self._run, request, out)
        return []

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ one request

    def _run(self, request: Request, out: Answers) -> None:
        try:
            self._answer(request, out)
        finally:
            self._free.release()

    def _answer(self, request: Request, out: Answers) -> None:
        try:
            if out.cancelled:
                out.end()
                return
            context = GrpsContext(
                out,
                request_of(request.inputs),
                bool(request.parameters.get(model_parameters.STREAMING)),
                self._stream_type,
                request.deadline_ns,
            )
            message, name = self._message(request)
            assert self._models is not None
            result = self._models.run(message, context, name)
            self._finish(context, out, result)
        except BaseException as ex:
            out.fail(from_exception(ex, log, "infer failed"))

    def _message(self, request: Request) -> tuple[object, str]:
        """Return the request's message, and the name of the model to run ("": the dag)."""
        assert self._models is not None
        tensor = request.inputs.get(model_parameters.MESSAGE)
        try:
            message = grps_pb2.GrpsMessage.FromString(bytes(tensor.buffer) if tensor else b"")
        except Exception:  # protobuf's DecodeError has no base class of its own in every version
            raise InvalidArgument("the request is no GrpsMessage") from None
        name = str(request.parameters.get(model_parameters.MODEL, "")) or message.model
        # A name outside of the project is the worker's own name, by which the worker was found.
        return message, name if name in self._models else ""

    def _finish(self, context: GrpsContext, out: Answers, result: object) -> None:
        """End the answers with the result of the request."""
        if out.ended:
            return
        response = context.get_http_response()
        if response is not None and not out.started:
            out.send(message_answers.http(*answer_of(response)), True)
        elif context.has_err():
            text = sanitised(context.get_err_msg())
            if text != context.get_err_msg():
                log.error("a model set an error: %s", context.get_err_msg())
            out.fail(ModelFailure(text or "the model set an error without a text"))
        elif out.started or context.if_streaming():
            out.end()
        elif context.get_http_request() is not None:
            out.send(message_answers.http(*_EMPTY_ANSWER), True)
        elif isinstance(result, grps_pb2.GrpsMessage):
            mark_success(result)
            out.send(message_answers.message(result.SerializeToString()), True)
        else:
            raise ModelFailure("Output type must be GrpsMessage.")
