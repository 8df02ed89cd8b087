"""Files that operators and foreign servers write: settings, keys, the index of a repository."""

import os
from collections.abc import Callable

from shmserve import config
from shmserve.core import keys
from shmserve.errors import ConfigError
from shmserve.fetcher import remote_files

_FILE = os.memfd_create("settings.toml")


def _refusal(read: Callable[[], object]) -> str:
    try:
        read()
    except ConfigError as ex:
        return str(ex)
    return ""


def settings_toml(data: bytes) -> None:
    """A file of settings: refused in printable lines, or settings."""
    os.ftruncate(_FILE, 0)
    os.pwrite(_FILE, data, 0)
    told = _refusal(lambda: config.load({"SHMSERVE_CONFIG": f"/proc/self/fd/{_FILE}"}))
    assert all(line.isprintable() for line in told.split("\n")), told


def settings_toml_seeds() -> list[bytes]:
    return [
        b'http_bind = ["127.0.0.1:8000", "unix:/a"]\npool_bytes = "1GiB"\n[grpc]\nbind = []\n',
        b'[http.tls]\ncert = "c"\nkey = "k"\n[limits]\nmodel_repository = "workers"\n',
        b'look_us = "auto"\nmax_heap_bytes = 1e999\nport = 8000\nrequest_timeout_s = inf\n',
        b'http_bind = ["127.0.0.1:1"]\x02pool_bytes = "1GiB"\n"\\u0007" = 1\n',
        b"trace_level = ['TIMESTAMPS']\ntrace = { rate = 1, count = -1 }\n",
    ]


def keys_toml(data: bytes) -> None:
    """A file of keys: refused in a printable line, or keys."""
    told = _refusal(lambda: keys.parse(data))
    assert not told or told.isprintable(), told


def keys_toml_seeds() -> list[bytes]:
    digest = "a" * 64
    return [
        b'[name]\n"\\u0007" = 1\n',
        f'[name]\nsha256 = "{digest}"\nscopes = ["use", "read"]\n'.encode(),
        f'[a-b]\nsha256 = "{digest}"\nscopes = ["use"]\nexpires = 2030-01-01T00:00:00Z\n'.encode(),
    ]


def index_json(data: bytes) -> None:
    """A repository's index.json: refused, or models whose files lie below their folders."""
    try:
        found = remote_files.models(remote_files.from_index(data))
    except ConfigError:
        return
    for model in found.values():
        for file in model.files:
            assert ".." not in file.path.split("/"), file.path
            assert not file.path.startswith("/"), file.path


def index_json_seeds() -> list[bytes]:
    file = b'{"size":3,"sha256":"%s"}' % (b"a" * 64)
    return [
        b'{"version":1,"models":{"m":{"config.pbtxt":%s,"1/model.py":%s}}}' % (file, file),
        b'{"version":1,"models":{"a":{},"b":{"1/":%s,"../x":%s,"/y":%s}}}' % (file, file, file),
        b'{"version":2,"models":{}}',
    ]
