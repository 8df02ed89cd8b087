"""Models on plain values: bodies to arguments, answers to JSON, forms, schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from shmserve.errors import Code, ConfigError, Internal, InvalidArgument, ShmserveError
from shmserve.executor.backend import BatchForm
from shmserve.protocol.oip import json_calls
from tests.backend_runner import FakeBackendRequest, arrays, ask, ask_stream, failure, load

HEAD = """
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
from pydantic import BaseModel, Field

from shmserve.model import ContentType, ModelRequest, batched
"""


class Asker:
    """A loaded model on plain values. `ask` returns the answer, or raises the error."""

    def __init__(self, folder: Path, code: str) -> None:
        (folder / "m/1").mkdir(parents=True, exist_ok=True)
        (folder / "m/1/model.py").write_text(HEAD + dedent(code))
        self.backend, self.spec = load(str(folder / "m"))

    def ask(self, body: Any) -> Any:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = ask(self.backend, self.spec, json=np.array([text], object))
        return json.loads(arrays(response)["json"][0])

    def form(self, *parts: tuple[str, bytes]) -> Any:
        return self.ask(json_calls.encode_form(parts))

    @property
    def schemas(self) -> json_calls.JsonCallSchemas:
        return json_calls.decode_schemas(self.spec.parameters["json_schema"])


def test_arguments_are_keys(tmp_path: Path) -> None:
    code = '''
    def predict(text: str, times: int = 2, tags: list[str] | None = None) -> dict[str, Any]:
        """Repeat a text.

        More."""
        return {"text": text * times, "tags": tags}
    '''
    model = Asker(tmp_path, code)
    assert json_calls.takes_json(model.spec)
    assert [(t.name, t.datatype, t.shape) for t in model.spec.inputs] == [("json", "BYTES", (1,))]
    assert model.ask({"text": "a"}) == {"text": "aa", "tags": None}
    assert model.ask({"text": "a", "times": 3, "tags": ["x"]}) == {"text": "aaa", "tags": ["x"]}
    assert model.ask({"text": "a", "tags": None})["tags"] is None
    schemas = model.schemas
    assert schemas.summary == "Repeat a text."
    assert schemas.body["required"] == ["text"]
    assert schemas.body["properties"]["times"] == {"type": "integer"}
    assert schemas.components == {}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"text": 5}, r"Expected `str`, got `int` - at `\$.text`"),
        ({}, "missing required field `text`"),
        (b"", "missing required field `text`"),
        ({"text": "a", "time": 3}, "unknown field `time`"),
        (b"{", "Input data was truncated"),
        (b'"\xff"', "."),
        (b"[" * 100_000, "."),
        (b"\xff", "."),
        (b"\xc1", "."),
        (json_calls.encode_form([("text", b"a"), ("text", b"b")]), "part 'text' 2 times"),
        (json_calls.encode_form([("other", b"a")]), "a part 'other'"),
        (json_calls.encode_form([("times", b"2")] * 65), "neither JSON nor a form of at most 64"),
        (b"\xef\xbb\xbf{}", "neither JSON nor a form"),
        ({"x" * 10_000: 1}, "^.{1,500}$"),
        (json_calls.encode_form([("text", b"\xff")]), "part 'text' of the form is not UTF-8"),
        (json_calls.encode_form([("text", b"a"), ("times", b"x")]), r"`\$.times`"),
    ],
)
def test_bodies_that_do_not_fit(tmp_path: Path, body: Any, reason: str) -> None:
    model = Asker(tmp_path, "def f(text: str, times: int = 2) -> str: return text")
    with pytest.raises(InvalidArgument, match=reason):
        model.ask(body)


@pytest.mark.parametrize(
    "kind",
    [
        "class Body(msgspec.Struct):\n    size: int",
        "@dataclass\nclass Body:\n    size: int",
        "class Body(TypedDict):\n    size: int",
        "class Body(BaseModel):\n    size: int = Field(lt=10)",
    ],
)
def test_an_object_is_the_body(tmp_path: Path, kind: str) -> None:
    code = f"{kind}\ndef predict(body: Body) -> Body: return body"
    model = Asker(tmp_path, code)
    assert model.ask({"size": 5}) == {"size": 5}
    with pytest.raises(InvalidArgument, match="size"):
        model.ask({"size": "x"})
    assert "size" in json.dumps([model.schemas.body, model.schemas.components])
    if "msgspec" in kind:
        assert model.schemas.body == {"$ref": "#/components/schemas/m.Body"}
        assert model.schemas.components.keys() == {"m.Body"}


def test_arguments_may_be_missing_without_a_default(tmp_path: Path) -> None:
    model = Asker(tmp_path, "def f(a: int | None, b: int = 2) -> Any: return [a, b]")
    assert model.ask({}) == [None, 2]
    assert model.ask({"a": 3}) == [3, 2]


def test_methods_of_the_class(tmp_path: Path) -> None:
    code = """
    class A:
        @classmethod
        def predict(cls, a: int, b: int) -> Any: return [cls.__name__, a, b]
    """
    assert Asker(tmp_path, code).ask({"a": 1, "b": 2}) == ["A", 1, 2]


@pytest.mark.parametrize("batch", ["", "@batched(4)"])
def test_errors_of_the_types_own_code(tmp_path: Path, batch: str) -> None:
    hint = "list[A]" if batch else "A"
    code = f"""
    @dataclass
    class A:
        x: int
        def __post_init__(self): {{}}["/etc/passwd"]
    {batch}
    def f(a: {hint}) -> {hint}: return a
    """
    model = Asker(tmp_path, code)
    text = np.array([[b'{"x": 1}']] if batch else [b'{"x": 1}'], object)
    error = failure(ask(model.backend, model.spec, json=text))
    assert (error.code, error.message) == (Code.INTERNAL, "KeyError: '<path>'")


def test_a_struct_may_be_called_model(tmp_path: Path) -> None:
    code = "class Model(BaseModel):\n    x: int\ndef f(m: Model) -> int: return m.x"
    assert Asker(tmp_path, code).ask({"x": 5}) == 5


def test_max_batch_size_needs_a_batched_function(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.pbtxt").write_text("max_batch_size: 4")
    with pytest.raises(ConfigError, match=r"max_batch_size is 4 .* without @batched"):
        Asker(tmp_path, "def f(x: int) -> int: return x")


def test_a_dict_is_the_body(tmp_path: Path) -> None:
    model = Asker(tmp_path, "def f(data: dict[str, Any]) -> list[str]: return sorted(data)")
    assert model.ask({"b": 1, "a": 2}) == ["a", "b"]
    assert model.form(("b", b"1"), ("a", b"x")) == ["a", "b"]


def test_answers_with_a_content_type_are_their_bytes(tmp_path: Path) -> None:
    code = """
    Png = Annotated[bytes, ContentType("image/png")]
    @batched(max_size=4)
    def f(image: list[bytes]) -> list[Png]:
        return [one and b"\\x89" + one for one in image] if image != [b"?"] else ["text"]
    """
    model = Asker(tmp_path, code)
    assert model.schemas.media == "image/png"
    response = ask(model.backend, model.spec, json=np.array([[b'{"image": "AAAA"}']], object))
    assert arrays(response)["json"].tolist() == [[b"\x89\0\0\0"]]
    response = ask(model.backend, model.spec, json=np.array([[b'{"image": "Pw=="}']], object))
    assert "the answer must be bytes, not str" in str(response.error)


@pytest.mark.parametrize("answer", ["Iterator[{}]", "{}", "dict[bytes, {}]", "{} | None"])
def test_content_types_are_for_one_answer_of_bytes(tmp_path: Path, answer: str) -> None:
    kind = "bytes" if answer != "{}" else "str"
    hint = answer.format(f"Annotated[{kind}, ContentType('text/html; charset=utf-8')]")
    with pytest.raises(ConfigError, match=r"is for one answer of bytes: write -> Annotated\[bytes"):
        Asker(tmp_path, f"def f(x: int) -> {hint}: return b''")
    with pytest.raises(ShmserveError, match="write a type like image/png"):
        Asker(tmp_path, "def f(x: int) -> Annotated[bytes, ContentType('a/b\\r\\nX: 1')]: ...")


def test_a_file_without_its_form_is_told_of_forms(tmp_path: Path) -> None:
    model = Asker(tmp_path, "def f(image: bytes) -> int: return len(image)")
    with pytest.raises(InvalidArgument, match=r"send 'image' in a form \(multipart/form-data\)$"):
        model.ask(b"P5 1 1")
    with pytest.raises(InvalidArgument, match=r"send 'image' in a form \(multipart/form-data\)$"):
        model.ask(b"\x89PNG\r\n")
    with pytest.raises(InvalidArgument, match=r"at `\$.image`$"):
        model.ask({"image": 5})


def test_parts_of_a_form_are_values_of_a_dict(tmp_path: Path) -> None:
    model = Asker(tmp_path, "def f(data: dict[str, int | bytes]) -> Any: return data")
    assert model.form(("a", b"\xff")) == {"a": "/w=="}
    assert model.ask({"a": 1}) == {"a": 1}
    model = Asker(tmp_path, "def f(data: dict[str, Any]) -> Any: return data")
    with pytest.raises(InvalidArgument, match="part 'a' of the form is not UTF-8"):
        model.form(("a", b"\xff"))


def test_pydantics_models_within(tmp_path: Path) -> None:
    code = """
    class Inner(BaseModel):
        size: int = Field(lt=10)
    class Outer(BaseModel):
        inner: Inner
    def f(items: list[Outer]) -> dict[str, Outer]: return {"last": items[-1]}
    """
    model = Asker(tmp_path, code)
    item = {"inner": {"size": 5}}
    assert model.ask({"items": [item]}) == {"last": item}
    with pytest.raises(InvalidArgument, match=r"less than 10 - at `inner.size` - at `\$.items"):
        model.ask({"items": [{"inner": {"size": 50}}]})
    assert "#/components/schemas/m.Inner" in json.dumps(
        [model.schemas.body, model.schemas.components]
    )
    assert "m.Inner" in model.schemas.components


@pytest.mark.parametrize("struct", ["", "class Size(msgspec.Struct):\n        x: str"])
def test_pydantics_models_of_equal_names_have_schemas_of_their_own(
    tmp_path: Path, struct: str
) -> None:
    code = f"""
    class Left(BaseModel):
        class Size(BaseModel):
            left: int
        size: Size
    class Right(BaseModel):
        class Size(BaseModel):
            right: int
        size: Size
    {struct}
    def f(a: Left, b: Right, c: {"Size" if struct else "int"}) -> Left.Size: return a.size
    """
    schemas = Asker(tmp_path, code).schemas
    components = schemas.components

    def at(schema: dict[str, Any]) -> Any:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        assert name.startswith("m.")
        return components[name]["properties"]

    members = schemas.body["properties"]
    assert at(at(members["a"])["size"]).keys() == at(schemas.answer).keys() == {"left"}
    assert at(at(members["b"])["size"]).keys() == {"right"}
    if struct:
        assert at(members["c"]) == {"x": {"type": "string"}}


@pytest.mark.parametrize("hint", ["A", "list[A]", "B", "dict[str, B | None]"])
@pytest.mark.parametrize("field", ["Annotated[int, Field(lt=10)]", "int = Field(lt=10)"])
def test_dataclasses_of_pydantics_are_refused(tmp_path: Path, hint: str, field: str) -> None:
    code = f"""
    from typing import Annotated
    import pydantic.dataclasses
    @pydantic.dataclasses.dataclass
    class A:
        x: {field}
    class B(msgspec.Struct):
        a: A
        more: "list[B]" = []
    def f(a: {hint}) -> int: return 1
    """
    with pytest.raises(ConfigError, match=r"'A' is a dataclass of pydantic's, .*class A\(BaseMod"):
        Asker(tmp_path, code)


CHECKED = """
from typing import Annotated, Generic, NewType, TypeVar
import annotated_types
from pydantic import AfterValidator, PositiveInt
Ten = Annotated[int, Field(ge=1, le=10)]
class InStruct(msgspec.Struct):
    size: Ten
