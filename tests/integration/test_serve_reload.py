"""`shmserve serve PATH --reload`: a model written from nothing, edited, broken and mended."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.running_server import wait_until
from tests.servers import SMALL, Server, Starting

CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
FACTOR = 'parameters { key: "factor" value { string_value: "10" } }\n'
MODEL = """
class Model:
    def __init__(self, context):
        self.added = 1

    def infer(self, request):
        request.output("Y", (1,))[:] = request.input("X") + self.added
"""
REQUEST = {"inputs": [{"name": "X", "shape": [1], "datatype": "INT32", "data": [0]}]}
LOOKS_S = 1.5  # time for some looks at the files
OLD_SERVES = "the old model serves on model=m"


class Editor:
    """Writes files of a model, and waits for the outcome in the server's answers or log."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.answer: int | None = None

    def save(self, name: str, text: str, answer: int) -> None:
        """Write a file; the model must then give the answer."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.answer = answer
        self._await(f"{name} gives {answer}", lambda: self.asked() == answer)

    def break_by(self, name: str, text: str, *shown: str) -> None:
        """Write a file; the log must then show these texts once, and the old model serve."""
        before = len(self.server.log())
        (self.folder / name).write_text(text)
        self._await(f"{name}: {shown[-1]}", lambda: OLD_SERVES in self.server.log()[before:])
        time.sleep(LOOKS_S)
        log = self.server.log()[before:]
        assert {part: log.count(part) for part in shown} == dict.fromkeys(shown, 1)
        assert log.count(OLD_SERVES) == 1
        assert self.asked() == self.answer, "the old model serves on"

    def asked(self) -> int | None:
        status, document = self.server.infer("m", REQUEST)
        return int(document["outputs"][0]["data"][0]) if status == 200 else None

    def _await(self, what: str, condition: Callable[[], bool]) -> None:
        begun = time.monotonic()
        wait_until(condition, what)
        print(f"{time.monotonic() - begun:.2f} s: {what}", file=sys.stderr)


def served(folder: Path, *options: str, kind: type[Server] = Server) -> Server:
    server = kind(kept=True, **SMALL)
    server.options = (str(folder), "--http", f":{server.http_port}", *options)
    return server


def test_a_model_is_written_while_the_server_runs(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    with served(repository, "--reload") as server:
        server.wait_log("PATH replaces model_repository = ")
        server.wait_log("watching 0 models")
        editor = Editor(server, repository / "m")
        (repository / "m/1").mkdir(parents=True)
        (repository / "m/config.pbtxt").write_text(CONFIG)
        editor.save("1/model.py", MODEL, 1)
        editor.save("1/model.py", MODEL.replace("= 1", "= 2"), 2)
        editor.break_by(
            "1/model.py", MODEL + "def (\n", "m/1/model.py", "    def (", "\nSyntaxError: "
        )
        by_context = MODEL.replace("= 1", "= 3 * int(context.spec.parameters.get('factor', 1))")
        editor.save("1/model.py", by_context, 3)
        fails = by_context.replace("context.spec", "self.nothing")
        editor.break_by(
            "1/model.py", fails, 'm/1/model.py", line 4, in __init__', "\nAttributeError: "
        )
        write_in_steps(editor, MODEL)
        editor.save("1/model.py", by_context, 3)
        editor.save("config.pbtxt", CONFIG + FACTOR, 30)
        editor.break_by(
            "config.pbtxt", CONFIG + "inptu []\n", "config.pbtxt: 5:1 : ", 'named "inptu"'
        )
        editor.save("config.pbtxt", CONFIG, 3)
        editor.save("1/helper.py", "ADDED = 4\n", 3)
        editor.save("1/model.py", "import helper\n" + MODEL.replace("= 1", "= helper.ADDED"), 4)
        editor.save("1/helper.py", "ADDED = 5\n", 5)
        (repository / "m/1/weights").write_text("6")
        reads = f"open({str(repository / 'm/1/weights')!r}).read()"
        editor.save("1/model.py", MODEL.replace("= 1", f"= int({reads})"), 6)
        editor.save("1/weights", "7", 7)
        server.wait_log("model loaded model=m seconds=")


def write_in_steps(editor: Editor, end: str) -> None:
    """Write a file in steps, with pauses."""
    with (editor.folder / "1/model.py").open("w") as file:
        for piece in ("class Model", ":\n", "    def"):
            file.write(piece)
            file.flush()
            time.sleep(0.05)
        file.seek(0)
        file.truncate()
        file.write(end)
    editor._await("written in steps", lambda: editor.asked() == 1)


def test_a_folder_of_one_model_without_versions(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "model.py").write_text("=" + MODEL)
    with served(folder, "--reload", kind=Starting) as server:
        server.wait_log("SyntaxError")
        server.wait_log(f'File "{folder}/model.py", line 1\n')
        editor = Editor(server, folder)
        by_context = MODEL.replace("= 1", "= int(context.spec.parameters.get('factor', 1))")
        editor.save("model.py", by_context, 1)
        editor.save("config.pbtxt", CONFIG + FACTOR, 10)
        server.wait_linked()
