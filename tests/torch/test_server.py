"""TorchScript model in a server: copied bytes; writes to read-only memory kill no process."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest

from shmserve.executor.backends.thread_trial import candidates
from tests.servers import Server

pytestmark = pytest.mark.torch

CONFIG = """
platform: "pytorch_libtorch"
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }
"""


def write(root: Path, name: str, kind: str) -> None:
    import torch

    from tests.torch import modules

    (root / name / "1").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(getattr(modules, kind)()).save(root / name / "1" / "model.pt")
    (root / name / "config.pbtxt").write_text(CONFIG)


def test_inputs_are_copied_only_for_models_that_write_into_them(tmp_path: Path) -> None:
    write(tmp_path, "double", "Double")
    write(tmp_path, "in_place", "InPlace")
    write(tmp_path, "same", "Same")
    x = np.arange(1 << 18, dtype=np.float32)
    copied = {}
    with Server(tmp_path, http_workers=1) as server:
        for name, factor in (("double", 2), ("in_place", 2), ("same", 1)):
            for _ in range(3):  # the optimiser changes the graph after the first runs
                body, receipt = server.infer_binary(name, x, name="INPUT__0")
                np.testing.assert_array_equal(np.frombuffer(body, np.float32), factor * x)
            copied[name] = (receipt["copied_bytes"]["in"], receipt["copied_bytes"]["out"])
    # data received together with the head counts as copied, too, and is much less than a tensor
    assert {name: (into // x.nbytes, out) for name, (into, out) in copied.items()} == {
        "double": (0, x.nbytes),
        "in_place": (1, x.nbytes),
        "same": (0, 0),
    }


@pytest.mark.parametrize("fixed", ["", "3"])
def test_the_number_of_threads_is_shown(tmp_path: Path, fixed: str) -> None:
    write(tmp_path, "double", "Double")
    found, _, parameter = CONFIG.partition("parameters")
    text = found + "parameters" + parameter.replace('"1"', f'"{fixed}"') if fixed else found
    (tmp_path / "double" / "config.pbtxt").write_text(text)
    counts = (3,) if fixed else candidates(len(os.sched_getaffinity(0)))
    with Server(tmp_path, http_workers=1) as server:
        for _ in range(30):
            server.infer_binary("double", np.ones(8, np.float32), name="INPUT__0")
        [row] = server.show("models")
    assert row["threads"] in counts
