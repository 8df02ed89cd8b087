"""Access control: each cell of the table, and the origin that a request claims."""

from typing import Any

import pytest
from msgspec.structs import replace

from shmserve import errors
from shmserve.config import Settings
from shmserve.core.access import ACTIONS, Access, Action
from shmserve.core.caller import Caller
from shmserve.frontends.oip.origins import ACTION_OF, Origins
from shmserve.frontends.oip.restricted_apis import CATEGORIES
from tests.unit.http_client import Client

SERVER = 1000
CALLERS = {
    "owner": Caller(SERVER),
    "root": Caller(0),
    "local": Caller(1001),
    "nobody": Caller(65534),
    "remote": Caller(),
}
HERE = ("127.0.0.1:8000", "[::1]:8000", "localhost:8000", "unix:/run/s.sock")

# settings, and for each action the callers that are allowed
TABLE: list[tuple[dict[str, Any], dict[Action, str]]] = [
    (
        {},
        {
            "use": "owner root local nobody remote",
            "register": "owner root local nobody",
            "change": "owner root local nobody remote",
            "send models": "owner root",
        },
    ),
    ({"client_shm_allow_remote": True}, {"register": "owner root local nobody remote"}),
    ({"state_changes_from": "owner"}, {"change": "owner root", "send models": "owner root"}),
    ({"state_changes_from": "local"}, {"change": "owner root local nobody"}),
    ({"model_files_from": "local"}, {"send models": "owner root local nobody"}),
    ({"model_files_from": "anyone"}, {"send models": "owner root local nobody remote"}),
]


ALL = "owner root local nobody remote"
KEYED = {"nobody": ALL, "remote": "owner root local nobody", "local": "owner root", "anyone": ""}


@pytest.mark.parametrize("who", CALLERS)
@pytest.mark.parametrize("required", KEYED)
def test_the_table_with_keys(required: Any, who: str) -> None:
    access = Access(Settings(keys_file="/k", keys_required_from=required), SERVER)
    for action in ACTIONS:
        without = who in KEYED[required].split() and who in TABLE[0][1][action].split()
        caller = CALLERS[who]
        if without:
            access.check(action, caller)
        else:
            text = f"a key with the scope '{action}'; %s: send a key as"
            with pytest.raises(errors.Unauthenticated, match=text % "no key was sent"):
                access.check(action, caller)
            with pytest.raises(
                errors.Unauthenticated, match=text % "the key sent is unknown or expired"
            ):
                access.check(action, replace(caller, key_refused=True))
        access.check(action, replace(caller, scopes=(action,)))
        other = replace(caller, scopes=tuple(a for a in ACTIONS if a != action))
        if not without:
            with pytest.raises(errors.PermissionDenied, match=f"a key with the scope '{action}'"):
                access.check(action, other)
        assert access.asked_at_the_door(action) == (
            "remote" not in KEYED[required].split() or "remote" not in TABLE[0][1][action].split()
        )


@pytest.mark.parametrize("who", CALLERS)
@pytest.mark.parametrize(("settings", "expected"), TABLE)
def test_the_table(settings: dict[str, Any], expected: dict[Action, str], who: str) -> None:
    access = Access(Settings(**settings), SERVER)
    for action, allowed in expected.items():
        assert _passes(access.check, action, CALLERS[who]) == (who in allowed.split())
        assert access.open_to_all(action) == ("remote" in allowed)


def test_a_refusal_names_its_setting() -> None:
    words = r"is for .* own user on its host \(setting model_files_from\)"
    with pytest.raises(errors.PermissionDenied, match=words):
        Access(Settings(), SERVER).check("send models", CALLERS["local"])


def test_every_category_has_an_action() -> None:
    assert set(ACTION_OF) == set(CATEGORIES)
    assert set(ACTION_OF.values()) <= set(ACTIONS)


@pytest.mark.parametrize(
    ("host", "here", "elsewhere"),
    [
        *((name, True, True) for name in ("localhost", "LOCALHOST:8000", "localhost.", "box:1")),
        *((name, True, True) for name in ("127.0.0.1", "127.0.0.1:80", "127.1.2.3", "[::1]:9")),
        *((name, True, True) for name in ("box.lan", "Box.LAN:8000")),
        *((name, False, True) for name in ("evil.example", "localhost.evil.example", "10.0.0.1")),
        *((name, False, True) for name in ("0.0.0.0", "localhos", "[2001:db8::1]:80", "xbox")),
        *((name, False, False) for name in ("", "a b", "localhost,evil.example", "a/b", "[::1")),
    ],
)
def test_hosts(host: str, here: bool, elsewhere: bool) -> None:
    assert _passes(Origins(Settings(), HERE, "Box.lan").check_host, host) == here
    for bind in ("0.0.0.0:8000", ":8000", "[::]:80", "fd://3", "10.0.0.1:80", "box.lan:80"):
        assert _passes(Origins(Settings(), (*HERE, bind), "box").check_host, host) == elsewhere


