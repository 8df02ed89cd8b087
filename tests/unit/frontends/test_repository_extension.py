"""The model repository extension without processes: checks, index, restrictions, forwarding."""

import base64
import json
import os
from typing import Any

import pytest
from falcon import testing
from msgspec.structs import replace

from shmserve.config import Settings, load
from shmserve.core.access import Access
from shmserve.core.caller import Caller
from shmserve.core.registry import ModelState
from shmserve.errors import ConfigError, InvalidArgument, NotFound, PermissionDenied, Unavailable
from shmserve.frontends.http.error_handlers import ErrorHandlers
from shmserve.frontends.http.origin_check import OriginCheck
from shmserve.frontends.http.restricted_api import Guard
from shmserve.frontends.http.route_table import App, Routes
from shmserve.frontends.oip.forwarded_fields import compiled, forwarded
from shmserve.frontends.oip.origins import Origins
from shmserve.frontends.oip.repository import IndexRow, Repository
from shmserve.frontends.oip.restricted_apis import CATEGORIES, Restricted, check_settings
from shmserve.frontends.presented_keys import PresentedKeys
from tests import fake_models
from tests.fake_dispatch import FakeDispatcher
from tests.unit.http_client import Answer, Client, as_json, error_of

EXPLICIT = Settings(model_control="explicit", max_override_bytes=100)


ME = Caller(os.geteuid())


def caller() -> Caller:
    """The caller that loads models in these tests."""
    return ME


@pytest.fixture
def dispatcher():
    return fake_models.dispatcher()


@pytest.fixture
def repository(dispatcher):
    return Repository(dispatcher, EXPLICIT, Access(EXPLICIT, ME.uid))


# --------------------------------------------------------------------------- load, unload


def test_a_load_is_passed_on(repository: Repository, dispatcher: FakeDispatcher) -> None:
    repository.load("m", {}, caller)
    repository.load("m", {"config": "{}", "file:1/a b.bin": b"x"}, caller)
    repository.unload("m")
    assert dispatcher.coordinator.loads == [("m", None, {}), ("m", "{}", {"1/a b.bin": b"x"})]
    assert dispatcher.coordinator.unloads == ["m"]


@pytest.mark.parametrize("name", ["..", ".", "...", "a..b", "a/b", "../m", "a\\b", "$/x"])
def test_a_name_that_leads_elsewhere_is_refused(repository: Repository, name: Any) -> None:
    for act in (lambda: repository.load(name, {}, caller), lambda: repository.unload(name)):
        with pytest.raises(InvalidArgument, match="must not contain path traversal characters"):
            act()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (".git", "it begins with '.', and names begin with a letter"),
        ("-m", "it begins with '-'"),
        ("$(x)", r"it has '\$', and names have letters, digits and _ \. \+ - only"),
        ("a\0b", r"it has '\\x00'"),
        ("m\udcff", r"it has '\\udcff'"),
        ("mod\u00e8le", r"it has '\\xe8'"),
        ("x" * 256, "it has 256 characters, and names have at most 255"),
    ],
)
def test_what_is_wrong_with_a_name_is_told(repository: Repository, name: Any, part: str) -> None:
    for act in (lambda: repository.load(name, {}, caller), lambda: repository.unload(name)):
        with pytest.raises(InvalidArgument, match=f"^invalid model name '.*', {part}") as caught:
            act()
        assert "traversal" not in caught.value.message


def test_an_unknown_model_is_unloaded_already(repository, dispatcher) -> None:
    repository.unload("a.b_+-.c")
    assert dispatcher.coordinator.unloads == ["a.b_+-.c"]


