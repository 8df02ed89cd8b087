"""Checksums: what a store says about a file's content, and the check of received files.

A *mark* is ``<kind>:<value>``. The kinds ``sha256``, ``md5`` and ``git`` (SHA-1 of a Git blob)
have hexadecimal values. The kind ``etag`` has any text that changes with the content.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

_CHUNK = 1 << 20
_MD5 = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")


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
