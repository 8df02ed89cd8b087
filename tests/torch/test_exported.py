"""Programs of torch.export and packages of AOTInductor, compared with the module's own answer."""

import io
import json
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve import repository
from shmserve.errors import Code, ConfigError
from shmserve.executor.backends.torch import archive_check
from tests.backend_runner import FakeBackendRequest, arrays, ask, failure, load
from tests.servers import Server

pytestmark = pytest.mark.torch

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own future
        yield


def export(
    folder: Path, kind: str, *arguments: Any, rows: int = 0, config: str = "", **shapes: Any
) -> str:
    """Save a module of tests.torch.modules as 1/model.pt2. `rows`: most rows of a variable first
    dimension; 0: all dimensions are fixed."""
    import torch

    from tests.torch import modules

    (folder / "1").mkdir(parents=True)
    if rows:
        dim = torch.export.Dim("rows", min=1, max=rows)
        shapes["dynamic_shapes"] = [{0: dim} if hasattr(a, "shape") else None for a in arguments]
    program = torch.export.export(getattr(modules, kind)(), arguments, **shapes)
    torch.export.save(program, folder / "1" / "model.pt2")
    if config:
        (folder / "config.pbtxt").write_text(config)
    return str(folder)


def tensors() -> tuple[Any, Any]:
    import torch

    return torch.ones(2, 3), torch.ones(2, 3)


def test_a_program_tells_its_tensors_and_batches(tmp_path: Path) -> None:
    directory = export(tmp_path / "m", "AddSub", *tensors(), rows=8)
    assert repository.read_folder(directory).specs[0].config.model_file == "model.pt2"
    backend, spec = load(directory)
    assert spec.backend == "pytorch"
    assert [(t.name, t.datatype, t.shape) for t in (*spec.inputs, *spec.outputs)] == [
        ("x", "FP32", (-1, 3)),
        ("y", "FP32", (-1, 3)),
        ("OUTPUT__0", "FP32", (-1, 3)),
        ("OUTPUT__1", "FP32", (-1, 3)),
    ]
    assert (spec.max_batch_size, spec.chosen_batch) == (4, True)
    got = arrays(ask(backend, spec, y=X + 1, x=X))
    assert got["OUTPUT__0"].tolist() == (X + X + 1).tolist()
    assert got["OUTPUT__1"].tolist() == [[-1] * 3] * 2


def test_sizes_that_are_computed_from_rows_make_no_batch(tmp_path: Path) -> None:
    backend, spec = load(export(tmp_path / "m", "Every2nd", tensors()[0], rows=8))
    assert (spec.max_batch_size, spec.inputs[0].shape, spec.outputs[0].shape) == (0, (-1, 3), (-1,))
    got = arrays(ask(backend, spec, x=np.ones((5, 3), np.float32)))["OUTPUT__0"]
    assert got.shape == (8,)


def test_shapes_that_a_program_excludes_are_the_callers_mistake(tmp_path: Path) -> None:
    config = "max_batch_size: 16"
    backend, spec = load(export(tmp_path / "m", "AddSub", *tensors(), rows=8, config=config))
    x = np.ones((9, 3), np.float32)
    error = failure(ask(backend, spec, x=x, y=x))
    assert error.code == Code.INVALID_ARGUMENT
    assert "<= 8" in error.message


def test_results_in_a_dict_have_the_names_of_its_keys(tmp_path: Path) -> None:
    backend, spec = load(export(tmp_path / "m", "Named", tensors()[0]))
    assert (spec.max_batch_size, spec.inputs[0].shape) == (0, (2, 3))
    got = arrays(ask(backend, spec, ("SAME", "TWICE"), x=X))
    assert got["TWICE"].tolist() == (2 * X).tolist()
    assert got["SAME"].tolist() == X.tolist()


def test_arguments_in_a_dict_and_fixed_arguments(tmp_path: Path) -> None:
    x, y = tensors()
    backend, spec = load(export(tmp_path / "d", "Dictionary", {"a": x, "b": y}))
    first, second = (tensor.name for tensor in spec.inputs)
    got = arrays(ask(backend, spec, **{first: X, second: 2 * X}))  # type: ignore[arg-type]
    assert got["OUTPUT__0"].tolist() == (3 * X).tolist()
    backend, spec = load(export(tmp_path / "f", "Maybe", x, None))
    assert [tensor.name for tensor in spec.inputs] == ["x"]
    assert arrays(ask(backend, spec, x=X))["OUTPUT__0"].tolist() == (X + 100).tolist()


