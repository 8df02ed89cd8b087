"""Doors through `shmserve.client`, and the choice of a door."""

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import shmserve.client
from shmserve.cli.measuring.door import WAIT_S, Answered, Door, FailedRequest, Receipt
from shmserve.cli.measuring.http_door import HttpDoor
from shmserve.cli.operating import server_address
from shmserve.client import Client
from shmserve.client.result import Result
from shmserve.client.wire.credentials import Credentials
from shmserve.client.wire.inference_error import InferenceError
from shmserve.config import Settings
from shmserve.errors import ConfigError, Unavailable

_TRANSPORTS = {"http": "http", "region": "http", "lane": "lane"}


def maker(
    over: str,
    url: str,
    credentials: Credentials,
    settings: Settings,
    arguments: argparse.Namespace,
    inputs: Any,
    streamed: bool,
) -> Callable[[], Door]:
    """Return the opener of a kind of door. `streamed`: a request may have any number of answers.
    Raise ConfigError if the server has no address, or the transport has no streams."""
    model = arguments.model
    if over == "http" and not streamed:
        return functools.partial(HttpDoor, url, model, inputs, credentials)
    if over != "grpc":
        if over == "region" and streamed:
            raise ConfigError("--over region: a decoupled model answers over http, grpc and lane")
        control = "" if over == "http" else server_address.client_socket(settings, arguments.url)
        connect = functools.partial(
            shmserve.client.connect,
            url,
            control,
            timeout=WAIT_S,
            lanes=over == "lane",
            key=credentials.key,
            ca=credentials.ca,
            cert=credentials.cert,
            cert_key=credentials.cert_key,
        )
        return functools.partial(ClientDoor, over, connect, model, inputs, streamed)
    target, encrypted = server_address.grpc(settings, arguments.grpc)
    from shmserve.cli.measuring.grpc_door import GrpcDoor

    return functools.partial(GrpcDoor, target, model, inputs, credentials, encrypted, streamed)


class ClientDoor:
    """Caller through `shmserve.client`, restricted to a transport."""

    def __init__(
        self,
        over: str,
        connect: Callable[[], Client],
        model: str,
        inputs: Mapping[str, Any],
        streamed: bool,
    ) -> None:
        """Connect. Raise Unavailable if no server answers, or the server gives no shared memory.
        Raise ConfigError if an argument of the command line is malformed."""
        self._over, self._model, self._warm, self._streamed = over, model, 0, streamed
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

    def send(self, answered: Answered, receipt: bool = False) -> Receipt:
        try:
            if not self._streamed:
                result = self._client.infer(self._model, self._inputs, receipt=receipt)
                return self._taken(result, answered)
            last: Receipt = {}
            with self._client.stream(self._model, self._inputs, receipt=receipt) as stream:
                for result in stream:
                    last = self._taken(result, answered)
            return last
        except InferenceError as ex:
            raise FailedRequest(str(ex.status or ""), ex.message) from None

    def _taken(self, result: Result, answered: Answered) -> Receipt:
        """Report an answer, and return the receipt. Raise Unavailable if the answer came over
        another transport."""
        answered(sum(map(nbytes, result.values())))
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


def nbytes(array: Any) -> int:
    """Return the bytes of an array; 4 more for the length of each text."""
    if not array.dtype.hasobject:
        return int(array.nbytes)
    return sum(len(text) + 4 for text in array.ravel())
