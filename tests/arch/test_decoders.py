"""Bytes of other parties are decoded by one function, which raises one error."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "shmserve"
HERE = "protocol/decoding.py"
# Exceptions: bytes from our own parent or child, or a fast path before a slower decoder.
OTHERS = {
    *(
        "executor/process/__main__.py",
        "cli/inspecting/try_load.py",
        "cli/inspecting/trials.py",
        "cuda/device_trials.py",
    ),
    *("tensor/config_document.py", "grps/protocol/ndarray_json.py"),
    *("client/api.py", "coordinator/stats/counter_totals.py", "grps/protocol/json_reader.py"),
}


def test_decoders_are_made_in_one_place() -> None:
    made = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"msgspec\.(json|msgpack)\.(Decoder|decode)\b", path.read_text())
    }
    assert made <= {HERE} | OTHERS
