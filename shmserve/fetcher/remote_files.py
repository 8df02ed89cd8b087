"""What a remote repository says it has: files with sizes and checksums, as models.

What comes from there is a stranger's word. A name becomes a path on this host only after it has
been checked here, and numbers have bounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from msgspec import Struct

from shmserve import ids
from shmserve.errors import ConfigError
from shmserve.repository import remote_index
from shmserve.repository.text_files import IGNORED, printable

MOST_MODELS = 1024
MOST_FILES = 10_000  # of one model
MOST_LISTED = 200_000  # of a repository
MOST_INDEX_BYTES = 64 << 20
_DEPTH, _NAME_BYTES, _PATH_BYTES = 16, 255, 1024
_FORBIDDEN = {"", ".", ".."}


class RemoteFile(Struct, frozen=True):
    """A file of a model. `path`: below the model's folder, and checked; it ends with "/" if it is
    an empty folder. `mark`: the store's word for its content, as `checksums` reads it; "": it says
    nothing but the size. `key`: what the store calls it."""

    path: str
    size: int
    mark: str
    key: str = ""

    @property
    def is_folder(self) -> bool:
        return self.path.endswith("/")


class RemoteModel(Struct, frozen=True):
    """A model's files by path, or what is wrong with them."""

    name: str
    files: tuple[RemoteFile, ...] = ()
    problem: str = ""

    def digest(self, url: str) -> str:
        """What these very files of this model are called in the cache."""
        lines = "".join(
            f"{file.path}\0{file.size}\0{file.mark}\0"
            for file in sorted(self.files, key=lambda file: file.path)
        )
        return hashlib.sha256(f"{url}\0{self.name}\0{lines}".encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def from_index(data: bytes) -> list[tuple[str, RemoteFile]]:
    """Files as an index has them, each with its path below the repository.

    Raises:
        ConfigError: it is none, or of another version.
    """
    return [
        (f"{name}/{path}", RemoteFile(path, file.size, f"sha256:{file.sha256}", f"{name}/{path}"))
        for name, files in remote_index.read(data).models.items()
        for path, file in files.items()
    ]


def models(listed: Iterable[tuple[str, RemoteFile]]) -> dict[str, RemoteModel]:
    """The models of a listing: what lies in folders that are not hidden, by the folder's name.

    Raises:
        ConfigError: there are more than can be meant.
    """
    found: dict[str, list[RemoteFile]] = {}
    for number, (path, file) in enumerate(listed):
        if number >= MOST_LISTED:
            raise ConfigError(f"it has more than {MOST_LISTED} files")
        name, slash, rest = path.partition("/")
        if not slash or not name or name.startswith(".") or name in IGNORED:
            continue
        of_model = found.setdefault(name, [])
        if rest and not _ignored(rest):
            of_model.append(RemoteFile(rest, file.size, file.mark, file.key))
    if len(found) > MOST_MODELS:
        raise ConfigError(f"it has more than {MOST_MODELS} models")
    return {printable(name): _checked(name, files) for name, files in found.items()}


def _ignored(path: str) -> bool:
    return any(part in IGNORED for part in path.split("/"))


def _checked(name: str, files: list[RemoteFile]) -> RemoteModel:
    problem = ids.model_name_fault(name)
    if problem:
        return RemoteModel(printable(name), (), f"it is not a valid model name, {problem}")
    files = _without_markers(files)
    return (
        RemoteModel(name, tuple(files))
        if not (problem := files_fault(files))
        else RemoteModel(name, (), problem)
    )


def _without_markers(files: list[RemoteFile]) -> list[RemoteFile]:
    """Folders are made with what is in them, so only those without anything count."""
    parents: set[str] = set()
    for file in files:
        parts = file.path.rstrip("/").split("/")
        parents.update("/".join(parts[:end]) + "/" for end in range(1, len(parts)))
    unique = {file.path: file for file in files if file.is_folder and file.path not in parents}
    return [file for file in files if not file.is_folder] + list(unique.values())


def files_fault(files: Iterable[RemoteFile]) -> str:
    """Why these cannot be the files of one model; "": they can."""
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
    """Why a path may not be one below a model's folder; "": it may."""
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
    """Those of these names that are there; "*" is all."""
    wanted = set(names)
    return [m for name, m in sorted(found.items()) if "*" in wanted or name in wanted]