def test_hosts_that_are_set() -> None:
    check = Origins(Settings(allowed_hosts=("Models.Example", "::1")), HERE, "box").check_host
    for host in ("models.example:443", "[::1]"):
        check(host)
    for host in ("localhost", "box", "127.0.0.1", "x.models.example"):
        words = r"header Host: .* \(setting allowed_hosts\)"
        with pytest.raises(errors.PermissionDenied, match=words):
            check(host)
    Origins(Settings(allowed_hosts=("*",)), HERE, "box").check_host("anything.example")


@pytest.mark.parametrize(
    ("origin", "site", "passes"),
    [
        ("", "", True),  # a program
        ("http://localhost:8000", "", True),
        ("http://localhost:8000", "same-origin", True),
        ("https://proxied.example", "same-origin", True),  # the browser says so
        ("", "same-origin", True),
        ("", "none", True),  # typed, or a bookmark
        ("https://tool.example", "cross-site", True),  # listed
        ("https://tool.example", "", True),
        ("http://tool.example", "", False),
        ("https://localhost:8000", "", False),
        ("http://localhost", "", False),
        ("http://localhost:3000", "same-site", False),
        ("http://evil.example", "", False),
        ("http://evil.example", "cross-site", False),
        ("null", "", False),
        ("null", "cross-site", False),
        ("", "cross-site", False),
        ("", "same-site", False),
        ("", "whatever", False),
    ],
)
def test_pages(origin: str, site: str, passes: bool) -> None:
    origins = Origins(Settings(allowed_origins=("https://tool.example",)), HERE, "box")
    assert _passes(origins.check_page, "localhost:8000", origin, site) == passes


def _passes(check: Any, *arguments: Any) -> bool:
    try:
        check(*arguments)
    except (errors.InvalidArgument, errors.PermissionDenied):
        return False
    return True


# ----------------------------------------------------------------------------- over HTTP

