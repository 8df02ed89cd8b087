"""Fetch of one remote model into the cache: as listed now, complete, or not at all."""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec
from google.protobuf import text_format
from msgspec import Struct

from shmserve._generated import model_config_pb2 as pb
from shmserve.errors import ConfigError, UnreadableMessage
from shmserve.fetcher import cache as caches
from shmserve.fetcher.cache import FILES, PARTS, Cache
from shmserve.fetcher.remote_files import RemoteFile, RemoteModel
from shmserve.protocol.decoding import json_decoder
from shmserve.protocol.triton_config.config_parts import VersionPolicy
from shmserve.repository import mlserver_settings
from shmserve.repository.catalog import SNAPSHOTS
from shmserve.repository.folder_reader import CONFIG_FILE
from shmserve.repository.model_folder import MAX_CONFIG_BYTES

_VERSION = re.compile(r"[1-9][0-9]{0,17}")


class FileSource(Protocol):
    """Source of files: a `stores.Store`. `models` and `fetch` raise ShmserveError on failure."""

    @property
    def url(self) -> str: ...
    def models(self) -> dict[str, RemoteModel]: ...
    def fetch(self, file: RemoteFile, path: str, until: float) -> None: ...


class SnapshotFiles(Struct, frozen=True):
    """Content of a snapshot's file `.files.json`: origin and files. `steps`: for ensembles, the
    models of the steps."""

    url: str
    model: str
    files: tuple[RemoteFile, ...]
    steps: tuple[str, ...] = ()


_decode = json_decoder(SnapshotFiles)


def files_of(cache: Cache, digest: str) -> SnapshotFiles | None:
    """Return the origin and files of a snapshot, or None if there is no such snapshot."""
    try:
        with open(os.path.join(cache.snapshot(digest) or os.devnull, FILES), "rb") as file:
            content: SnapshotFiles = _decode(file.read())
    except (OSError, UnreadableMessage):
        return None
    return content


def fetch(
    store: FileSource,
    cache: Cache,
    model: RemoteModel,
    earlier: str,
    transfers: int,
    limit_s: float,
) -> str:
    """Fetch the files that `model` lists into the cache, unless already there, and return the
    snapshot's digest.

    Args:
        earlier: digest of a snapshot that may have some of the files.
        transfers: largest number of concurrent transfers.
        limit_s: longest time for the model, in seconds.

    Raises:
        ShmserveError: the fetch failed; the message gives the reason. Earlier snapshots are
            untouched, and received files are kept for the next attempt.
    """
    until = time.monotonic() + limit_s
    if model.problem:
        raise ConfigError(model.problem)
    digest = model.digest(store.url)
    if not cache.snapshot(digest):
        with cache.incoming(digest, until) as folder:
            if folder:
                _fill(_Filling(store, cache, model, earlier, transfers, folder, digest, until))
    return digest


class _Filling(Struct, frozen=True):
    """Fetch of a snapshot into `folder`."""

    store: FileSource
    cache: Cache
    model: RemoteModel
    earlier: str
    transfers: int
    folder: str
    digest: str
    until: float

    def path(self, file: RemoteFile) -> str:
        return os.path.join(self.folder, self.model.name, file.path)