def test_an_input_that_a_program_writes_into_is_a_copy(tmp_path: Path) -> None:
    backend, _ = load(export(tmp_path / "m", "InPlace", tensors()[0]))
    request = FakeBackendRequest(("OUTPUT__0",), x=X)
    assert arrays(backend.execute([request])[0])["OUTPUT__0"].tolist() == (2 * X).tolist()
    assert request.inputs["x"].memory.tolist() == X.tolist()


PLACES = """
input [ { name: "INPUT__1" }, { name: "INPUT__0" } ]
output [ { name: "DIFFERENCE__1" } ]
"""


def test_a_configuration_names_tensors_by_place(tmp_path: Path) -> None:
    backend, spec = load(export(tmp_path / "m", "AddSub", *tensors(), config=PLACES))
    got = arrays(ask(backend, spec, INPUT__0=X, INPUT__1=X + 1))
    assert {name: array.tolist() for name, array in got.items()} == {
        "DIFFERENCE__1": [[-1.0] * 3] * 2
    }


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ('input [ { name: "x" } ]', "lacks input 'y'"),
        (PLACES.replace("INPUT__1", "INPUT__2"), "input 'INPUT__2' has place 2, but forward takes"),
        (
            PLACES.replace('"INPUT__1" }', '"INPUT__1" data_type: TYPE_INT8 }'),
            "input 'INPUT__1' is INT8, but FP32 in the exported program",
        ),
        (
            PLACES.replace('"INPUT__1" }', '"INPUT__1" dims: [ 2, 4 ] }'),
            r"has shape \[2, 4\], but \[2, 3\] in the exported program",
        ),
        ('output [ { name: "OUTPUT__7" } ]', "output 'OUTPUT__7' has place 7"),
        ("max_batch_size: 2", "no variable batch dimension"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, config: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(export(tmp_path / "m", "AddSub", *tensors(), config=config))


def test_files_that_are_no_programs_are_refused(tmp_path: Path) -> None:
    directory = export(tmp_path / "m", "Double", tensors()[0])
    file = tmp_path / "m/1/model.pt2"
    whole = file.read_bytes()
    for broken in (b"", b"text", whole[: len(whole) // 2]):
        file.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"'model.pt2' is no exported program") as caught:
            load(directory)
        assert str(tmp_path) not in caught.value.message


def test_a_program_with_a_pickle_is_not_unpickled(tmp_path: Path) -> None:
    directory = export(tmp_path / "m", "Double", tensors()[0])
    file, ran = tmp_path / "m/1/model.pt2", tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    import torch

    saved = io.BytesIO()
    torch.save((Evil(), {}), saved, pickle_module=pickle)
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            inputs = "sample_inputs" in name
            archive.writestr(name, saved.getvalue() if inputs else content)
    with pytest.raises(ConfigError, match=r"'model.pt2' holds a pickle.*allow_model_code"):
        load(directory)
    assert not ran.exists()


@pytest.mark.gpu
def test_a_program_on_a_gpu(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    backend, spec = load(export(tmp_path / "m", "AddSub", *tensors()), "cuda:0")
    assert backend.reads_on_device
    got = arrays(ask(backend, spec, x=cupy.asarray(X), y=cupy.asarray(X)))["OUTPUT__0"]
    assert isinstance(got, cupy.ndarray)
    assert got.get().tolist() == (2 * X).tolist()


def rewritten(file: Path, **changes: tuple[str, str]) -> None:
    """Replace text in members of an archive. `changes`: by a part of the member's name."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            for part, (old, new) in changes.items():
                if part in name:
                    assert old.encode() in content
                    content = content.replace(old.encode(), new.encode())
            archive.writestr(name, content)


@pytest.mark.parametrize(
    "size", ["open('x').read()", "eval(chr(49))", "().__class__", "Symbol('a').name", "lambda: 1"]
)
def test_code_in_the_place_of_a_size_needs_permission(tmp_path: Path, size: str) -> None:
    directory = export(tmp_path / "m", "AddSub", *tensors(), rows=8)
    file = tmp_path / "m/1/model.pt2"
    with zipfile.ZipFile(file) as archive:
        (text,) = (archive.read(name) for name in archive.namelist() if "model.json" in name)
    (found,) = set(re.findall(rb'"expr_str": *"([^"]*)"', text))
    rewritten(file, **{"models/model.json": (found.decode(), size)})
    with pytest.raises(ConfigError, match=r"holds code in the place of a size.*allow_model_code"):
        load(directory)


GRAPH = "model/models/model.json"
SAMPLES = "model/data/sample_inputs/model.pt"


def members(file: Path | io.BytesIO) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archived(content: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return file.getvalue()


def with_code(content: dict[str, bytes]) -> dict[str, bytes]:
    code = b'"expr_str": "open(chr(49))%s"' % (b" " * 99)
    return {**content, GRAPH: re.sub(rb'"expr_str": *"[^"]*"', code, content[GRAPH])}


@pytest.fixture(scope="module")
def adding(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the members of an archive."""
    root = tmp_path_factory.mktemp("adding")
    with warnings.catch_warnings(action="ignore"):
        export(root / "m", "AddSub", *tensors(), rows=8)
    return members(root / "m/1/model.pt2")


def refused(tmp_path: Path, archive: bytes, reason: str) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.pt2").write_bytes(archive)
    with pytest.raises(ConfigError, match=rf"'model.pt2' {reason}: .*allow_model_code"):
        load(str(tmp_path / "m"))


def test_a_graph_may_have_any_end(tmp_path: Path, adding: dict[str, bytes]) -> None:
    content = with_code(adding)
    content["model/models/model.other"] = content.pop(GRAPH)
    refused(tmp_path, archived(content), "holds code in the place of a size")


def test_an_archive_with_two_directories_hides_no_code(
    tmp_path: Path, adding: dict[str, bytes]
) -> None:
    """zipfile reads the directory before the last record. torch reads the directory at the place in
    the record."""
    bad, good = archived(with_code(adding)), archived(adding)
    bad_end, good_end = bad.rfind(b"PK\5\6"), good.rfind(b"PK\5\6")
    (bad_start,) = struct.unpack_from("<I", bad, bad_end + 16)
    (good_start,) = struct.unpack_from("<I", good, good_end + 16)
    entries = bytearray(good[good_start:good_end])
    at = 0
    while at < len(entries):  # zipfile moves each member as far as the directory
        (place,) = struct.unpack_from("<I", entries, at + 42)
        struct.pack_into("<I", entries, at + 42, place + bad_start - good_start)
        at += 46 + sum(struct.unpack_from("<HHH", entries, at + 28))
    last = bytearray(good[good_end:])
    struct.pack_into("<I", last, 16, bad_start)
    archive = bad[:bad_end] + good[:good_start] + entries + last
    assert members(io.BytesIO(archive)) == adding
    refused(tmp_path, archive, "holds code in the place of a size")


ADD = '"torch.ops.aten.add.Tensor"'
GUARD, FUNCTION, NAME = (
    "holds code in the place of a guard",
    "calls other functions than operators",
    "has names that are not plain identifiers",
)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"guards_code": [', '"guards_code": ["eval(chr(49))", ', GUARD),
        ('"forward_arg_names": ["x"', '"forward_arg_names": ["x=eval(chr(49))"', NAME),
        ('"name": "x"', '"name": "x=eval(chr(49))"', NAME),
        (ADD, '"torch.os.system"', FUNCTION),
        (ADD, '"torch.ops.load_library.__call__"', FUNCTION),
        (ADD, '"torch.ops.load_library.__self__.load_library"', FUNCTION),
        (ADD, '"_operator.call"', FUNCTION),
    ],
)
def test_code_in_a_graph_needs_permission(
    tmp_path: Path, adding: dict[str, bytes], old: str, new: str, reason: str
) -> None:
    assert old.encode() in adding[GRAPH]
    changed = adding[GRAPH].replace(old.encode(), new.encode())
    refused(tmp_path, archived({**adding, GRAPH: changed}), reason)


def test_code_in_the_names_of_sample_inputs_needs_permission(tmp_path: Path) -> None:
    import torch

    x, y = tensors()
    export(tmp_path / "own", "Dictionary", {"a": x, "b": y})
    saved = io.BytesIO()
    torch.save((({'"+eval(chr(49))+"': x, "b": y},), {}), saved)
    content = {**members(tmp_path / "own/1/model.pt2"), SAMPLES: saved.getvalue()}
    refused(tmp_path, archived(content), NAME)


def test_texts_of_torchs_own_need_no_permission(tmp_path: Path, adding: dict[str, bytes]) -> None:
    import torch

    message = "Runtime assertion failed for expression u0 >= 0 on node 'ge'"
    guard = "(2*L['x'].size()[0]) // 3 != L['y'].size()[1] and max(1, L['x'].stride()[0]) <= 8"
    graph = json.loads(adding[GRAPH])
    graph["graph_module"]["graph"]["nodes"][0]["inputs"][1]["arg"] = {"as_string": message}
    graph["guards_code"].append(guard)
    graph["range_constraints"]["2*s39 + 1"] = {"min_val": 1, "max_val": 8}
    file = tmp_path / "model.pt2"
    file.write_bytes(archived({**adding, GRAPH: json.dumps(graph).encode()}))
    assert archive_check.code_in(torch, str(file)) == ""


def test_a_constant_that_is_a_pickle_needs_permission(tmp_path: Path) -> None:
    directory = export(tmp_path / "m", "Double", tensors()[0])
    entry = '"config": {"c": {"path_name": "opaque_obj_0", "use_pickle": true}}'
    rewritten(tmp_path / "m/1/model.pt2", constants_config=('"config": {}', entry))
    with pytest.raises(ConfigError, match=r"'model.pt2' holds a pickle.*allow_model_code"):
        load(directory)


def test_members_with_one_name_are_refused(tmp_path: Path) -> None:
    directory = export(tmp_path / "m", "Double", tensors()[0])
    with zipfile.ZipFile(tmp_path / "m/1/model.pt2", "a") as archive:
        name = next(name for name in archive.namelist() if "model.json" in name)
        archive.writestr(name.upper(), "{}")
    with pytest.raises(ConfigError, match=r"is no exported program"):
        load(directory)


CONFIG = """
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 2, 3 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2, 3 ] } ]
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the model m, a package for the CPU without a configuration."""
    import torch
    from torch._inductor import aoti_compile_and_package

    from tests.torch import modules

    root = tmp_path_factory.mktemp("packages")
    (root / "m" / "1").mkdir(parents=True)
    with warnings.catch_warnings(action="ignore"):
        program = torch.export.export(modules.Double(), (torch.ones(2, 3),))
        aoti_compile_and_package(program, package_path=str(root / "m/1/model.pt2"))
    return root


def test_packages_need_permission_and_a_configuration(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"'model.pt2' holds native code.*allow_model_code"):
        load(str(package / "m"))
    with pytest.raises(ConfigError, match=r"config.pbtxt must tell input and output"):
        load(str(package / "m"), allow_model_code=True)


def test_a_package_runs(package: Path) -> None:
    (package / "m/config.pbtxt").write_text(CONFIG)
    backend, spec = load(str(package / "m"), allow_model_code=True)
    assert arrays(ask(backend, spec, INPUT__0=X))["OUTPUT__0"].tolist() == (2 * X).tolist()
    wrong = failure(ask(backend, spec, INPUT__0=np.ones((2, 4), np.float32)))
    assert wrong.code == Code.INTERNAL  # the configuration contradicts the package
    (package / "m/config.pbtxt").write_text(CONFIG + CONFIG.replace("__0", "__1"))
    with pytest.raises(ConfigError, match="has place 1, but forward takes 1"):
        load(str(package / "m"), allow_model_code=True)


def test_a_server_serves_programs_and_packages(tmp_path: Path, package: Path) -> None:
    export(tmp_path / "program", "Double", tensors()[0], rows=8)
    (tmp_path / "package").symlink_to(package / "m")
    (package / "m/config.pbtxt").write_text(CONFIG)
    with Server(tmp_path, http_workers=1, allow_model_code=True) as server:
        for model, name in (("program", "x"), ("package", "INPUT__0")):
            body, _ = server.infer_binary(model, X, name=name)
            assert np.frombuffer(body, np.float32).tolist() == (2 * X).ravel().tolist()