@pytest.mark.parametrize("name", ["", "  ", "\t"])
def test_a_name_must_be_given(repository: Repository, name: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot be empty"):
        repository.load(name, {}, caller)


@pytest.mark.parametrize(
    "path",
    [
        *("", "//etc/x", "/../x", "../x", "1/../../x", "1//x", "1/.", "1/", "a\\b", "a\0"),
        *("1/" + "x" * 256, "/".join("abcdefghi")),
    ],
)
def test_a_file_stays_inside_the_model(repository: Repository, path: str) -> None:
    with pytest.raises(InvalidArgument, match="must be relative and stay inside"):
        repository.load("m", {"config": "{}", f"file:{path}": b""}, caller)


def test_a_slash_before_the_path_of_a_file_is_ignored(repository, dispatcher) -> None:
    repository.load("m", {"config": "{}", "file:/1/model.py": b"x"}, caller)
    assert dispatcher.coordinator.loads == [("m", "{}", {"1/model.py": b"x"})]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"config": "{}", "file:/1/x": b"", "file:1/x": b""}, "'file:1/x': file '1/x' is given tw"),
        ({"file:1/x": b""}, "'config' is missing"),
        ({"config": 3}, "'config' must be a string"),
        ({"config": "{}", "file:1/x": "text"}, "must be the file's content"),
        ({"foo": "x"}, "unexpected parameter 'foo'"),
        ({"config": "{}", **{f"file:{n}": b"" for n in range(65)}}, "more than 64 files"),
        ({"config": "{}", "file:1/x": b"x" * 101}, "more than 100 bytes"),
        ({"config": "x" * (1 << 20) + "x"}, "'config' has more than"),
    ],
)
def test_overrides_are_checked(repository, dispatcher, parameters, text) -> None:
    with pytest.raises(InvalidArgument, match=text):
        repository.load("m", parameters, caller)
    assert dispatcher.coordinator.loads == []


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_without_explicit_control_nothing_is_loaded(dispatcher: FakeDispatcher, mode: Any) -> None:
    settings = Settings(model_control=mode)
    repository = Repository(dispatcher, settings, Access(settings, ME.uid))  # type: ignore[arg-type]
    for act in (lambda: repository.load("m", {}, caller), lambda: repository.unload("m")):
        with pytest.raises(Unavailable, match="explicit model load / unload is not allowed"):
            act()


# ------------------------------------------------------------------------------- index


def test_the_index_has_every_state(repository: Repository, dispatcher: FakeDispatcher) -> None:
    spec = dispatcher.entries["identity"]["1"].spec
    dispatcher.entries = {}
    dispatcher.put(spec, ModelState.READY)
    dispatcher.refused_models = {"identity/2": "no weights", "worse": "line 3"}
    dispatcher.coordinator.in_repository = ["identity", "never", "worse"]
    assert repository.index() == [
        IndexRow("identity", "1", "READY"),
        IndexRow("identity", "2", "UNAVAILABLE", "no weights"),
        IndexRow("never"),
        IndexRow("worse", "", "UNAVAILABLE", "line 3"),
    ]
    assert repository.index(ready_only=True) == [IndexRow("identity", "1", "READY")]


def test_over_http() -> None:
    client = Client(replace(EXPLICIT, model_files_from="anyone"))
    dispatcher = client.dispatcher

    def post(path: str, document: Any = None) -> Answer:
        body = b"" if document is None else json.dumps(document).encode()
        return client.ask("POST", f"/v2/repository/{path}", body)

    assert {row["state"] for row in post("index").json} == {"READY"}
    assert post("index", {"ready": 1}).status == 400
    assert post("index", []).status == 400
    assert post("other/index").status == 501
    assert post("other/models/m/load").status == 501
    assert post("models/m/load", {"parameters": []}).status == 400
    document = {"parameters": {"config": "{}", "file:1/x": base64.b64encode(b"\0\1").decode()}}
    assert post("models/m/load", document).status == 200
    assert dispatcher.coordinator.loads == [("m", "{}", {"1/x": b"\0\1"})]
    document["parameters"]["file:1/x"] = "%%%"
    assert post("models/m/load", document).status == 400
    document["parameters"]["file:1/x"] = "A" * (8 << 20)
    assert post("models/m/load", document).status == 413
    for dependents, status in ((1, 400), (True, 200)):
        asked = {"parameters": {"unload_dependents": dependents}}
        assert post("models/m/unload", asked).status == status
    assert dispatcher.coordinator.unloaded_dependents == [True]
    dispatcher.coordinator.refusal = NotFound("failed to load 'm'")
    assert post("models/m/load").json == {"error": "failed to load 'm'"}


# -------------------------------------------------------------------------- restrictions


RULES = ("model-repository, shared-memory:x-admin=s=cret", "health:x-probe=p")


def test_a_category_wants_its_header() -> None:
    restricted = Restricted(RULES)
    restricted.check("inference", {})
    restricted.check("shared-memory", {"x-admin": "s=cret"})
    for headers in ({}, {"x-admin": "s"}, {"x-admin": "s=cret "}, {"x-probe": "s=cret"}):
        with pytest.raises(PermissionDenied, match="restricted, expecting header 'x-admin'"):
            restricted.check("model-repository", headers)
    assert not Restricted(())


