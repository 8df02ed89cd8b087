"""The fake of CUDA has only names that CuPy and nvidia-ml-py have, too."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import fake

pytestmark = pytest.mark.gpu


@cache
def offered() -> dict[str, list[str]]:
    """Return the names, with the parameters of functions."""
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "surface.py"],
        env={"PYTHONPATH": os.pathsep.join(filter(None, [str(fake.FOLDER), *sys.path]))},
        capture_output=True,
        check=True,
        timeout=60,
    )
    names: dict[str, list[str]] = json.loads(done.stdout)
    return names


def parameters(value: Any) -> set[str] | None:
    """Return a function's parameters, for C functions from the docstring, or None if unknown."""
    try:
        return set(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        told = re.match(r"\w+(?:\.\w+)?\((.*?)\)(?: ->.*)?$", str(value.__doc__).split("\n")[0])
    if told is None:
        return None
    names = (part.partition("=")[0].strip() for part in told[1].split(","))
    return {name.split()[-1] for name in names if name}


@pytest.mark.parametrize("library", ["cupy", "pynvml"])
def test_what_the_fake_offers_is_there(library: str) -> None:
    names = {n: p for n, p in offered().items() if n.partition(".")[0] == library}
    assert len(names) > 20
    module = importlib.import_module(library)
    missing: list[str] = []
    for name, keywords in names.items():
        value: Any = module
        for part in name.split(".")[1:]:
            value = getattr(value, part, missing)
        known = parameters(value) if keywords and value is not missing else None
        if value is missing:
            missing.append(name)
        elif known is not None and not known.issuperset(keywords):
            missing.append(f"{name}({', '.join(keywords)})")
    assert missing == []
