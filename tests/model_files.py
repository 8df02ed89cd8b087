"""Small Python models, written to folders for tests."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent

Make = Callable[..., str]

X_TO_Y = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] },
         { name: "S" data_type: TYPE_STRING dims: [ 2 ] } ]
"""


def model_maker(repository: Path) -> Make:
    """Return a function that writes a model's folder with version 1 and returns its path."""

    def write(code: str, config: str = X_TO_Y, name: str = "m") -> str:
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        (version / "model.py").write_text(dedent(code))
        return str(version.parent)

    return write


def native(body: str) -> str:
    """Return a model.py whose `Model.infer(self, request)` has the body `body`."""
    return f"import numpy as np\nclass Model:\n    def infer(self, request):\n{_deep(body)}\n"


def triton(body: str, more: str = "") -> str:
    """Return a model.py whose `TritonPythonModel.execute(self, requests)` has the body `body`, and
    whose class has the indented text `more`."""
    return (
        "import numpy as np, triton_python_backend_utils as pb\n"
        f"class TritonPythonModel:\n    def execute(self, requests):\n{_deep(body)}\n{more}"
    )


def _deep(body: str) -> str:
    return indent(dedent(body).strip(), " " * 8)