@dataclass
class InDataclass:
    size: int = Field(default=1, ge=1)
class InTyped(TypedDict):
    structs: list[InStruct]
class InModel(BaseModel):
    size: Ten = Field(3)
T = TypeVar("T")
class Of(msgspec.Struct, Generic[T]):
    item: T
Alias = NewType("Alias", Ten)
"""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            "top_k: Ten = 3",
            "argument 'top_k': pydantic's Field is not checked here:"
            " use msgspec.Meta(ge=1, le=10), or a pydantic BaseModel",
        ),
        ("a: int, b: int = Field(default=3, gt=0)", "argument 'b': pydantic's Field .*Meta(gt=0)"),
        ("x: Annotated[int, annotated_types.Ge(1)]", "argument 'x': annotated_types's Ge .*(ge=1)"),
        ("x: PositiveInt", "argument 'x': annotated_types's Gt "),
        (
            "x: list[Annotated[bytes, AfterValidator(len)]]",
            "pydantic's AfterValidator is not checked here: use msgspec.Meta, or",
        ),
        ("x: dict[str, Ten | None]", "argument 'x': pydantic's Field "),
        ("x: Alias", "argument 'x': pydantic's Field "),
        ("x: Of[Ten]", "argument 'x': pydantic's Field "),
        ("x: InStruct", "argument 'x', field 'size': pydantic's Field "),
        ("x: InDataclass", "argument 'x', field 'size': pydantic's Field .*Meta(ge=1)"),
        ("x: InTyped", "argument 'x', field 'structs', field 'size': pydantic's Field "),
    ],
)
def test_constraints_that_are_not_checked_are_refused(
    tmp_path: Path, arguments: str, reason: str
) -> None:
    first, *rest = map(re.escape, reason.split(".*"))
    with pytest.raises(ConfigError, match=".*".join([first, *rest])):
        Asker(tmp_path, f"{CHECKED}\ndef f({arguments}) -> int: return 1")


def test_constraints_that_are_checked(tmp_path: Path) -> None:
    arguments = "x: Annotated[int, msgspec.Meta(ge=1)], box: InModel = InModel(size=2)"
    model = Asker(tmp_path, f"{CHECKED}\ndef f({arguments}) -> int: return box.size")
    assert model.ask({"x": 1}) == 2
    for body in ({"x": 0}, {"x": 1, "box": {"size": 11}}):
        with pytest.raises(InvalidArgument, match="1"):
            model.ask(body)


@pytest.mark.parametrize("field", ["bytes", "list[bytes] | None", "Inner"])
def test_bytes_of_pydantics_models_have_a_form_that_the_model_names(
    tmp_path: Path, field: str
) -> None:
    code = f"""
    @dataclass
    class Inner:
        image: bytes
    class Body(BaseModel):
        image: {field}
    def f(x: int, body: Body) -> int: return 1
    """
    where = "in class Inner" if field == "Inner" else "in class Body"
    reason = rf"'body', field 'image'.*: pydantic's bytes .*ConfigDict\(val_json.* {where}"
    with pytest.raises(ConfigError, match=reason):
        Asker(tmp_path, code)


def test_bytes_of_pydantics_models_in_base64(tmp_path: Path) -> None:
    code = """
    from pydantic import Base64Bytes
    @dataclass
    class Inner:
        __pydantic_config__ = {"val_json_bytes": "base64", "ser_json_bytes": "base64"}
        image: bytes
    class Body(BaseModel):
        model_config = {"val_json_bytes": "base64", **OF_ANSWERS}
        image: bytes
        inner: Inner | None = None
        other: list[Base64Bytes] = []
    def f(body: Body) -> Body:
        assert body.inner is None or body.inner.image == b"\\0" * 3
        return body
    """
    with pytest.raises(
        ConfigError, match=r"the answer, field 'image': .*\(ser_json_bytes=\"base64"
    ):
        Asker(tmp_path, code.replace(", **OF_ANSWERS", ""))
    model = Asker(tmp_path, code.replace("**OF_ANSWERS", '"ser_json_bytes": "base64"'))
    assert model.ask({"image": "AAAA", "inner": {"image": "AAAA"}})["image"] == "AAAA"
    assert model.form(("image", b"\0\0\0"))["image"] == "AAAA"
    with pytest.raises(InvalidArgument, match="valid base64"):
        model.ask({"image": "?"})


def test_a_form_for_an_argument_that_is_the_body(tmp_path: Path) -> None:
    code = """
    class Inner(BaseModel):
        left: int
    class Other(BaseModel):
        right: int
    class Body(BaseModel):
        model_config = {"val_json_bytes": "base64"}
        image: bytes
        size: int = Field(lt=10)
        title: str = Field("", alias="name")
        box: Inner | None = None
        ids: list[int] = []
        other: Inner | Other | None = None
        others: list[Inner] | list[Other] = []
    def f(body: Body) -> Any:
        box = body.other or body.box
        return [body.image.hex(), body.size, body.title, box and box.left, body.ids]
    """
    model = Asker(tmp_path, code)
    assert model.schemas.files == ("image",)
    assert model.form(("image", b"\xff"), ("size", b"5")) == ["ff", 5, "", None, []]
    parts = [("name", b"7"), ("box", b'{"left": 3}'), ("ids", b"1"), ("ids", b"2")]
    assert model.form(("image", b"a"), ("size", b"5"), *parts) == ["61", 5, "7", 3, [1, 2]]
    other = ("other", b'{"left": 4}')
    assert model.form(("image", b""), ("size", b"5"), other) == ["", 5, "", 4, []]
    with pytest.raises(InvalidArgument, match=r"less than 10 - at `size`"):
        model.form(("image", b"a"), ("size", b"50"))
    with pytest.raises(InvalidArgument, match="a part 'title', and no argument has this name"):
        model.form(("image", b"a"), ("size", b"5"), ("title", b"x"))


@pytest.mark.parametrize(
    ("kind", "field", "names"),
    [
        ("populate_by_name=True", 'alias="name"', {"name", "title"}),
        ("", 'validation_alias=AliasChoices("name", "nom")', {"name", "nom"}),
    ],
)
def test_a_form_has_the_names_that_pydantic_takes(
    tmp_path: Path, kind: str, field: str, names: set[str]
) -> None:
    code = f"""
    from pydantic import AliasChoices
    class Body(BaseModel, {kind}):
        title: str = Field({field})
    def f(body: Body) -> str: return body.title
    """
    model = Asker(tmp_path, code)
    for name in ("name", "nom", "title"):
        if name in names:
            assert model.form((name, b"x")) == model.ask({name: "x"}) == "x"
        else:
            with pytest.raises(InvalidArgument, match=f"a part '{name}', and no argument"):
                model.form((name, b"x"))


def test_a_hint_without_schema_of_pydantics(tmp_path: Path) -> None:
    code = """
    from collections.abc import Callable
    class Body(BaseModel):
        call: Callable[[int], int]
    def f(body: Body) -> int: return 1
    """
    with pytest.raises(ConfigError, match=r"JSON has no form for a hint .*Callable.*: write"):
        Asker(tmp_path, code)


def test_answers_of_numpy(tmp_path: Path) -> None:
    code = "def f() -> Any: return [np.float32(0.5), np.arange(2), np.float64(2), np.bool_(True)]"
    assert Asker(tmp_path, code).ask(b"") == [0.5, [0, 1], 2.0, True]


def test_answers_without_a_json_form(tmp_path: Path) -> None:
    model = Asker(tmp_path, "def f() -> Any: return object()")
    error = failure(ask(model.backend, model.spec, json=np.array([b"{}"], object)))
    assert error.code is Code.INTERNAL
    assert error.message == "the answer has no JSON form: object is not known"
    code = """
    from pydantic import field_serializer
    class Body(BaseModel):
        x: int
        @field_serializer("x")
        def written(self, x: int) -> str: raise ValueError("no /etc/shadow")
    def f() -> Body: return Body(x=1)
    """
    with pytest.raises(Internal, match=r"has no JSON form: .* no <path>$"):
        Asker(tmp_path, code).ask({})


def test_forms(tmp_path: Path) -> None:
    code = """
    class Box(msgspec.Struct):
        left: int
    def f(image: bytes, box: Box | None = None, scale: float = 1.0, name: str = "",
          more: list[bytes] | None = None, ids: list[int] | None = None) -> Any:
        return [image.hex(), box and box.left, scale, name, len(more or []), ids]
    """
    model = Asker(tmp_path, code)
    assert model.schemas.files == ("image", "more")
    assert model.form(("image", b"\xff\x00")) == ["ff00", None, 1.0, "", 0, None]
    parts = [("image", b"a"), ("box", b'{"left": 3}'), ("scale", b"2.5"), ("name", b"5")]
    assert model.form(*parts) == ["61", 3, 2.5, "5", 0, None]
    lists = [("image", b""), ("more", b"x"), ("more", b"y"), ("ids", b"1"), ("ids", b"2")]
    assert model.form(*lists) == ["", None, 1.0, "", 2, [1, 2]]
    assert model.form(("image", b""), ("ids", b"[1, 2]"), ("more", b"x"))[4:] == [1, [1, 2]]
    assert model.ask({"image": "/wA="})[0] == "ff00", "base64 in JSON"
    with pytest.raises(InvalidArgument, match=r"^part 'box' of the form: "):
        model.form(("image", b""), ("box", b"{"))


def test_titles_and_descriptions_do_not_change_a_hint(tmp_path: Path) -> None:
    code = """
    Note = msgspec.Meta(description="what it is for")
    class Box(msgspec.Struct):
        left: Annotated[int, Note]
        image: Annotated[bytes, Note] | None = None
    def f(box: Annotated[Box, Note]) -> Any: return [box.left, box.image]
    """
    model = Asker(tmp_path, code)
    assert model.ask({"left": 3, "image": "AAAA"}) == [3, "AAAA"], "the object is the body"
    assert model.schemas.files == ("image",)
    assert model.form(("left", b"3"), ("image", b"\xff")) == [3, "/w=="]
    code = (
        "def f(x: Annotated[int | None, msgspec.Meta(title='t')], y: int = 2) -> Any: return [x, y]"
    )
    assert Asker(tmp_path, code).ask({}) == [None, 2], "x is optional"


@pytest.mark.parametrize(
    ("hint", "parts", "value"),
    [
        ("str | list[str]", (b"[1",), "[1"),
        ("str | list[str]", (b"5",), "5"),
        ("str | list[str]", (b"5", b"a"), ["5", "a"]),
        ("str | list[str]", (b'["a"]',), ["a"]),
        ("Pair", (b"[1, 2]",), [1, 2]),
        ("list[bytes | None]", (b"\xff",), ["/w=="]),
        ("list[bytearray]", (b"\xff",), ["/w=="]),
    ],
)
def test_parts_of_a_form_for_hints_with_a_choice(
    tmp_path: Path, hint: str, parts: tuple[bytes, ...], value: Any
) -> None:
    code = "from typing import NamedTuple\nclass Pair(NamedTuple):\n    a: int\n    b: int\n"
    model = Asker(tmp_path, f"{code}def f(x: {hint}, y: int = 1) -> Any: return x")
    assert model.form(*(("x", part) for part in parts)) == value


@pytest.mark.parametrize("base", ["TypedDict", "NamedTuple"])
def test_types_that_contain_themselves(tmp_path: Path, base: str) -> None:
    code = f"""
    from typing import NamedTuple
    class Node({base}):
        size: int
        inner: "list[Node]"
    def f(node: Node, more: int = 0) -> Node: return node
    """
    node: Any = {"size": 1, "inner": [{"size": 2, "inner": []}]}
    if base == "NamedTuple":
        node = [1, [[2, []]]]
    assert Asker(tmp_path, code).ask({"node": node}) == node


def test_batched_above_a_class(tmp_path: Path) -> None:
    code = """
    @batched(max_size=4)
    class F:
        def predict(self, x: list[int]) -> list[int]: return x
    """
    model = Asker(tmp_path, code)
    assert (model.spec.max_batch_size, model.backend.batching) == (4, BatchForm.LISTED)


def test_streams(tmp_path: Path) -> None:
    code = "def f(n: int) -> Iterator[int]: yield from range(n)"
    model = Asker(tmp_path, code)
    assert model.spec.decoupled
    text = np.array([b'{"n": 2}'], object)
    sent = ask_stream(model.backend, model.spec, json=text).sent
    assert [arrays(answer)["json"][0] for answer in sent if answer.outputs] == [b"0", b"1"]
    errors = ask_stream(model.backend, model.spec, json=np.array([b"{}"], object)).errors
    assert "field `n`" in errors[0].message


def test_batches(tmp_path: Path) -> None:
    code = """
    @batched(max_size=8, delay_ms=1)
    def f(x: list[int], y: list[int | None]) -> list[list[int | None]]:
        if 99 in x:
            return []
        if 98 in x:
            return [object() if a == 98 else a for a in x]
        return [[a, b, len(x)] for a, b in zip(x, y)]
    """
    model = Asker(tmp_path, code)
    assert (model.spec.max_batch_size, model.spec.inputs[0].shape) == (8, (-1, 1))
    assert model.backend.batching is BatchForm.LISTED
    assert model.schemas.body["properties"]["x"] == {"type": "integer"}

    def asked(*bodies: str) -> list[Any]:
        requests = [
            FakeBackendRequest(("json",), json=np.array([[text.encode()]], object))
            for text in bodies
        ]
        answers = model.backend.execute(requests)
        return [a.error or json.loads(arrays(a)["json"][0, 0]) for a in answers]

    first, wrong, last = asked('{"x": 1, "y": 5}', '{"x": "a", "y": 5}', '{"x": 2, "y": null}')
    assert (first, last) == ([1, 5, 2], [2, None, 2])
    assert isinstance(wrong, InvalidArgument)
    assert [type(error) for error in asked("[]", "{}")] == [InvalidArgument] * 2
    with pytest.raises(ShmserveError, match="must return a list of 1 answers"):
        asked('{"x": 99, "y": 1}')
    without_json, good = asked('{"x": 98, "y": 1}', '{"x": 1, "y": 1}')
    assert (type(without_json), good) == (Internal, 1)
    two = FakeBackendRequest(("json",), json=np.array([[b"{}"], [b"{}"]], object))
    (answer,) = model.backend.execute([two])
    assert "2 bodies: send one" in failure(answer).message


def test_a_request_that_a_batched_function_refuses_fails_alone(tmp_path: Path) -> None:
    code = """
    from shmserve.errors import InvalidArgument
    @batched(max_size=8)
    def f(x: list[int]) -> list[int]:
        if 99 in x:
            raise InvalidArgument("99 is too large")
        if x == [98]:
            {}[0]
        return x
    """
    model = Asker(tmp_path, code)

    def asked(*values: int) -> list[Any]:
        bodies = [np.array([[json.dumps({"x": x}).encode()]], object) for x in values]
        answers = model.backend.execute([FakeBackendRequest(("json",), json=b) for b in bodies])
        return [
            a.error.message if a.error else json.loads(arrays(a)["json"][0, 0]) for a in answers
        ]

    assert asked(1, 99, 2, 98) == [1, "99 is too large", 2, "KeyError: 0"]
    with pytest.raises(InvalidArgument, match="99"):
        asked(99)


def test_a_request_whose_type_tries_to_exit_fails_alone(tmp_path: Path) -> None:
    code = """
    @dataclass
    class A:
        x: int
        def __post_init__(self):
            if self.x > 1: raise SystemExit(self.x)
    @batched(max_size=8)
    def f(a: list[A]) -> list[int]: return [one.x for one in a]
    """
    model = Asker(tmp_path, code)
    bodies = [np.array([[text]], object) for text in (b'{"x": 1}', b'{"x": 2}')]
    good, bad = model.backend.execute([FakeBackendRequest(("json",), json=b) for b in bodies])
    assert arrays(good)["json"].tolist() == [[b"1"]]
    assert failure(bad).message == "SystemExit: 2"


def test_the_request_beside_values(tmp_path: Path) -> None:
    model = Asker(tmp_path, "def f(n: int, request: ModelRequest) -> Any: return [n, request.id]")
    assert model.ask({"n": 3}) == [3, "request-1"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "class A: pass\ndef f(x: A) -> int: ...",
            r"argument 'x': JSON has no form for a hint \(unknown type A\): write plain types",
        ),
        ("def f(x: int) -> object: ...", "the answer: JSON has no form for a hint"),
        ("def f(x: int | str | list[int] | list[str]) -> int: ...", "JSON has no form for a hint"),
        ("@batched(4)\ndef f(x: int) -> list[int]: ...", r"'x' of a batched .*: write list\[int\]"),
        ("@batched(4)\ndef f(x: list[int]) -> str: ...", r"the answer of a batched .* list\[str\]"),
        ("@batched(4)\ndef f(x: list[int]) -> Iterator[list[int]]: ...", "with one answer"),
        (
            "@batched(4)\ndef f(x: list) -> list[int]: ...",
            r"'x' of a batched .*: write list\[str\]",
        ),
        ("import typing\ndef f() -> typing.Iterator: ...", "f yields unknown answers: write"),
    ],
)
def test_hints_that_json_cannot_carry(tmp_path: Path, code: str, reason: str) -> None:
    with pytest.raises(ShmserveError, match=reason) as caught:
        Asker(tmp_path, code)
    assert isinstance(caught.value, ConfigError)


def test_schemas_that_are_too_large_or_nonsense() -> None:
    large = json_calls.JsonCallSchemas("s", {"x": "y" * json_calls.MAX_SCHEMA_BYTES}, files=("f",))
    text = json_calls.encode_schemas(large)
    assert json_calls.decode_schemas(text) == json_calls.JsonCallSchemas(files=("f",))
    assert json_calls.decode_schemas("{") == json_calls.JsonCallSchemas()


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ('{"body":{"anyOf":[{"$ref":"#/A"}]},"components":{"A":{"anyOf":[{"$ref":"#/A"}]}}}', None),
        ('{"body":{"properties":[1],"required":["a"]}}', {}),
        ('{"body":{"type":[1]}}', {}),
        ('{"body":{"$ref":"x"},"components":{"x":5}}', {}),
        ('{"body":{"enum":{"a":1}}}', {}),
    ],
)
def test_samples_of_odd_schemas(text: str, body: Any) -> None:
    assert json_calls.sample(json_calls.decode_schemas(text)) == body
