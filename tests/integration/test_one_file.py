"""`shmserve serve FILE.py`: models of one file, whose type hints are their configuration."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve import client
from tests.servers import SMALL, Server, completed, only
from tests.unit.frontends.key_files import KEY, one_key

ROWS = """
import time
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from helper import FACTOR
from shmserve.model import Shape, batched

Rows = Annotated[NDArray[np.float32], Shape("batch", 3)]
TEXT = (Path(__file__).parent / "beside.txt").read_text()


class Scaled:
    @batched(max_size=64, delay_ms=200)
    def predict(self, rows: Rows) -> tuple[Rows, Annotated[NDArray[np.int32], Shape("batch", 1)]]:
        return rows * FACTOR, np.full((len(rows), 1), len(rows), np.int32)
"""


def one_file(folder: Path, text: str, name: str = "scaled.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "helper.py").write_text("FACTOR = 2\n")
    (folder / "beside.txt").touch()
    (folder / name).write_text(text)
    return folder / name


def served(path: Path, *options: str, **settings: Any) -> Server:
    server = Server(kept=True, **{**SMALL, **settings})
    server.options = (str(path), "--http", f":{server.http_port}", *options)
    return server


def rows_request(rows: list[list[float]]) -> dict[str, Any]:
    shape = [len(rows), 3]
    data = [value for row in rows for value in row]
    return {"inputs": [{"name": "rows", "datatype": "FP32", "shape": shape, "data": data}]}


def test_a_file_on_arrays(tmp_path: Path) -> None:
    with served(one_file(tmp_path / "src", ROWS), "--reload") as server:
        server.wait_log("serving model scaled from")
        assert server.get("/v2/models/scaled")[1]["inputs"] == [
            {"name": "rows", "datatype": "FP32", "shape": [-1, 3]}
        ]
        status, document = server.infer("scaled", rows_request([[1, 2, 3]]))
        assert status == 200
        assert document["outputs"][0]["data"] == [2, 4, 6]
        status, document = server.infer("scaled", {**rows_request([[1, 2, 3]]), "inputs": []})
        assert status == 400
        assert "'rows'" in document["error"]

        with ThreadPoolExecutor(8) as pool:
            many = [rows_request([[n, n, n]]) for n in range(32)]
            answers = list(pool.map(lambda request: server.infer("scaled", request), many))
        for number, (status, document) in enumerate(answers):
            assert status == 200
            assert document["outputs"][0]["data"] == [2 * number] * 3
        assert max(document["outputs"][1]["data"][0] for _, document in answers) > 1, "joined"

        one_file(tmp_path / "src", ROWS.replace("* FACTOR", "* 5"))
        deadline = time.monotonic() + 60
        while server.infer("scaled", rows_request([[1, 2, 3]]))[1]["outputs"][0]["data"][0] != 5:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_file_with_the_name_of_a_module_in_the_working_directory(tmp_path: Path) -> None:
    code = "def double(number: int) -> int: return 2 * number"
    one_file(tmp_path, code, "queue.py")
    (tmp_path / "asyncio.py").write_text("raise ImportError")
    # as the script `shmserve` starts
    begin = ("env", "-C", str(tmp_path), "sh", "-c", 'exec "$0" -P "$@"')
    with served(Path("queue.py"), within=begin) as server:
        assert server.post("/models/queue", {"number": 3}) == (200, 6)
    words = (sys.executable, "-P", "-m", "shmserve", "check", "queue.py", "--load")
    done = completed(*words, cwd=tmp_path, environ=server.environ)
    assert "ok    model queue version 1" in done.stdout, done.stdout + done.stderr


STREAM = """
from collections.abc import Iterator
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from shmserve.model import ModelRequest, Shape

Number = Annotated[NDArray[np.int32], Shape(1)]


def countdown(start: Number, request: ModelRequest) -> Iterator[Number]:
    for number in range(int(start[0]), 0, -1):
        yield np.array([number], np.int32)
"""
CALLER = """
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from shmserve.model import ModelRequest, Shape

Rows = Annotated[NDArray[np.float32], Shape(-1, 3)]


def predict(rows: Rows, request: ModelRequest) -> Rows:
    return request.call("scaled", {"rows": rows})["output_0"] + 1
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 3 ] } ]
ensemble_scheduling { step [ {
  model_name: "scaled" model_version: -1
  input_map { key: "rows" value: "IN" } output_map { key: "output_0" value: "OUT" } } ] }
