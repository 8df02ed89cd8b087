"""The GRPS service without a transport: health, online flag, metadata, prediction."""

from __future__ import annotations

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.errors import InvalidArgument, NotFound, ShmserveError, Unavailable
from shmserve.frontends.grps.exchange import Exchange, kind_of
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.grps.frontend import metadata_documents as metadata
from shmserve.grps.frontend import payloads
from shmserve.grps.frontend import pipelines as pipeline
from shmserve.grps.frontend.model_names import Models
from shmserve.grps.frontend.payloads import Body, Payload
from shmserve.grps.protocol import custom_http as grps_http
from shmserve.grps.protocol.custom_http import HttpRequest
from shmserve.grps.protocol.message import GrpsMessage, success
from shmserve.protocol.oip.model_signature import plan_of

OK = GrpsMessage(success())


class Grps:
    """See the module. One per process."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self.models = Models(dispatcher, settings)

    def set_online(self, online: bool) -> GrpsMessage:
        """Tell whether load balancers should send requests here: one flag for all processes."""
        self._dispatcher.set_online(online)
        return OK

    def ready(self) -> GrpsMessage:
        """Online, and every model that should be loaded is.

        Raises:
            Unavailable: not so.
        """
        try:
            snapshot = self._dispatcher.snapshot()
        except ShmserveError:
            raise Unavailable("Service Unavailable") from None
        if not (snapshot.grps_online and snapshot.ready):
            raise Unavailable("Service Unavailable")
        return OK

    def server_metadata(self) -> GrpsMessage:
        """What is served, as YAML."""
        text = metadata.server_document(self._dispatcher.snapshot(), self._settings)
        return GrpsMessage(success(), str_data=text)

    def model_metadata(self, message: GrpsMessage) -> GrpsMessage:
        """What is known of the model that the message names in its str_data.

        Raises:
            InvalidArgument: it names none.
            NotFound: there is no such model.
        """
        name = message.str_data
        if name is None:
            raise InvalidArgument("No model name.")
        if not name:
            raise InvalidArgument("The model name is empty.")
        text = metadata.model_document(self.models.names(), name)
        if text is None and (line := pipeline.named(name, self._settings)):
            text = pipeline.document(line, self._settings)
        if text is None:
            raise NotFound("Model not found.")
        return GrpsMessage(success(), str_data=text)

    def entry(self, model: str) -> ModelEntry:
        """The model a request is for; empty: the default one.

        Raises:
            ShmserveError: there is none, or it is not ready.
        """
        return self.models.ready(model)

    def begin(
        self,
        payload: Payload,
        entry: ModelEntry,
        model: str = "",
        streaming: bool = False,
        timeout_s: float | None = None,
    ) -> Exchange:
        """Check a request and bring its payload into slots. `model`: what it was called.

        Raises:
            ShmserveError: it does not fit, or there is no room.
        """
        plan = plan_of(entry.spec)
        call = self._dispatcher.call(entry, timeout_s)
        try:
            payloads.fill(call, plan, payload, self._settings)
        except BaseException as ex:
            call.failed(ex)
            call.close()
            raise
        return Exchange(call, entry, plan, kind_of(payload), model, streaming)

    def begin_http(
        self, entry: ModelEntry, head: HttpRequest, body: Body, streaming: bool
    ) -> Exchange:
        """Bring an HTTP request as it is into slots of a model that takes such.

        Raises:
            ShmserveError: there is no room.
        """
        call = self._dispatcher.call(entry)
        try:
            data = grps_http.encode(head)
            reservation = call.reserve(len(data))
            reservation.view[:] = data
            call.add_input(grps_http.HEAD, "UINT8", (len(data),), reservation)
            size = body.remaining or 0
            if size:
                reservation = call.reserve(size)
                call.receipt.copied_in += body.fill(reservation.view)
                call.add_input(grps_http.BODY, "UINT8", (size,), reservation)
        except BaseException as ex:
            call.failed(ex)
            call.close()
            raise
        return Exchange(call, entry, plan_of(entry.spec), "", "", streaming)
