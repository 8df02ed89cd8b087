"""Doors of `shmserve measure`: callers over one transport, each repeating a single request."""

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import shmserve.client
from shmserve.cli.operating import server_address
from shmserve.client import Client
from shmserve.client.wire.credentials import Credentials
from shmserve.client.wire.inference_error import InferenceError
from shmserve.config import Settings
from shmserve.errors import Unavailable

Receipt = Mapping[str, Any]

_WAIT_S = 60.0
_TRANSPORTS = {"http": "http", "region": "http", "lane": "lane"}


class Door(Protocol):
    """Connection of a single caller; a context manager."""

    def send(self, receipt: bool = False) -> Receipt:
        """Send the request and wait for the answer. Return the receipt if `receipt` is set, else an
        empty mapping. Raise Unavailable if the request failed; the message gives the reason."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def maker(
    over: str,
    url: str,
    credentials: Credentials,
    settings: Settings,
    arguments: argparse.Namespace,
    inputs: Any,
) -> Callable[[], Door]:
    """Return the opener of a kind of door. Raise ConfigError if the server has no address."""
    if over != "grpc":
        control = "" if over == "http" else server_address.client_socket(settings, arguments.url)
        connect = functools.partial(
            shmserve.client.connect,
            url,
            control,
            timeout=_WAIT_S,
            lanes=over == "lane",
            key=credentials.key,
            ca=credentials.ca,
            cert=credentials.cert,
            cert_key=credentials.cert_key,
        )
        return functools.partial(ClientDoor, over, connect, arguments.model, inputs)
    target, encrypted = server_address.grpc(settings, arguments.grpc)
    from shmserve.cli.measuring.grpc_door import GrpcDoor

    return functools.partial(GrpcDoor, target, arguments.model, inputs, credentials, encrypted)


class ClientDoor:
    """Caller through `shmserve.client`, restricted to a transport."""

    def __init__(
        self, over: str, connect: Callable[[], Client], model: str, inputs: Mapping[str, Any]
    ) -> None:
        """Connect. Raise Unavailable if no server answers, or the server gives no shared memory.
        Raise ConfigError if an argument of the command line is malformed."""
        self._over, self._model, self._warm = over, model, 0
        try:
            self._client = connect()
        except InferenceError as ex:
            raise Unavailable(str(ex)) from None
        except ValueError as ex:
            raise server_address.refusal(ex) from None
        if over != "http" and not self._client.shared_memory:
            self._client.close()
            raise Unavailable("no shared memory with the server (docs/client.md)")
        self._inputs = {name: self._placed(array) for name, array in inputs.items()}

    def _placed(self, array: Any) -> Any:
        """Return an input in shared memory if the transport allows, else as given."""
        if self._over == "http" or array.dtype.hasobject:
            return array
        shared = self._client.empty(array.shape, array.dtype)
        shared[...] = array
        return shared

    def send(self, receipt: bool = False) -> Receipt:
        try:
            result = self._client.infer(self._model, self._inputs, receipt=receipt)
        except InferenceError as ex:
            raise Unavailable(str(ex)) from None
        self._warm += 1
        # A lane needs the output sizes, which the client learns from the first requests
        if result.transport != _TRANSPORTS[self._over] and self._warm > 3:
            raise Unavailable(
                f"the request went over {result.transport} instead (docs/shared_memory.md)"
            )
        return result.receipt or {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
