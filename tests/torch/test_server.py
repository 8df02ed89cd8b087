"""TorchScript model in a server: copied bytes; writes to read-only memory kill no process."""

import warnings
from pathlib import Path

import numpy as np
import pytest

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
