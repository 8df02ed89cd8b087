"""Calls besides inference: health, descriptions, statistics, the model repository."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from typing import Any

import msgspec

from shmserve.client.wire.http_transport import Transport
from shmserve.client.wire.inference_error import InferenceError
from shmserve.protocol.decoding import json_decoder

_decode = json_decoder()


class ServiceCalls:
    """Calls that return documents of the protocol (docs/http_api.md).

    Every call takes a `timeout` in seconds; the default is the client's own. Except for `ready`,
    every call raises InferenceError if the server refuses or does not answer.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pid = os.getpid()

    def ready(self, model: str = "", version: str = "", *, timeout: float | None = None) -> bool:
        """Return True if a model, or the server with all required models, takes requests now.
        Return False if not, and if no server answers."""
        self._check_process()
        path = f"{model_path(model, version)}/ready" if model else "/v2/health/ready"
        try:
            reply = self._transport.request("GET", path, timeout_s=timeout or 0.0)
        except InferenceError:
            return False
        return reply.status == 200

    def metadata(self, model: str = "", version: str = "", *, timeout: float | None = None) -> Any:
        """Return the description of the server, or of a model: inputs, outputs, versions,
        platform."""
        return self._get(model_path(model, version) if model else "/v2", timeout)

    def config(self, model: str, version: str = "", *, timeout: float | None = None) -> Any:
        """Return a model's configuration in effect."""
        return self._get(f"{model_path(model, version)}/config", timeout)

    def statistics(
        self, model: str = "", version: str = "", *, timeout: float | None = None
    ) -> Any:
        """Return counts and times of requests, of one model or of all."""
        path = model_path(model, version) if model else "/v2/models"
        return self._get(f"{path}/stats", timeout)

    def models(self, *, timeout: float | None = None) -> Any:
        """Return the model repository: a list of names, versions, states and reasons."""
        return self._post("index", {}, timeout)

    def load(
        self, model: str, config: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> None:
        """Load a model, or load it anew, and return when it is ready. The server must allow
        explicit loading (`model_control = "explicit"`).

        Args:
            config: model configuration that replaces the repository's.
        """
        text = {"config": msgspec.json.encode(config).decode()} if config is not None else {}
        self._post(f"models/{_quoted(model)}/load", {"parameters": text} if text else {}, timeout)

    def unload(self, model: str, *, timeout: float | None = None) -> None:
        """Unload a model; running requests end first."""
        self._post(f"models/{_quoted(model)}/unload", {}, timeout)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a client cannot be used across a fork: connect in the child")

    def _get(self, path: str, timeout: float | None) -> Any:
        return self._ask("GET", path, [], timeout)

    def _post(self, path: str, document: Mapping[str, Any], timeout: float | None) -> Any:
        body = [msgspec.json.encode(document)]
        return self._ask("POST", f"/v2/repository/{path}", body, timeout)

    def _ask(self, method: str, path: str, body: list[bytes], timeout: float | None) -> Any:
        reply = self._transport.request(method, path, None, body, timeout_s=timeout or 0.0)
        if reply.status != 200:
            raise InferenceError(reply.status, reply.error)
        return _decode(reply.body.data) if reply.body.size else None


def model_path(model: str, version: str) -> str:
    """Return the HTTP path of a model or of one version."""
    path = f"/v2/models/{_quoted(model)}"
    return f"{path}/versions/{_quoted(version)}" if version else path


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")