"""


def in_repository(repository: Path, name: str, text: str) -> None:
    one_file(repository / name / "1", text, "model.py")


def test_models_of_hints_in_a_repository(tmp_path: Path) -> None:
    in_repository(tmp_path, "scaled", ROWS)
    in_repository(tmp_path, "countdown", STREAM)
    in_repository(tmp_path, "caller", CALLER)
    (tmp_path / "chain/1").mkdir(parents=True)
    (tmp_path / "chain/config.pbtxt").write_text(ENSEMBLE)
    row = np.array([[1, 2, 3]], np.float32)
    with Server(repository=tmp_path, **SMALL) as server, client.connect(server.base_url) as c:
        assert c.infer("caller", {"rows": row})["output"].tolist() == [[3, 5, 7]]
        assert c.infer("chain", {"IN": row})["OUT"].tolist() == [[2, 4, 6]]
        start = np.array([3], np.int32)
        answers = [int(a["output"][0]) for a in c.stream("countdown", {"start": start})]
        assert answers == [3, 2, 1]
        with pytest.raises(client.InferenceError, match="rows"):
            c.infer("caller", {"rows": row.astype(np.int32)})


JSON = """
from collections.abc import Iterator
from typing import Any

import msgspec

from shmserve.model import ModelRequest


class Size(msgspec.Struct):
    width: int
    height: int = 1


class Picture:
    \"\"\"Describe a picture.\"\"\"

    def predict(self, image: bytes, size: Size, title: str = "none") -> dict[str, Any]:
        if title == "bad":
            raise ValueError("not this one")
        return {"bytes": len(image), "pixels": size.width * size.height, "title": title}
"""
WORDS = """
from collections.abc import Iterator


def words(text: str) -> Iterator[dict[str, str]]:
    for word in text.split():
        if word == "stop":
            raise ValueError("stopped")
        yield {"word": word}
"""


INVERTED = """
from typing import Annotated

from shmserve.model import ContentType


def inverted(image: bytes) -> Annotated[bytes, ContentType("image/x-portable-graymap")]:
    return bytes(255 - one for one in image)
"""


BATCH = """
from shmserve.model import batched


@batched(max_size=64, delay_ms=200)
def lengths(text: list[str]) -> list[tuple[int, int]]:
    return [(len(one), len(text)) for one in text]
