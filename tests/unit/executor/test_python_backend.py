"""The python backend: loading model.py, and errors without the inside of the server."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from shmserve import repository
from shmserve.errors import Code, ConfigError, ModelFailure, ShmserveError
from shmserve.executor.backend import Context
from shmserve.executor.backends import create
from shmserve.executor.backends.model_errors import (
    MAX_TEXT,
    describe,
    from_exception,
    sanitised,
)
from shmserve.protocol.control import messages
from shmserve.protocol.control.data_messages import Answer
from tests.backend_runner import FakeBackendRequest, arrays, ask, failure, load
from tests.model_files import X_TO_Y as CONFIG
from tests.model_files import Make, model_maker, native, triton

X = np.arange(4, dtype=np.float32)


# ------------------------------------------------------------------- loading


def test_shipped_python_workers() -> None:
    backend, spec = load("workers/add_sub")
    a, b = np.arange(16, dtype=np.int32), np.full(16, 3, np.int32)
    got = arrays(ask(backend, spec, INPUT0=a, INPUT1=b))
    np.testing.assert_array_equal(got["OUTPUT0"], a + b)
    np.testing.assert_array_equal(got["OUTPUT1"], a - b)
    backend, spec = load("workers/identity")
    request = FakeBackendRequest(("OUTPUT0",), INPUT0=X)
    (response,) = backend.execute([request])
    assert arrays(response)["OUTPUT0"] is request.offered["OUTPUT0"]
    np.testing.assert_array_equal(request.offered["OUTPUT0"], X)
    backend, spec = load("workers/identity_bytes")
    texts = np.array([b"a", b"", "ä".encode()], np.object_)
    np.testing.assert_array_equal(arrays(ask(backend, spec, INPUT0=texts))["OUTPUT0"], texts)
    backend, spec = load("workers/noop")
    assert arrays(ask(backend, spec, INPUT0=X))["OUTPUT0"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = 1", "neither a class TritonPythonModel nor a class Model"),
        ("class Model: pass", "has no method infer"),
        ("class TritonPythonModel: pass", "has no execute"),
        (
            "import no_such_module_xyz",
            "'no_such_module_xyz': install its .* restart the server or load",
        ),
        ("raise ValueError('see /etc/passwd')", "see <path>"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def (", "invalid syntax"),
        (
            "class Model:\n  def __init__(self, c): raise KeyError('k')\n  def infer(self, r): 0",
            "KeyErr",
        ),
        (
            "class TritonPythonModel:\n  def initialize(self, a): 1/0\n  def execute(self, r): 0",
            "zero",
        ),
    ],
)
def test_models_that_do_not_load(make: Make, code: str, reason: str) -> None:
    with pytest.raises(ShmserveError, match=reason) as caught:
        load(make(code))
    assert "/" not in caught.value.message


def test_no_inputs_and_no_auto_complete(make: Make) -> None:
    for name, code in (("a", native("pass")), ("b", triton("pass"))):
        with pytest.raises(ConfigError, match="input and output"):
            load(make(code, 'backend: "python"', name))


def test_a_models_module_is_found_by_its_name(make: Make) -> None:
    """As `unittest.main(__name__)` does, which public models run."""
    find = "import functools\n_, *rest = __name__.split('.')\n"
    find += "found = functools.reduce(getattr, rest, __import__(__name__))"
    backend, spec = load(
        make(native(f"{find}\nreturn {{'Y': np.full(2, found.VALUE, np.float32)}}") + "VALUE = 7")
    )
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [7, 7]


def test_files_beside_the_model_can_be_imported(make: Make) -> None:
    directory = make("from helper_of_m import VALUE\n" + native("return {'Y': np.full(2, VALUE)}"))
    (Path(directory) / "1" / "helper_of_m.py").write_text("import numpy\nVALUE = numpy.float32(7)")
    backend, spec = load(directory)
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [7, 7]


def test_a_replaced_model_is_loaded_anew_and_nothing_is_written(make: Make) -> None:
    directory = make(native("return {'Y': np.zeros(1, np.float32)}"))
    assert arrays(ask(*load(directory), ("Y",), X=X))["Y"][0] == 0
    file = Path(directory) / "1" / "model.py"
    file.write_text(file.read_text().replace("zeros", "ones "))
    assert arrays(ask(*load(directory), ("Y",), X=X))["Y"][0] == 1
    assert [path.name for path in file.parent.iterdir()] == ["model.py"]


def test_two_models_do_not_share_a_module(make: Make) -> None:
    one = load(make(native("return {'Y': np.zeros(1, np.float32)}"), name="one"))
    two = load(make(native("return {'Y': np.ones(1, np.float32)}"), name="two"))
    assert arrays(ask(*one, ("Y",), X=X))["Y"][0] == 0
    assert arrays(ask(*two, ("Y",), X=X))["Y"][0] == 1


def test_an_unknown_backend(make: Make) -> None:
    _, spec = load("workers/identity")
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    with pytest.raises(ConfigError, match="backend 'other'"):
        create(type(spec)(**{**fields, "backend": "other"}))


def test_model_errors_show_no_inside(make: Make, caplog) -> None:
    code = native("raise ValueError(f'bad /etc/shadow in {__file__} at 0x7f00deadbeef\\nmore')")
    backend, spec = load(make(code))
    with caplog.at_level(logging.ERROR):
        error = failure(ask(backend, spec, ("Y",), X=X))
    assert isinstance(error, ModelFailure)
    assert error.code is Code.INTERNAL
    assert error.message == "bad <path> in <path> at <address> more"
    assert "Traceback" in caplog.text
    code = native("from shmserve.errors import InvalidArgument; raise InvalidArgument('mine')")
    backend, spec = load(make(code, name="n"))
    assert failure(ask(backend, spec, ("Y",), X=X)).code is Code.INVALID_ARGUMENT
    code = native("raise SystemExit(4)")
    backend, spec = load(make(code, name="o"))
    assert failure(ask(backend, spec, ("Y",), X=X)).message == "SystemExit: 4"


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("InvalidArgument(OSError('no /etc/shadow'))", "no <path>"),
        ("InvalidArgument(None)", "None"),
        ("InvalidArgument('a\\ud800\\n')", "a?\n"),
        ("InvalidArgument('x' * 10**6)", "x" * (MAX_TEXT - 1) + "…"),
        ("asyncio.CancelledError", "CancelledError"),
        ("type('PanicException', (BaseException,), {})('a library in Rust')", "a library in Rust"),
    ],
)
def test_every_error_of_a_model_is_an_answer(make: Make, raised: str, message: str) -> None:
    code = f"import asyncio; from shmserve.errors import InvalidArgument; raise {raised}"
    backend, spec = load(make(native(code)))
    error = failure(ask(backend, spec, ("Y",), X=X))
    assert error.message == message
    messages.encode(Answer(1, error_code=error.code, error=error.message))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "class Model:\n  def __init__(self, c): c.nothing\n  def infer(self, r): 0",
            "AttributeError: ",
        ),
        ("def (", "SyntaxError: "),
    ],
)
def test_the_log_shows_the_models_part_of_a_traceback(
    make: Make, code: str, error: str, caplog
) -> None:
    with pytest.raises(ShmserveError):
        load(make(code))
    (frame,) = [line for line in caplog.text.splitlines() if line.startswith("  File ")]
    assert "/1/model.py" in frame
    assert f"\n{error}" in caplog.text


def test_the_log_shows_all_of_the_servers_own_traceback(caplog) -> None:
    with pytest.raises(AttributeError) as caught:
        repository.read_labels(None, "")
    own = caught.value.with_traceback(caught.value.__traceback__.tb_next)
    from_exception(own, logging.getLogger(), "reading")
    assert "repository/model_folder.py" in caplog.text


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.INVALID_ARGUMENT])
def test_refused_values_are_a_line_without_traceback(
    caplog: pytest.LogCaptureFixture, code: Code
) -> None:
    error = from_exception(ValueError("NaN"), logging.getLogger(), "inference failed", code)
    assert (error.code, error.message) == (code, "NaN")
    (record,) = caplog.records
    assert record.getMessage() == "inference failed: ValueError: NaN"
    assert bool(record.exc_info) is (code is Code.INTERNAL)


def test_sanitised_texts() -> None:
    assert sanitised("and/or 3 / 4 = N/A; 2.5/s") == "and/or 3 / 4 = N/A; 2.5/s"
    assert sanitised("open ~/x, ./y/z.txt and ../w") == "open <path>, <path> and <path>"
    assert sanitised("run `x '/srv/my models/d'`") == "run `x '<path>'`"
    assert sanitised("'/a/b.py', line 3 (core/session.cc:12)") == "'<path>', line 3 (core/<file>)"
    assert sanitised(r"C:\secret\x.txt failed") == "<path> failed"
    assert sanitised("a\tb\x00c\n\nd") == "a b c d"
    assert len(sanitised("x" * 10**6)) == MAX_TEXT
    trace = 'Traceback (most recent call last):\n  File "/a.py", line 1\nValueError: last'
    assert sanitised(trace) == "ValueError: last"
    assert sanitised("x.py y/z.so.1: see a-b.cc:7") == "<file> y/<file>: see <file>"
    assert sanitised("mask 0xff") == "mask 0xff"
    assert describe(MemoryError()) == "MemoryError"
    assert describe(KeyError("k")) == "KeyError: 'k'"

    for hostile in ("\n" * 10**6, "a." * 10**6, "/." * 10**6, "'/" * 10**6):
        assert len(sanitised(hostile)) <= MAX_TEXT

    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe(Broken()) == "Broken"


def test_the_log_names_the_kind_of_an_error_once(caplog) -> None:
    for ex in (KeyError("missing"), ValueError("wrong")):
        from_exception(ex, logging.getLogger("x"), "inference failed")
    assert caplog.messages == [
        "inference failed: KeyError: 'missing'", "inference failed: ValueError: wrong"
    ]  # fmt: skip


def test_without_torch(tmp_path, monkeypatch) -> None:
    directory = model_maker(tmp_path)("", CONFIG.replace("python", "pytorch"))
    (Path(directory) / "1" / "model.pt").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"needs the extra 'torch': pip install 'shmserve\[tor"):
        load(directory)


@pytest.mark.parametrize(
    "code", [native("return {'Y': request.input('X')}"), triton("return [None for _ in requests]")]
)
def test_a_configuration_of_one_field_leaves_tensors_to_config_pbtxt(make: Make, code: str) -> None:
    folder = repository.read_folder(make(code), '{"max_batch_size": "4"}')
    (spec,) = folder.specs
    assert spec.inputs == spec.outputs == ()
    backend = create(spec)
    spec = backend.load(Context(spec, folder.directory, "m/1/0@2", "cpu"))
    backend.close()
    assert spec.max_batch_size == 4
    assert [tensor.name for tensor in spec.outputs] == ["Y", "S"]
    assert spec.inputs[0].shape == (-1, -1), "with the batch"
