"""GRPS service without a transport: health, online flag, metadata, prediction."""

from __future__ import annotations

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import InvalidArgument, NotFound, ShmserveError, Unavailable
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.grps import settings as grps_settings
from shmserve.grps.frontend import metadata_documents
from shmserve.grps.frontend.exchange import Exchange, HttpSource, PayloadSource
from shmserve.grps.frontend.payloads import Body, Payload
from shmserve.grps.protocol.custom_http import RequestHead
from shmserve.grps.protocol.grps_message import GrpsMessage, success
from shmserve.grps.protocol.names import Names
from shmserve.grps.settings import ONLINE

OK = GrpsMessage(success())
_SHOWN = 128  # limit of characters of a client's value that a message repeats


class ModelNames:
    """The models of a process by all names that clients may use."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._default = grps_settings.of(settings).default_model
        self._names: Names | None = None

    def names(self) -> Names:
        """Return the current names, computed once per change of the registry."""
        snapshot = self._dispatcher.snapshot()
        names = self._names
        if names is None or names.snapshot is not snapshot:
            names = self._names = Names(snapshot)
        return names

    def ready(self, name: str) -> ModelEntry:
        """Return the model of this name, or the default model for an empty name.

        Raises:
            NotFound: there is no such model.
            InvalidArgument: the name is empty, and there is no default model.
            Unavailable: the model is not ready.
        """
        if not name:
            return self._default_model()
        match = self.names().find(name)
        if match is None:
            shown = name[:_SHOWN]
            raise NotFound(f"Model '{shown}' not found. ModelNames are named name-version.")
        return self._dispatcher.ready_model(*match)

    def _default_model(self) -> ModelEntry:
        if self._default:
            match = self.names().find(self._default)
            return self._dispatcher.ready_model(*(match or (self._default,)))
        names = self.names()
        if not names.default:
            raise InvalidArgument(
                "the request names no model, and the server has no default model"
                f" ({len(names.snapshot.models)} models, setting grps_default_model)"
            )
        return self._dispatcher.ready_model(names.default)


class Grps:
    """The GRPS service of a process. Methods return answers, or raise errors that the transport
    turns into answers."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self.models = ModelNames(dispatcher, settings)

    def set_online(self, online: bool) -> GrpsMessage:
        """Set whether load balancers should send requests to this server: one flag for all
        processes."""
        self._dispatcher.set_flag(ONLINE, online)
        return OK

    def ready(self) -> GrpsMessage:
        """Check that the server is online and every required model is loaded.

        Raises:
            Unavailable: the server is not ready.
        """
        try:
            snapshot = self._dispatcher.snapshot()
        except ShmserveError:
            raise Unavailable("Service Unavailable") from None
        if not (snapshot.flags.get(ONLINE) and snapshot.ready):
            raise Unavailable("Service Unavailable")
        return OK

    def server_metadata(self) -> GrpsMessage:
        """Return a YAML document of the served models."""
        text = metadata_documents.server_document(self._dispatcher.snapshot(), self._settings)
        return GrpsMessage(success(), str_data=text)

    def model_metadata(self, message: GrpsMessage) -> GrpsMessage:
        """Return a YAML document of the model that `str_data` of the message names.

        Raises:
            InvalidArgument: the message names no model.
            NotFound: there is no such model.
        """
        name = message.str_data
        if name is None:
            raise InvalidArgument("No model name.")
        if not name:
            raise InvalidArgument("The model name is empty.")
        text = metadata_documents.model_document(self.models.names(), name)
        if text is None:
            raise NotFound("Model not found.")
        return GrpsMessage(success(), str_data=text)

    def begin(self, payload: Payload, entry: ModelEntry, options: RunOptions) -> Exchange:
        """Begin an exchange for a payload, which is checked and copied into slots when the
        exchange runs."""
        source = PayloadSource(payload, self._settings, options)
        kind = "bin_data" if payload.body is not None else payload.message.which
        return Exchange(self._dispatcher, entry, source, kind)

    def begin_http(
        self, entry: ModelEntry, head: RequestHead, body: Body, options: RunOptions
    ) -> Exchange:
        """Begin an exchange for a raw HTTP request, for a model that takes such requests."""
        return Exchange(self._dispatcher, entry, HttpSource(head, body, options))
