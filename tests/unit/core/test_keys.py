"""Key files: accepted and refused content, and the key in a request."""

from datetime import UTC, datetime, timedelta

import pytest

from shmserve.core import keys
from shmserve.core.access import ACTIONS
from shmserve.errors import ConfigError

HASH = keys.digest("k").hex()
NOW = 1_000_000.0


def test_what_is_written_is_read() -> None:
    expires = datetime.fromtimestamp(NOW, UTC) + timedelta(seconds=5)
    text = keys.entry_text("ci-1", "secret", ("use", "send models"), expires)
    text += keys.entry_text("all", "other", ACTIONS, None)
    found = keys.parse(text.encode())
    assert "secret" not in text
    for now, name in ((NOW + 4, "ci-1"), (NOW + 5, None)):
        key = keys.holder(found, "secret", now)
        assert (key.name if key else None) == name
    whole = keys.holder(found, "other", 1e12)
    assert whole.scopes == ACTIONS
    for wrong in ("", "Secret", "secret ", keys.digest("secret").hex(), "\udcff"):
        assert keys.holder(found, wrong, NOW) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[a]\nsha256 = ", r"^keys_file: not TOML: Invalid value \("),
        ("\xff", "not UTF-8"),
        ("a = 1", "key 'a'"),
        (f'["a b"]\nsha256 = "{HASH}"\nscopes = ["use"]', "'a b' is no name"),
        (f'[a]\nsha256 = "{HASH[1:]}"\nscopes = ["use"]', "key 'a'"),
        (f'[a]\nsha256 = "{HASH}"\nscopes = []', "key 'a'"),
        (f'[a]\nsha256 = "{HASH}"\nscopes = ["root"]', "key 'a'"),
        (f'[a]\nsha256 = "{HASH}"', "scopes"),
        (f'[a]\nsha256 = "{HASH}"\nscopes = ["use"]\nexpire = 1', "expire"),
        (f'[a]\nsha256 = "{HASH}"\nscopes = ["use"]\nexpires = 2030-01-01T00:00:00', "key 'a'"),
        (f'[a]\nsha256 = "{HASH}"\nscopes = ["use"]\n[b]\nsha256 = "{HASH}"\nscopes = ["use"]',
         "'a' and 'b' are the same"),
        ("[a]\n[b]\n[c]\n", "more than 2 keys"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used(text: str, told: str, monkeypatch) -> None:
    monkeypatch.setattr(keys, "MAX_KEYS", 2)
    with pytest.raises(ConfigError, match=told) as caught:
        keys.parse(text.encode("latin-1"))
    assert HASH[1:] not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"authorization": "Bearer abc"}, ("authorization", "abc")),
        ({"authorization": "bearer  abc "}, ("authorization", "abc")),
        ({"authorization": "Basic abc"}, None),
        ({"shmserve-key": "abc"}, ("shmserve-key", "abc")),
        ({"shmserve-key": "abc", "authorization": "Bearer x"}, ("shmserve-key", "abc")),
    ],
)
def test_how_a_key_comes(fields: dict[str, str], expected: tuple[str, str] | None) -> None:
    assert keys.presented(fields.get) == expected


def test_scopes_as_people_write_them() -> None:
    assert keys.parse_scopes(["send-models", " use"]) == ("use", "send models")
    with pytest.raises(ConfigError, match="no scope 'all'"):
        keys.parse_scopes(["all"])
