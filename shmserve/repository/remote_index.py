"""The file `index.json`, for repositories that cannot be listed, such as a web server."""

from __future__ import annotations

from msgspec import Struct

from shmserve.errors import ConfigError, UnreadableMessage
from shmserve.protocol.decoding import json_decoder

INDEX = "index.json"
VERSION = 1


class IndexFile(Struct, frozen=True):
    """A file: size in bytes, SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


class RemoteIndex(Struct, frozen=True):
    """Contents of a repository.

    Attributes:
        models: by model, each path below the model's folder with its file. A path that ends with
            "/" is an empty folder.
    """

    version: int
    models: dict[str, dict[str, IndexFile]]


_decode = json_decoder(RemoteIndex)


def read(data: bytes) -> RemoteIndex:
    """Return the index.

    Raises:
        ConfigError: the data is not an index, or has another version.
    """
    try:
        index: RemoteIndex = _decode(data)
    except UnreadableMessage:
        raise ConfigError(f"{INDEX} was not made by 'shmserve index'") from None
    if index.version != VERSION:
        raise ConfigError(f"{INDEX} has version {index.version}, not {VERSION}")
    return index
