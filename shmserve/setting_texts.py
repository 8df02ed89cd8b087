"""Settings as people write them: a TOML file, and texts that may be lists or tables."""

from __future__ import annotations

import tomllib
from typing import Any

from msgspec import Struct

from shmserve.errors import ConfigError


class SettingTexts(Struct, frozen=True):
    """How texts are read.

    Attributes:
        source: what names the file.
        lists: settings whose items have commas between them; `semicolons`: that have those.
        tables: settings that are tables themselves: name -> list.
        former: names that settings had once, which are still taken.
    """

    source: str
    lists: frozenset[str]
    semicolons: frozenset[str]
    tables: frozenset[str]
    former: dict[str, str]

    def current(self, key: str) -> str:
        """The name of a setting today."""
        return self.former.get(key, key)

    def items(self, key: str, text: str) -> str | list[str] | dict[str, list[str]]:
        """A text as the setting wants it: lists are split.

        Raises:
            ConfigError: it is no table, where there must be one.
        """
        if key in self.tables:
            return _table(key, text)
        if key not in self.lists | self.semicolons:
            return text
        parts = text.split(";" if key in self.semicolons else ",")
        return [part.strip() for part in parts if part.strip()]

    def from_file(self, path: str) -> dict[str, Any]:
        """All of a file; a table in it is a prefix.

        Raises:
            ConfigError: it cannot be read.
        """
        if not path:
            return {}
        try:
            with open(path, "rb") as file:
                document = tomllib.load(file)
        except OSError as ex:
            named = f"cannot read the file named by {self.source}"
            raise ConfigError(f"{named}: {ex.strerror}") from ex
        except tomllib.TOMLDecodeError as ex:
            raise ConfigError(f"the file named by {self.source} is not TOML: {ex}") from ex
        values: dict[str, Any] = {}
        for key, value in document.items():
            if isinstance(value, dict) and self.current(key) not in self.tables:
                values.update({self.current(f"{key}_{inner}"): v for inner, v in value.items()})
            else:
                values[self.current(key)] = value
        for key, value in values.items():
            if isinstance(value, str):
                values[key] = self.items(key, value)
        return values


def _table(key: str, text: str) -> dict[str, list[str]]:
    entries = [part.partition("=") for part in text.split(";") if part.strip()]
    if any(not separator or not name.strip() for name, separator, _ in entries):
        raise ConfigError(f"bad setting: {key} is not 'name=item,item;other=item'")
    return {
        name.strip(): [item.strip() for item in items.split(",") if item.strip()]
        for name, _, items in entries
    }
