"""Checksums of stores, as fsspec's file systems describe files."""

import base64
import hashlib
from typing import Any

import pytest

from shmserve.fetcher import remote_files

CONTENT = b"weights"
MD5 = hashlib.md5(CONTENT).hexdigest()
SHA256 = hashlib.sha256(CONTENT).hexdigest()
GIT = hashlib.sha1(b"blob 7\0" + CONTENT).hexdigest()


@pytest.mark.parametrize(
    ("scheme", "info", "mark"),
    [
        ("s3", {"ETag": f'"{MD5}"'}, f"md5:{MD5}"),
        ("s3", {"ETag": f'"{MD5}-3"'}, f"etag:{MD5}-3"),
        ("s3", {}, ""),
        ("gs", {"md5Hash": base64.b64encode(bytes.fromhex(MD5)).decode()}, f"md5:{MD5}"),
        ("gs", {"etag": "CKih16GjycICEAE="}, "etag:CKih16GjycICEAE="),
        ("gs", {"md5Hash": "?", "etag": "e"}, "etag:e"),
        ("az", {"content_settings": {"content_md5": bytearray.fromhex(MD5)}}, f"md5:{MD5}"),
        ("az", {"content_settings": {"content_md5": None}, "etag": "0x8D"}, "etag:0x8D"),
        ("hf", {"lfs": {"sha256": SHA256, "size": 7}, "blob_id": GIT}, f"sha256:{SHA256}"),
        ("hf", {"lfs": None, "blob_id": GIT}, f"git:{GIT}"),
        ("hf", {"blob_id": 5}, ""),
        ("https", {"ETag": "x"}, ""),
    ],
)
def test_marks(scheme: str, info: dict[str, Any], mark: str) -> None:
    assert remote_files.mark_of(scheme, info) == mark


@pytest.mark.parametrize("mark", [f"md5:{MD5}", f"sha256:{SHA256.upper()}", f"git:{GIT}"])
def test_a_file_is_held_against_its_mark(mark: str, tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    assert remote_files.proves(mark)
    assert remote_files.matches(mark, str(path))
    path.write_bytes(b"Weights")
    assert not remote_files.matches(mark, str(path))


def test_an_entity_tag_proves_nothing() -> None:
    assert not remote_files.proves("etag:x")
    assert not remote_files.proves("")
