"""Doors of `shmserve measure`: callers over one transport, each repeating a single request."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import shmserve.client
from shmserve.cli.operating import server_address
from shmserve.client.wire.inference_error import InferenceError
from shmserve.config import Settings
from shmserve.errors import ConfigError, Unavailable

Receipt = Mapping[str, Any]

_WAIT_S = 60.0
_TRANSPORTS = {"http": "http", "region": "http", "lane": "lane"}


class Door(Protocol):
    """Connection of a single caller; a context manager."""

    def send(self, receipt: bool = False) -> Receipt:
        """Send the request and wait for the answer. Return the receipt if `receipt` is set, else
        an empty mapping.

        Raises:
            Unavailable: the request failed; the message gives the reason.
        """
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def maker(
    over: str, url: str, settings: Settings, arguments: argparse.Namespace, inputs: Any
) -> Callable[[], Door]:
    """Return a function that opens a door of this kind. Raise ConfigError if the server has no
    such address."""
    if over != "grpc":
        control = "" if over == "http" else server_address.client_socket(settings, arguments.url)
        return functools.partial(ClientDoor, over, url, control, arguments.model, inputs)
    target = server_address.grpc(settings, arguments.grpc)
    from shmserve.cli.measuring.grpc_door import GrpcDoor

    return functools.partial(GrpcDoor, target, arguments.model, inputs)


class ClientDoor:
    """Caller through `shmserve.client`, restricted to a transport."""

    def __init__(
        self, over: str, url: str, control: str | None, model: str, inputs: Mapping[str, Any]
    ) -> None:
        """Connect. `control` is the argument of `shmserve.client.connect`.

        Raises:
            Unavailable: no server answers, or the server gives no shared memory.
            ConfigError: `url` is malformed.
        """
        self._over, self._model, self._warm = over, model, 0
        try:
            self._client = shmserve.client.connect(
                url, control, timeout=_WAIT_S, lanes=over == "lane"
            )
        except InferenceError as ex:
            raise Unavailable(str(ex)) from None
        except ValueError as ex:
            raise ConfigError(f"--url: {ex}") from None
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