"""


def test_plain_values_are_batched(tmp_path: Path) -> None:
    with served(one_file(tmp_path, BATCH, "lengths.py")) as server:
        with ThreadPoolExecutor(8) as pool:
            bodies: list[Any] = [{"text": "x" * n} for n in range(24)] + [{"text": 5}]
            answers = list(pool.map(lambda body: server.post("/models/lengths", body), bodies))
        assert [answer[0] for _, answer in answers[:-1]] == list(range(24))
        assert max(answer[1] for _, answer in answers[:-1]) > 1, "joined"
        assert answers[-1] == (400, {"error": "Expected `str`, got `int` - at `$.text`"})


def form(**parts: bytes) -> tuple[bytes, str]:
    pieces = [
        f'--limit\r\nContent-Disposition: form-data; name="{name}"; filename="f"\r\n\r\n'.encode()
        + content
        for name, content in parts.items()
    ]
    return b"\r\n".join([*pieces, b"--limit--\r\n"]), "multipart/form-data; boundary=limit"


def test_a_file_on_plain_values(tmp_path: Path) -> None:
    in_repository(tmp_path, "picture", JSON)
    in_repository(tmp_path, "words", WORDS)
    in_repository(tmp_path, "scaled", ROWS)
    in_repository(tmp_path, "inverted", INVERTED)
    in_repository(tmp_path, "broken", "def f(x): ...")
    path = "/models/picture"
    image = bytes(range(256)) * 8192  # 2 MiB
    with Server(repository=tmp_path, **SMALL, **only("picture,words,scaled,inverted")) as server:
        assert server.post(path, {"image": "AAAA", "size": {"width": 2, "height": 3}}) == (
            200,
            {"bytes": 3, "pixels": 6, "title": "none"},
        )
        status, document = server.post(path, {"image": "AAAA", "size": {"width": "2"}})
        assert (status, document["error"]) == (400, "Expected `int`, got `str` - at `$.size.width`")
        status, document = server.post(path, {"image": "", "size": {"width": 2}, "title": "bad"})
        assert (status, document["error"]) == (500, "not this one")

        body, kind = form(image=image, size=b'{"width": 5}', title=b"\xc3\xa4")
        status, _, answer = server.request("POST", path, body, {"Content-Type": kind})
        assert (status, json.loads(answer)) == (
            200,
            {"bytes": len(image), "pixels": 5, "title": "ä"},
        )
        body, kind = form(image=image, size=b'{"width": "x"}')
        status, _, answer = server.request("POST", path, body, {"Content-Type": kind})
        assert (status, "`$.size.width`" in answer.decode()) == (400, True)

        body, kind = form(image=b"\x00\xff")
        status, headers, answer = server.request(
            "POST", "/models/inverted", body, {"Content-Type": kind}
        )
        assert (status, headers["content-type"]) == (200, "image/x-portable-graymap")
        assert answer == b"\xff\x00"

        status, _, answer = server.request("POST", "/models/words", b'{"text": "a b stop"}')
        assert status == 200
        assert answer == (
            b'data: {"word":"a"}\n\ndata: {"word":"b"}\n\ndata: {"error":"stopped"}\n\n'
        )
        status, document = server.post("/models/words", {"text": 5})
        assert (status, document["error"]) == (400, "Expected `str`, got `int` - at `$.text`")

        assert server.post("/models/scaled", {})[0] == 404
        text = '{"image": "AAAA", "size": {"width": 2}}'
        tensor = {"name": "json", "datatype": "BYTES", "shape": [1], "data": [text]}
        status, document = server.infer("picture", {"inputs": [tensor]})
        assert json.loads(document["outputs"][0]["data"][0])["pixels"] == 2

        paths = server.get("/openapi.json")[1]["paths"]
        assert paths["/models/picture"]["post"]["summary"] == "Describe a picture."
        assert "multipart/form-data" in paths["/models/picture"]["post"]["requestBody"]["content"]
        status, document = server.control("load", "broken")
        assert "argument 'x' has no type hint" in document["error"]


def test_plain_values_need_the_right_to_use(tmp_path: Path) -> None:
    in_repository(tmp_path / "models", "words", WORDS)
    with Server(repository=tmp_path / "models", **SMALL, **one_key(tmp_path)) as server:
        assert server.post("/models/words", {"text": "a"})[0] == 401
        status, _, answer = server.request(
            "POST", "/models/words", b'{"text": "a"}', {"Authorization": f"Bearer {KEY}"}
        )
        assert (status, answer) == (200, b'data: {"word":"a"}\n\n')
        evil = {"Authorization": f"Bearer {KEY}", "Origin": "http://evil.example"}
        assert server.request("POST", "/models/words", b"{}", evil)[0] == 403


SUMS = """
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from shmserve.model import Shape

Number = Annotated[NDArray[np.int32], Shape("batch", 1)]


class Sums:
    def __init__(self):
        self.sums = {}

    def predict(self, number: Number, START: Number, ID: Number) -> Number:
        for value, start, key in zip(number[:, 0], START[:, 0], ID[:, 0]):
            self.sums[key] = value + (0 if start else self.sums[key])
        return np.array([[self.sums[key]] for key in ID[:, 0]], np.int32)
"""
SEQUENCES = """
max_batch_size: 4
sequence_batching { control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } ] } ] }
"""


def test_sequences_of_a_model_of_hints(tmp_path: Path) -> None:
    in_repository(tmp_path, "sums", SUMS)
    (tmp_path / "sums/config.pbtxt").write_text(SEQUENCES)
    with Server(repository=tmp_path, **SMALL) as server:
        assert [t["name"] for t in server.get("/v2/models/sums")[1]["inputs"]] == ["number"]
        for number, start, expected in ((5, True, 5), (7, False, 12)):
            tensor = {"name": "number", "datatype": "INT32", "shape": [1, 1], "data": [number]}
            parameters = {"sequence_id": 3, "sequence_start": start}
            status, document = server.infer("sums", {"inputs": [tensor], "parameters": parameters})
            assert (status, document["outputs"][0]["data"]) == (200, [expected])