CROSS = {"Host": "localhost", "Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
EVERYTHING = [
    ("GET", "/v2"),
    ("GET", "/metrics"),
    ("GET", "/v2/models/identity"),
    ("POST", "/v2/models/identity/infer"),
    ("POST", "/v2/systemsharedmemory/region/r/register"),
    ("POST", "/v2/logging"),
    ("POST", "/v2/repository/models/m/load"),
    ("POST", "/v2/repository/models/m/unload"),
    ("GET", "/grps/v1/health/offline"),
    ("POST", "/grps/v1/infer/predict"),
    ("GET", "/"),
    ("OPTIONS", "/v2"),
    ("GET", "/no/such/path"),
]


@pytest.mark.parametrize(("method", "path"), EVERYTHING)
def test_a_page_elsewhere_may_nothing(method: str, path: str) -> None:
    client = Client(Settings(model_control="explicit"))
    for kind in ("text/plain", "application/json", None):
        answer = client.ask(method, path, b"{}", CROSS, CONTENT_TYPE=kind)
        assert answer.status == 403
        assert "http://evil.example" in answer.body.decode()
    assert client.ask(method, path, b"{}", {"Host": "evil.example"}).status == 403
    assert client.dispatcher.coordinator.unloads == client.dispatcher.coordinator.loads == []


def test_the_same_marks_are_looked_at_each_time() -> None:
    client = Client()
    for _ in range(3):
        assert client.get("/v2", headers={"Host": "localhost"}).status == 200
        assert client.get("/v2", headers=CROSS).status == 403
        assert client.get("/v2", headers={"Host": "localhost", "Origin": "null"}).status == 403
    for number in range(600):  # each number has a distinct name, and no name is kept for ever
        assert client.get("/v2", headers={"Host": f"127.0.0.1:{number}"}).status == 200


ANY = {"Host": "0.0.0.0:8000"}
CHANGES = [
    ("GET", "/grps/v1/health/offline"),
    ("HEAD", "/grps/v1/health/online"),
    ("POST", "/grps/v1/health/offline"),
    ("POST", "/v2/logging"),
    ("POST", "/v2/repository/models/m/unload"),
    ("POST", "/v2/systemsharedmemory/region/r/register"),
]
READS = [
    ("GET", "/v2"),
    ("GET", "/metrics"),
    ("GET", "/grps/v1/health/ready"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/models/identity/infer"),
    ("GET", "/no/such/path"),
]


def test_programs_of_this_host_may_call_it_by_any_address() -> None:
    """Browsers send such a GET of a foreign page without `Origin` and `Sec-Fetch-Site`."""
    client = Client(Settings(model_control="explicit"))
    near: Any = {"REMOTE_ADDR": "127.0.0.1"}
    for _ in range(2):  # no admitted request opens the way for another request
        for method, path in READS:
            assert client.ask(method, path, b"{}", ANY, **near).status != 403, path
            for far in ({"REMOTE_ADDR": "10.0.0.1"}, {}):
                assert client.ask(method, path, b"{}", ANY, **far).status == 403, path
            page = ANY | {"Origin": "http://evil.example"}
            assert client.ask(method, path, b"{}", page, **near).status == 403, path
        for method, path in CHANGES:
            assert client.ask(method, path, b"{}", ANY, **near).status == 403, path
    named = Client(Settings(model_control="explicit", allowed_hosts=("0.0.0.0", "127.0.0.1")))
    other = Client(Settings(model_control="explicit", allowed_hosts=("box",)))
    for method, path in CHANGES:
        assert named.ask(method, path, b"{}", ANY, **near).status != 403, path
        assert other.ask(method, path, b"{}", ANY, **near).status == 403, path
    assert other.get("/v2", headers=ANY, **near).status == 200


def test_no_host_over_tcp() -> None:
    client = Client()
    refused = client.get("/v2", REMOTE_PORT="5")
    assert (refused.status, refused.json) == (400, {"error": "header Host is missing"})
    assert client.get("/v2", REMOTE_PORT="5", SERVER_PROTOCOL="HTTP/1.0").status == 200
    assert client.get("/v2").status == 200  # a Unix socket's


def test_a_link_leads_to_a_page_and_nowhere_else() -> None:
    client = Client()
    link = {"Host": "localhost", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    window = link | {"Sec-Fetch-Dest": "document"}
    for path in ("/", "/grps/v1/monitor/metrics"):
        assert client.get(path, headers=window).status == 200
        assert client.get(path, headers=link | {"Sec-Fetch-Dest": "iframe"}).status == 403
        assert client.ask("POST", path, b"", window).status == 403
    for path in ("/v2", "/grps/v1/health/offline", "/metrics"):
        assert client.get(path, headers=window).status == 403


def test_a_listed_page_reads_the_answer() -> None:
    client = Client(Settings(allowed_origins=("https://tool.example",)))
    marks = {"Host": "localhost", "Origin": "https://tool.example", "Sec-Fetch-Site": "cross-site"}
    for _ in range(2):
        answer = client.get("/v2", headers=marks)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "https://tool.example"
        assert answer.headers["vary"] == "Origin"
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"shmserve-receipt", "X-Request-ID", "Retry-After"} <= set(exposed)
    ahead = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    answer = client.ask("OPTIONS", "/v2/models/identity/infer", b"", marks | ahead)
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["access-control-allow-headers"] == "x-a"
    assert "access-control-allow-origin" not in client.get("/v2").headers


@pytest.mark.parametrize("who", ["owner", "anyone"])
def test_changes_by_those_who_may(who: Any) -> None:
    """The fake's callers are remote callers."""
    client = Client(Settings(model_control="explicit", state_changes_from=who))
    for method, path in (
        ("POST", "/v2/logging"),
        ("POST", "/v2/trace/setting"),
        ("POST", "/v2/repository/models/m/load"),
        ("POST", "/v2/repository/models/m/unload"),
        ("GET", "/grps/v1/health/online"),
        ("POST", "/grps/v1/health/offline"),
    ):
        answer = client.ask(method, path, b"{}")
        assert (answer.status == 403) == (who == "owner"), path
        assert who == "anyone" or b"state_changes_from" in answer.body
    for method, path in (
        ("GET", "/v2/logging"),
        ("GET", "/v2/trace/setting"),
        ("POST", "/v2/repository/index"),
        ("GET", "/grps/v1/health/ready"),
        ("GET", "/v2/models/identity"),
    ):
        assert client.ask(method, path).status != 403, path


def test_origins_are_checked_at_the_start() -> None:
    from shmserve.config import load

    assert load({"SHMSERVE_ALLOWED_HOSTS": "a, b"}).allowed_hosts == ("a", "b")
    assert load({"SHMSERVE_ALLOWED_ORIGINS": "https://a:1"}).allowed_origins == ("https://a:1",)
    for bad in ("tool.example", "https://tool.example/", "*"):
        with pytest.raises(errors.ConfigError, match="allowed_origins"):
            load({"SHMSERVE_ALLOWED_ORIGINS": bad})
    for setting in ("MODEL_FILES_FROM", "STATE_CHANGES_FROM"):
        with pytest.raises(errors.ShmserveError):
            load({f"SHMSERVE_{setting}": "everybody"})