def test_over_grpc_the_header_has_a_prefix_and_the_answer_is_unavailable() -> None:
    restricted = Restricted(("inference:Key=v",), grpc=True)
    restricted.check("inference", {"triton-grpc-protocol-key": "v"})
    with pytest.raises(Unavailable, match="This protocol is restricted, expecting header"):
        restricted.check("inference", {"key": "v"})


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (("health",), "item 1 is not"),
        (("health:secret",), "item 1 is not"),
        (("health:=secret",), "item 1 is not"),
        (("health:key=",), "item 1 is not"),
        (("healthy:key=secret",), "unknown restricted api 'healthy'"),
        (("health:a=secret", "health:b=secret"), "api 'health' can not be specified in multiple"),
    ],
)
def test_rules_that_make_no_sense_are_refused_without_their_secret(rules: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        Restricted(rules)
    assert "secret" not in caught.value.message


def test_rules_come_from_the_environment_separated_by_semicolons() -> None:
    settings = load({"SHMSERVE_HTTP_RESTRICTED_API": "health,metadata:a=b; trace:c=d,e"})
    assert settings.http_restricted_api == ("health,metadata:a=b", "trace:c=d,e")


@pytest.mark.parametrize(
    ("path", "category"),
    [
        ("/v2", "metadata"),
        ("/v2/models/identity", "metadata"),
        ("/v2/models/identity/versions/1", "metadata"),
        ("/v2/health/live", "health"),
        ("/v2/models/identity/ready", "health"),
        ("/v2/models/identity/versions/1/infer", "inference"),
        ("/v2/models/identity/generate_stream", "inference"),
        ("/v2/models/identity/config", "model-config"),
        ("/v2/models/stats", "statistics"),
        ("/v2/models/identity/trace/setting", "trace"),
        ("/v2/logging", "logging"),
        ("/v2/repository/index", "model-repository"),
        ("/v2/repository/models/identity/load", "model-repository"),
        ("/v2/cudasharedmemory/region/r/register", "shared-memory"),
    ],
)
def test_every_route_has_a_category(path: str, category: str) -> None:
    client = Client(Settings(http_restricted_api=(f"{category}:key=secret",)))
    assert client.get(path).status == 403
    assert client.get(path, headers={"key": "secret"}).status != 403
    others = ",".join(other for other in CATEGORIES if other != category)
    assert Client(Settings(http_restricted_api=(f"{others}:key=secret",))).get(path).status != 403


def test_a_route_without_a_category_is_refused_at_start() -> None:
    settings = Settings()
    guard = Guard(Restricted(()), Access(settings, ME.uid), PresentedKeys(settings, print))
    app = App(middleware=[guard])
    errors = ErrorHandlers(fake_models.dispatcher(), guard.infers)  # type: ignore[arg-type]
    routes = Routes(app, guard, OriginCheck(Origins(settings, (), ""), print), errors)
    with pytest.raises(ValueError, match="route /a has no category of the restricted APIs"):
        routes.add("admin", "/a", object())  # type: ignore[arg-type]
    routes.add("health", "/b", object())
    routes.finish()
    app.add_route("/c/{name}", object())
    with pytest.raises(ValueError, match=r"route /c/\{name\} has no category"):
        routes.finish()
    assert testing.simulate_get(app, "/b").status_code == 405
    assert testing.simulate_get(app, "/c/x").status_code == 500  # unknown: closed


def test_restrictions_over_http() -> None:
    settings = Settings(model_control="explicit", http_restricted_api=RULES)
    client = Client(settings)
    refused = error_of(client.ask("POST", "/v2/repository/index", b""), 403)
    assert refused == "This API is restricted, expecting header 'x-admin'"
    assert client.ask("POST", "/v2/repository/index", b"", {"X-Admin": "s=cret"}).status == 200
    assert client.get("/v2/health/live").status == 403
    assert client.get("/v2/models/identity").status == 200


# ----------------------------------------------------------------------------- forwarding


def test_headers_become_parameters() -> None:
    client = Client(Settings(http_header_forward_pattern="^x-user|TRACE"))
    asked = {"inputs": [as_json([1])], "parameters": {"x-user": "forged", "own": 1}}
    answer = client.infer(asked, headers={"X-User": "me", "Trace-Id": "7", "Other": "no"})
    assert answer.status == 200, answer.body
    assert client.request.parameters == {"x-user": "me", "own": 1, "trace-id": "7"}


@pytest.mark.parametrize("key", ["priority", "triton-x", "sequence-id"])
def test_reserved_parameters_are_not_forwarded(key: str) -> None:
    with pytest.raises(InvalidArgument, match="reserved for Triton usage"):
        forwarded(compiled(".*"), [(key, "1")])


def test_a_pattern_must_be_one() -> None:
    assert compiled("") is None
    patterns = {"http_header_forward_pattern": "^x-", "grpc_header_forward_pattern": "(?-i)X"}
    check_settings(Settings(**patterns))  # type: ignore[arg-type]
    for name in ("http_header_forward_pattern", "grpc_header_forward_pattern"):
        with pytest.raises(ConfigError, match=name):
            check_settings(Settings(**{name: "("}))  # type: ignore[arg-type]
