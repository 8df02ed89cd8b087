"""Contents of a remote repository, as listed: files with sizes and checksums, grouped by model.

The listing is untrusted. This module checks a name before it becomes a path on this host, and
limits all numbers.

A *mark* is ``<kind>:<value>``: what a store says about a file's content. The kinds ``sha256``,
``md5`` and ``git`` (SHA-1 of a Git blob) have hexadecimal values. The kind ``etag`` has any text
that changes with the content.
"""

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from shmserve import ids
from shmserve.errors import ConfigError
from shmserve.repository import remote_index
from shmserve.repository.text_files import IGNORED, printable

MOST_MODELS = 1024
MOST_FILES = 10_000  # of a model
MOST_LISTED = 200_000  # of a repository
MOST_INDEX_BYTES = 64 << 20
_DEPTH, _NAME_BYTES, _PATH_BYTES = 16, 255, 1024
_FORBIDDEN = {"", ".", ".."}
_CHUNK = 1 << 20
_MD5 = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")


class RemoteFile(Struct, frozen=True):
    """File of a remote model. `path`: checked path below the model's folder; ends with "/" for an
    empty folder. `mark`: the store's mark of the content; "": only the size is known. `key`: name
    of the file in the store."""

    path: str
    size: int
    mark: str
    key: str = ""

    @property
    def is_folder(self) -> bool:
        return self.path.endswith("/")