def _fill(filling: _Filling) -> None:
    earlier_content = files_of(filling.cache, filling.earlier)
    known_files = (
        {file.path: file for file in earlier_content.files} if earlier_content is not None else {}
    )
    by_path = {file.path: file for file in filling.model.files}
    config = by_path.get(CONFIG_FILE)
    # MLServer's folder may have the model's file in any folder, also one that is named `1`
    policy = VersionPolicy("all" if mlserver_settings.FILE in by_path else "latest")
    steps: tuple[str, ...] = ()
    if config is not None:
        if config.size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
        filling.cache.claim(filling.digest, config.size)
        if not _has_earlier(filling, config, known_files):
            _get(filling, config)
        with open(filling.path(config), "rb") as file:
            policy, steps = _read_config(file.read())
    chosen = tuple(_of_versions(filling.model.files, policy))
    content = SnapshotFiles(filling.store.url, filling.model.name, chosen, steps)
    listed = msgspec.json.encode(content)
    os.makedirs(os.path.join(filling.folder, filling.model.name), exist_ok=True)
    new = [file for file in chosen if not _has_earlier(filling, file, known_files)]
    kept = [filling.path(file) for file in chosen if file not in new and file.path[-1:] != "/"]
    filling.cache.claim(filling.digest, sum(file.size for file in new) + len(listed), kept)
    _get_all(filling, new)
    shutil.rmtree(os.path.join(filling.folder, PARTS), ignore_errors=True)
    caches.write(os.path.join(filling.folder, FILES), listed)
    filling.cache.publish(filling.digest)


def _has_earlier(filling: _Filling, file: RemoteFile, known: dict[str, RemoteFile]) -> bool:
    """Link a file from the earlier snapshot if it has the same size and mark there. Return True if
    the file is now in the folder, False if it must be fetched."""
    same = known.get(file.path)
    if file.is_folder or not file.mark or same is None:
        return False
    if (same.size, same.mark) != (file.size, file.mark):
        return False
    path = filling.path(file)
    earlier = filling.cache.file(SNAPSHOTS, filling.earlier, filling.model.name, file.path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.lexists(path):
            os.link(earlier, path)
        return os.path.samefile(earlier, path)
    except OSError:
        return False  # the file was removed meanwhile, or has too many links


def _get_all(filling: _Filling, files: Iterable[RemoteFile]) -> None:
    """Fetch all files. After the first failure, start no further transfers."""
    pool = ThreadPoolExecutor(filling.transfers, thread_name_prefix="transfer")
    try:
        running: list[Future[None]] = [pool.submit(_get, filling, file) for file in files]
        for future in running:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _get(filling: _Filling, file: RemoteFile) -> None:
    """Fetch a file into the folder unless already there. The file is received in a separate
    folder, checked, and then renamed."""
    path = filling.path(file)
    if file.is_folder:
        os.makedirs(path, exist_ok=True)
        return
    if os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    parts = os.path.join(filling.folder, PARTS)
    os.makedirs(parts, exist_ok=True)
    part = os.path.join(parts, hashlib.sha256(file.path.encode()).hexdigest())
    try:
        filling.store.fetch(file, part, filling.until)
        os.chmod(part, 0o444)  # read-only, because snapshots may share the file
        caches.sync_file(part)
        os.rename(part, path)
    except BaseException:
        if os.path.lexists(part):
            os.unlink(part)
        raise


def _of_versions(files: Iterable[RemoteFile], policy: VersionPolicy) -> Iterable[RemoteFile]:
    """Return the files of served versions, and all files outside of version folders."""
    files = tuple(files)
    present = {int(v) for file in files if _VERSION.fullmatch(v := file.path.split("/")[0])}
    served = {str(version) for version in policy.select(present)}
    for file in files:
        first, slash, _ = file.path.partition("/")
        if not slash or not _VERSION.fullmatch(first) or first in served:
            yield file


def _read_config(data: bytes) -> tuple[VersionPolicy, tuple[str, ...]]:
    """Return the version policy, and the models of an ensemble's steps. Errors in a configuration
    are reported when the model is loaded."""
    try:
        message = text_format.Parse(data, pb.ModelConfig())
    except (text_format.ParseError, ValueError):
        return VersionPolicy(), ()
    steps = tuple(step.model_name for step in message.ensemble_scheduling.step)
    policy = message.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return VersionPolicy("all"), steps
        case "specific":
            return VersionPolicy("specific", versions=tuple(policy.specific.versions)), steps
        case "latest":
            return VersionPolicy("latest", max(1, policy.latest.num_versions)), steps
    return VersionPolicy(), steps
