"""`GrpsTest`: the base class of a project's own unit tests, run from its folder.

python -m shmserve.grps test.py
"""

from __future__ import annotations

import os
import unittest
from typing import Any

from shmserve.grps.executor.project_models import ProjectModels
from shmserve.grps.repository import project_files


class _Runner:
    """The executor that a project's tests run their requests on."""

    def __init__(self) -> None:
        self._models = ProjectModels(project_files.read(os.getcwd(), "1", "test"))

    def infer(self, inp: Any, context: Any, model_name: str | None = None) -> Any:
        """Run the named model, or the dag."""
        return self._models.run(inp, context, model_name or "")


class GrpsTest(unittest.TestCase):
    """Base class of a project's tests. `test_init` loads the models of the project in the current
    folder."""

    executor: _Runner | None = None

    def test_init(self) -> None:
        """Create the executor."""
        self.executor = _Runner()
