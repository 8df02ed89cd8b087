"""Transport gRPC of `shmserve measure`. No other module of the command line imports the gRPC
library."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.cli.measuring.door import WAIT_S, Answered, FailedRequest, Receipt
from shmserve.client.wire.credentials import Credentials
from shmserve.errors import ConfigError
from shmserve.protocol.decoding import json_decoder
from shmserve.tensor import bytes_codec, dtypes

_SERVICE = "/inference.GRPCInferenceService"
_RECEIPT = "shmserve-receipt"
_decode = json_decoder(dict)
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # give each caller its own connection
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


class GrpcDoor:
    """Caller over gRPC: a channel and a request that is encoded once. Each request to a decoupled
    model is a ModelStreamInfer call."""

    def __init__(
        self,
        target: str,
        model: str,
        inputs: Mapping[str, Any],
        credentials: Credentials,
        encrypted: bool = False,
        streamed: bool = False,
    ) -> None:
        """Encode the request and open a channel, with TLS if `encrypted`. Raise ConfigError if an
        array is no tensor, or a file of `credentials` cannot be used."""
        request = pb.ModelInferRequest(model_name=model)
        for name, array in inputs.items():
            datatype = dtypes.from_numpy(array.dtype)
            if datatype is None:
                raise ConfigError(f"--input {name}: tensors cannot have the datatype {array.dtype}")
            request.inputs.add(name=name, datatype=datatype.name, shape=array.shape)
            request.raw_input_contents.append(_raw(array, datatype.itemsize))
        self._request = request.SerializeToString()
        self._metadata: tuple[tuple[str, str], ...] = ()
        if credentials.key:
            self._metadata = (("authorization", f"Bearer {credentials.key}"),)
        if encrypted:
            self._channel = grpc.secure_channel(target, _certificates(credentials), _OPTIONS)
        else:
            self._channel = grpc.insecure_channel(target, _OPTIONS)
        self._streamed = streamed
        self._infer = self._channel.unary_unary(f"{_SERVICE}/ModelInfer")
        self._stream = self._channel.stream_stream(f"{_SERVICE}/ModelStreamInfer")

    def send(self, answered: Answered, receipt: bool = False) -> Receipt:
        metadata = (*self._metadata, *(((_RECEIPT, "1"),) if receipt else ()))
        try:
            if self._streamed:
                return self._send_stream(answered, metadata)
            answer, call = self._infer.with_call(self._request, timeout=WAIT_S, metadata=metadata)
        except grpc.RpcError as ex:
            raise FailedRequest(ex.code().name, ex.details()) from None
        answered(len(answer))
        fields = [*call.initial_metadata(), *call.trailing_metadata()] if receipt else []
        receipts = [value for name, value in fields if name == _RECEIPT]
        return dict(_decode(receipts[0].encode())) if receipts else {}

    def _send_stream(self, answered: Answered, metadata: Any) -> Receipt:
        """Send the request and take all answers. Raise FailedRequest for an
        error among the answers: such an answer has no status."""
        call = self._stream(iter((self._request,)), timeout=WAIT_S, metadata=metadata)
        for message in call:
            error = pb.ModelStreamInferResponse.FromString(message).error_message
            if error:
                call.cancel()
                raise FailedRequest("", error)
            answered(len(message))
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def _certificates(credentials: Credentials) -> grpc.ChannelCredentials:
    """Return the certificates of a channel: the gRPC library wants the bytes of files."""
    ca = credentials.ca or os.environ.get("SSL_CERT_FILE", "")
    paths = (ca, credentials.cert_key or credentials.cert, credentials.cert)
    try:
        read = [Path(path).read_bytes() if path else None for path in paths]
    except OSError as ex:
        raise ConfigError(f"--ca, --cert: {ex.filename} cannot be read: {ex.strerror}") from None
    return grpc.ssl_channel_credentials(*read)


def _raw(array: Any, itemsize: int) -> bytes:
    if itemsize:
        return bytes(np.ascontiguousarray(array).tobytes())
    return bytes_codec.encode(array.reshape(-1).tolist())
