"""A server's file with one key."""

import datetime
from pathlib import Path
from typing import Any

from shmserve.core.keys import entry_text

KEY = "shmk_" + "a" * 43


def one_key(folder: Path) -> dict[str, Any]:
    """Return settings by which everybody needs this key."""
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    (folder / "keys.toml").write_text(entry_text("me", KEY, ("use",), end))
    return {"keys_file": str(folder / "keys.toml"), "keys_required_from": "anyone"}