class RemoteModel(Struct, frozen=True):
    """Files of a model, or the problem with the files."""

    name: str
    files: tuple[RemoteFile, ...] = ()
    problem: str = ""

    def digest(self, url: str) -> str:
        """Return the name of a snapshot with exactly these files in the cache."""
        lines = "".join(
            f"{file.path}\0{file.size}\0{file.mark}\0"
            for file in sorted(self.files, key=lambda file: file.path)
        )
        return hashlib.sha256(f"{url}\0{self.name}\0{lines}".encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def from_index(data: bytes) -> list[tuple[str, RemoteFile]]:
    """Return the files of an index, each with its path below the repository. Raise ConfigError if
    `data` is no index, or has another version."""
    listed: list[tuple[str, RemoteFile]] = []
    for name, files in remote_index.read(data).models.items():
        listed.append((f"{name}/", RemoteFile("", 0, "")))  # a model without files counts, too
        for path, file in files.items():
            full = f"{name}/{path}"
            listed.append((full, RemoteFile(path, file.size, f"sha256:{file.sha256}", full)))
    return listed


def models(listed: Iterable[tuple[str, RemoteFile]]) -> dict[str, RemoteModel]:
    """Return the models of a listing by name. Each folder is a model, except for hidden and ignored
    folders. Raise ConfigError if the listing exceeds the limits."""
    files_by_model: dict[str, list[RemoteFile]] = {}
    for number, (path, file) in enumerate(listed):
        if number >= MOST_LISTED:
            raise ConfigError(f"it has more than {MOST_LISTED} files")
        name, slash, rest = path.partition("/")
        if not slash or not name or name.startswith(".") or name in IGNORED:
            continue
        of_model = files_by_model.setdefault(name, [])
        if rest and not any(part in IGNORED for part in rest.split("/")):
            of_model.append(RemoteFile(rest, file.size, file.mark, file.key))
    if len(files_by_model) > MOST_MODELS:
        raise ConfigError(f"it has more than {MOST_MODELS} models")
    return {printable(name): _checked(name, files) for name, files in files_by_model.items()}


def _checked(name: str, files: list[RemoteFile]) -> RemoteModel:
    problem = ids.model_name_fault(name)
    if problem:
        return RemoteModel(printable(name), (), f"it is not a valid model name, {problem}")
    files = _without_markers(files)
    problem = files_fault(files) if files else "it has no files"
    return RemoteModel(name, () if problem else tuple(files), problem)


def _without_markers(files: list[RemoteFile]) -> list[RemoteFile]:
    """Drop folders that hold files: fetching a file also makes the folders above the file."""
    parents: set[str] = set()
    for file in files:
        parts = file.path.rstrip("/").split("/")
        parents.update("/".join(parts[:end]) + "/" for end in range(1, len(parts)))
    unique = {file.path: file for file in files if file.is_folder and file.path not in parents}
    return [file for file in files if not file.is_folder] + list(unique.values())


def files_fault(files: Iterable[RemoteFile]) -> str:
    """Return the reason why these files cannot form a model, or ""."""
    seen: set[str] = set()
    folders: set[str] = set()
    for count, file in enumerate(files, 1):
        if count > MOST_FILES:
            return f"it has more than {MOST_FILES} files"
        fault = path_fault(file.path.removesuffix("/"))
        if not fault and file.size < 0:
            fault = "has no size"
        path = file.path.removesuffix("/")
        if not fault and path in seen:
            fault = "is there twice"
        if fault:
            return f"file '{printable(file.path)[:80]}' {fault}"
        seen.add(path)
        parts = path.split("/")
        folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
    both = min(seen & folders, default="")
    return f"'{printable(both)[:80]}' is both a file and a folder" if both else ""


def path_fault(path: str) -> str:
    """Return the reason why a path must not be used below a model's folder, or ""."""
    parts = path.split("/")
    if len(path.encode(errors="replace")) > _PATH_BYTES or len(parts) > _DEPTH:
        return "has too long a path"
    if any(part in _FORBIDDEN for part in parts):
        return "has a path that leads elsewhere"
    if "\\" in path or not path.isprintable():
        return "has a character in its path that none may have"
    if any(len(part.encode(errors="replace")) > _NAME_BYTES for part in parts):
        return "has too long a name"
    return ""


def by_name(found: Mapping[str, RemoteModel], names: Iterable[str]) -> list[RemoteModel]:
    """Return the models with these names, as far as found; the name "*" stands for all."""
    requested = set(names)
    return [m for name, m in sorted(found.items()) if "*" in requested or name in requested]


def mark_of(scheme: str, info: Mapping[str, Any]) -> str:
    """Return the mark of a file from the description in fsspec's file system for `scheme`; "" if
    the store gives none."""
    if scheme == "s3":
        return _etag(info.get("ETag"))
    if scheme == "gs":
        return _base64("md5", info.get("md5Hash")) or _etag(info.get("etag"))
    if scheme == "az":
        settings = info.get("content_settings") or {}
        md5 = settings.get("content_md5")
        return f"md5:{bytes(md5).hex()}" if md5 else _etag(info.get("etag"))
    if scheme == "hf":
        lfs = info.get("lfs")
        sha256 = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
        if isinstance(sha256, str) and _SHA256.fullmatch(sha256):
            return f"sha256:{sha256}"
        blob = info.get("blob_id")
        return f"git:{blob}" if isinstance(blob, str) and _SHA1.fullmatch(blob) else ""
    return ""


def proves(mark: str) -> bool:
    """Return True if the mark depends on the content alone, so a check is possible."""
    return mark.partition(":")[0] in ("sha256", "md5", "git")


def matches(mark: str, path: str) -> bool:
    """Return True if a file's content has the mark, for marks that `proves` accepts."""
    kind, _, value = mark.partition(":")
    digest = {"sha256": hashlib.sha256, "md5": _md5, "git": hashlib.sha1}[kind]()
    if kind == "git":
        digest.update(f"blob {os.path.getsize(path)}\0".encode())
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return bool(digest.hexdigest() == value.lower())


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _etag(value: Any) -> str:
    """Return the mark for S3's entity tag. The tag is the content's MD5, with two exceptions.
    Objects uploaded in parts have a tag with a "-". Objects encrypted with a key of their own
    have another tag, and only the object's head shows the encryption."""
    text = str(value or "").strip('"')
    if not text:
        return ""
    return f"md5:{text}" if _MD5.fullmatch(text) else f"etag:{text}"


def _base64(kind: str, value: Any) -> str:
    try:
        return f"{kind}:{base64.b64decode(value, validate=True).hex()}" if value else ""
    except (binascii.Error, TypeError, ValueError):
        return ""
