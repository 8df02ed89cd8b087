"""How an executor reads client memory: the stricter of the server's setting and the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from shmserve import repository
from shmserve.executor.custom_metrics import registry
from shmserve.executor.process.__main__ import Executor
from tests.unit.rig import Rig

MODEL = Path(__file__).resolve().parents[3] / "workers" / "identity"


@pytest.mark.parametrize(
    ("of_server", "of_model", "copies"),
    [
        ("map", "", False),
        ("map", "map", False),
        ("map", "copy", True),
        ("copy", "", True),
        ("copy", "map", True),
        ("copy", "copy", True),
        ("copy", "off", True),
    ],
)
def test_the_parameter_of_a_model_narrows_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_server: str, of_model: str, copies: bool
) -> None:
    monkeypatch.setattr(registry, "publish", lambda *_: None)  # its page ends with the test
    rig = Rig(tmp_path, client_shm_mode=of_server)
    (instance,) = repository.read_folder(str(MODEL)).instances()
    parameters = {"client_shm_mode": of_model} if of_model else {}
    instance = replace(instance, spec=replace(instance.spec, parameters=parameters))
    executor = Executor(instance, "executor-cafe0123", rig.settings)
    try:
        assert executor.regions._copy is copies
    finally:
        executor.memory.close()
        executor.status.close()
        rig.close()
