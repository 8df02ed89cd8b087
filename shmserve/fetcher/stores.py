"""Remote repositories by address, through fsspec: listing, and transfer of a file.

Errors are the server's own (`store_errors`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import quote

import fsspec
import yarl
from fsspec import asyn
from fsspec.callbacks import Callback

from shmserve.config import Settings
from shmserve.errors import ConfigError, DeadlineExceeded, ShmserveError, Unavailable
from shmserve.fetcher import hub_limits, remote_files
from shmserve.fetcher.hub_limits import CallLimits
from shmserve.fetcher.remote_files import MOST_INDEX_BYTES, RemoteFile, RemoteModel
from shmserve.fetcher.store_errors import told
from shmserve.repository.remote_index import INDEX

_LIBRARIES = (
    *("fsspec", "s3fs", "gcsfs", "adlfs", "azure", "botocore", "aiobotocore", "aiohttp", "asyncio"),
    *("huggingface_hub", "httpx", "httpcore", "urllib3", "google"),
)
_LOOK_S = 0.2  # seconds between two checks of a transfer
_BLOCK = 1 << 20  # bytes of a transfer that is made in blocks
_BLOCKS = 8  # at a time
_MOST_LISTING_BYTES = 2 * MOST_INDEX_BYTES
_LATE = "repository_timeout_s is over"


def quiet() -> None:
    """Silence the loggers of libraries, because their messages contain requests with keys. Call
    after the log is set up."""
    for name in _LIBRARIES:  # some have handlers of their own
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_own)


def _is_own(record: logging.LogRecord) -> bool:
    return record.name.startswith(("shmserve.", "__main__"))


class Store:
    """Remote repository. Thread-safe. `url`: address without secrets. Secrets are in environment
    variables, as for each store's own tools."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = url.rstrip("/")
        self._scheme = self.url.partition("://")[0]
        self._silence_s = settings.repository_silence_s
        if self._scheme == "hf":
            hub_limits.bound(self._silence_s)
        if self._scheme == "gs":  # read at import: one range at a time, received as it comes
            os.environ.setdefault("DEFAULT_GCSFS_CONCURRENCY", "1")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **self._options(settings))
        except Exception as ex:
            raise told(ex, self.url) from None
        self._root = self._root.rstrip("/")

    def models(self) -> dict[str, RemoteModel]:
        """List the repository and return its models by name. Raise ShmserveError if the listing
        failed; the message names the repository and the reason."""
        try:
            found = remote_files.models(self._listed())
        except ConfigError as ex:
            raise ConfigError(f"{self.url}: {ex.message}") from None
        except Exception as ex:
            raise told(ex, self.url) from None
        if not found:  # more likely a mistake than an empty repository
            raise Unavailable(f"{self.url}: it lists no models")
        return found

    def fetch(self, file: RemoteFile, path: str, until: float) -> None:
        """Write a file to `path`, exactly as listed. `until` is the deadline (`time.monotonic`).
        Raise ShmserveError if the transfer failed, or the content differs from the listing.
        Received data stays at `path`."""
        try:
            self._transfer(file.key, path, _Progress(file.size, until, self._silence_s))
        except Exception as ex:
            raise told(ex, f"file '{file.path}'") from None
        if os.path.getsize(path) != file.size:
            size = os.path.getsize(path)
            raise Unavailable(f"file '{file.path}' came with {size} bytes of {file.size}")
        if remote_files.proves(file.mark) and not remote_files.matches(file.mark, path):
            if not self._is_encrypted(file):
                raise Unavailable(f"file '{file.path}' came with another checksum than was told")
        elif remote_files.proves(file.mark):
            return
        if self._mark_now(file) != file.mark:
            raise Unavailable(f"file '{file.path}' has changed while it was fetched")

    # ------------------------------------------------------------------ listing

    def _listed(self) -> Iterator[tuple[str, RemoteFile]]:
        if self._scheme in ("http", "https"):
            return self._indexed(quote)
        self._fs.invalidate_cache()
        if self._scheme == "az":
            found = self._in_loop(_list_blobs, self._fs, self._root)
        else:  # a folder of `withdirs` would take the place of a file with its name
            found = self._call("_find", "find", self._root, withdirs=False, detail=True)
        index = found.get(f"{self._root}/{INDEX}")
        if index is not None:
            return self._indexed(str, index.get("size"))
        return self._files(found)

    def _indexed(
        self, escaped: Callable[[str], str], size: int | None = None
    ) -> Iterator[tuple[str, RemoteFile]]:
        """Yield the files of the repository's index file. `size`: bytes of the index, as listed."""
        most = MOST_INDEX_BYTES if size is None else min(size, MOST_INDEX_BYTES)
        limits = _Progress(most, time.monotonic() + self._silence_s, self._silence_s)
        with NamedTemporaryFile(prefix="shmserve-") as file:
            self._transfer(f"{self._root}/{INDEX}", file.name, limits)
            data = Path(file.name).read_bytes()
        for path, found in remote_files.from_index(data):
            key = f"{self._root}/{escaped(found.key)}"
            yield path, RemoteFile(found.path, found.size, found.mark, key)

    def _files(self, found: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, RemoteFile]]:
        for key, info in found.items():
            if not key.startswith(f"{self._root}/"):
                continue  # of no repository here, or the repository's own folder
            path = key.removeprefix(f"{self._root}/")
            is_folder = info.get("type") == "directory"
            if is_folder or (path.endswith("/") and not info.get("size")):
                yield f"{path.rstrip('/')}/", RemoteFile("", 0, "", key)
            else:
                size = info.get("size")
                size = size if isinstance(size, int) else -1
                yield path, RemoteFile("", size, remote_files.mark_of(self._scheme, info), key)

    # ----------------------------------------------------------------- transfer

    def _transfer(self, key: str, path: str, progress: _Progress) -> None:
        if not self._fs.async_impl:  # hf
            with hub_limits.limited(CallLimits(progress.until, _MOST_LISTING_BYTES, _LATE)):
                self._fs.get_file(key, path, callback=progress)
            return
        self._refresh()
        if self._scheme == "az":
            receive = _receive_blocks(self._fs, key, path, progress)
        else:
            options = {"max_concurrency": 1} if self._scheme == "s3" else {}
            receive = self._fs._get_file(key, path, callback=progress, **options)
        asyn.sync(self._fs.loop, _guarded, receive, progress)

    def _refresh(self) -> None:
        """Renew Google's credentials if they end soon. The library itself would do so in the loop
        of all stores' transfers, which would stand still meanwhile."""
        if self._scheme == "gs":
            self._fs.credentials.maybe_refresh()

    def _is_encrypted(self, file: RemoteFile) -> bool:
        """Return True if S3's encryption explains an entity tag that is not the content's MD5."""
        if self._scheme != "s3" or not file.mark.startswith("md5:"):
            return False
        bucket, key, _ = self._fs.split_path(file.key)
        try:
            head = asyn.sync(
                *(self._fs.loop, self._fs._call_s3, "head_object"),
                Bucket=bucket,
                Key=key,
                timeout=self._silence_s,
            )
        except Exception as ex:
            raise told(ex, f"file '{file.path}'") from None
        encryption = str(head.get("ServerSideEncryption", ""))
        return encryption.startswith("aws:kms") or "SSECustomerAlgorithm" in head

    def _mark_now(self, file: RemoteFile) -> str:
        if not file.mark:
            return ""
        try:
            self._fs.invalidate_cache()
            info = self._call("_info", "info", file.key)
        except Exception as ex:
            raise told(ex, f"file '{file.path}'") from None
        return remote_files.mark_of(self._scheme, info)

    def _call(self, method: str, plain: str, *args: Any, **options: Any) -> Any:
        if self._fs.async_impl:
            self._refresh()
            return self._in_loop(getattr(self._fs, method), *args, **options)
        until = time.monotonic() + self._silence_s
        with hub_limits.limited(
            CallLimits(until, _MOST_LISTING_BYTES, "the store does not answer in time")
        ):
            return getattr(self._fs, plain)(*args, **options)

    def _in_loop(self, function: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        return asyn.sync(self._fs.loop, function, *args, timeout=self._silence_s, **options)

    def _options(self, settings: Settings) -> dict[str, Any]:
        if self._scheme == "s3":
            times = {"connect_timeout": self._silence_s, "read_timeout": self._silence_s}
            retries = {"total_max_attempts": 3, "mode": "standard"}
            return {"config_kwargs": {**times, "retries": retries}}
        if self._scheme == "hf":
            return {"max_workers": 1}  # list in the calling thread, which has the limits
        if self._scheme in ("http", "https") and settings.repository_http_headers:
            pairs = (text.partition("=") for text in settings.repository_http_headers)
            fields = {name.strip(): value.strip() for name, _, value in pairs}
            return {"client_kwargs": {"middlewares": (_at_origin(self.url, fields),)}}
        return {}


def _at_origin(url: str, fields: Mapping[str, str]) -> Callable[..., Awaitable[Any]]:
    """Return aiohttp middleware that adds header fields to requests to the origin (scheme, host and
    port) of `url`. A redirect to another origin is followed without the fields, because the
    secrets are for the configured server alone."""
    origin = yarl.URL(url).origin()

    async def send(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        if request.url.origin() == origin:
            request.headers.update(fields)
        return await handler(request)

    return send


class _Progress(Callback):  # type: ignore[misc]  # fsspec has no types
    """Progress of a transfer, with limits of bytes, time and silence."""

    def __init__(self, size: int, until: float, silence_s: float) -> None:
        super().__init__(size=size)
        self.until = until
        self._most, self._silence_s = size, silence_s
        self._at = time.monotonic()

    def relative_update(self, inc: int = 1) -> None:
        self.value += inc
        self._at = time.monotonic()
        self.check()

    def check(self) -> None:
        """Raise ShmserveError if the transfer exceeds a limit."""
        now = time.monotonic()
        if self.value > self._most:
            raise Unavailable(f"it is longer than the {self._most} bytes that were told")
        if now > self.until:
            raise DeadlineExceeded(_LATE)
        if now - self._at > self._silence_s:
            raise DeadlineExceeded(f"nothing came for {self._silence_s:g} s")


async def _list_blobs(fs: Any, root: str) -> dict[str, dict[str, Any]]:
    """Return Azure's blobs below `root` by key. adlfs would ask more, and drop a blob with the name
    of a folder."""
    container, _, folder = root.partition("/")
    found: dict[str, dict[str, Any]] = {}
    async with fs.service_client.get_container_client(container) as client:
        prefix = f"{folder}/" if folder else None
        async for blob in client.list_blobs(name_starts_with=prefix, include=["metadata"]):
            is_folder = (blob.metadata or {}).get("hdi_isfolder") == "true"
            found[f"{container}/{blob.name}"] = {
                "type": "directory" if is_folder else "file",
                "size": blob.size,
                "etag": blob.etag,
                "content_settings": {"content_md5": blob.content_settings.content_md5},
            }
            if len(found) > remote_files.MOST_LISTED:
                break  # `remote_files.models` refuses so many
    return found


async def _receive_blocks(fs: Any, key: str, path: str, progress: _Progress) -> None:
    """Receive a file of `progress.size` bytes in blocks, several at a time. Azure's library reports
    bytes only when a block is complete, and the first block has 32 MiB."""

    async def block(start: int) -> bytes:
        end = min(start + _BLOCK, progress.size)
        data: bytes = await fs._cat_file(key, start=start, end=end)
        progress.relative_update(len(data))
        return data

    window = _BLOCKS * _BLOCK
    with open(path, "wb") as file:
        for begin in range(0, progress.size, window):
            starts = range(begin, min(begin + window, progress.size), _BLOCK)
            blocks = [asyncio.ensure_future(block(start)) for start in starts]
            try:
                file.writelines(await asyncio.gather(*blocks))
            finally:
                for each in blocks:
                    each.cancel()


async def _guarded(receive: Awaitable[None], progress: _Progress) -> None:
    """Run a transfer and check its limits until the end."""
    transfer = asyncio.ensure_future(receive)
    try:
        while not transfer.done():
            await asyncio.wait({transfer}, timeout=_LOOK_S)
            if not transfer.done():
                progress.check()
    except ShmserveError:
        transfer.cancel()
        await asyncio.wait({transfer}, timeout=_LOOK_S)
        raise
    await transfer
