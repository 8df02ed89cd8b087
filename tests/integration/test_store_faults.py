"""Stores of all kinds: slow, silent or endless answers, refusals, redirects elsewhere."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_store import SECRET
from tests.integration.test_fetching import Fetcher, Program
from tests.running_server import wait_until
from tests.store_stand_in import Answer, StandIn, begin

pytestmark = pytest.mark.needs("remote")
KINDS = ("s3", "gs", "az", "hf")
LARGE = "prod/m/1/weights"
FILES = {"prod/m/config.pbtxt": b"", "prod/m/1/model.py": b"one" * 1000, LARGE: b"w" * 300_000}
_PIECES = 8


class Place:
    """Stand-in of a store, and a fetcher process with a good model."""

    def __init__(
        self, kind: str, folder: Path, silence_s: float = 2.0, timeout_s: float = 60.0
    ) -> None:
        self.store = StandIn(kind)
        self.program = Program(folder / "log", "", **self.store.environ())
        limits = {"repository_silence_s": silence_s, "repository_timeout_s": timeout_s}
        self.fetcher = Fetcher(self.program, self.store.url, folder / "cache", **limits)
        self.store.objects = dict(FILES)

    def on(self, what: str, end: str, act: Any) -> None:
        """Have `act` make the answers to `what` for keys with an end, of handler and answer."""

        def fault(
            asked: str, key: str, handler: BaseHTTPRequestHandler, answer: Answer
        ) -> Answer | None:
            found: Answer | None = answer
            if asked == what and key.endswith(end):
                found = act(handler, answer)
            return found

        self.store.fault = fault

    def told(self) -> str:
        """Run a round, and return all problems."""
        self.fetcher.ask("*")
        problems, unlisted = self.fetcher.answer()
        return " ".join([*problems.values(), *unlisted])

    def files(self) -> dict[str, bytes]:
        return {f"prod/m/{path}": data for path, data in self.fetcher.files("m").items()}

    def close(self) -> None:
        self.program.end()
        self.store.close()


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Place]:
    made = Place("hf", tmp_path, timeout_s=8.0)
    yield made
    made.close()


def silent(handler: BaseHTTPRequestHandler, _: Answer) -> None:
    """Answer nothing until the client has gone."""
    handler.connection.settimeout(60)
    handler.rfile.read(1)
    handler.close_connection = True


def slow(bytes_per_s: float) -> Any:
    def act(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        body = answer[2]
        begin(handler, answer)
        size = len(body) // _PIECES + 1
        for start in range(0, len(body), size):
            time.sleep(size / bytes_per_s)
            handler.wfile.write(body[start : start + size])

    return act


def test_a_good_store_is_fetched(place: Place) -> None:
    assert place.told() == ""
    assert place.files() == FILES


def test_a_listing_that_never_comes_is_given_up(place: Place) -> None:
    assert place.told() == ""
    place.on("list", "", silent)
    assert "the store does not answer in time" in place.told()
    assert place.files() == FILES
    place.store.fault = None
    assert place.told() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_store_is_not_a_silent_one(kind: str, tmp_path: Path) -> None:
    """Bytes come all the time, and the whole takes longer than silence may."""
    place = Place(kind, tmp_path)
    try:
        assert place.told() == ""  # libraries are slower at first
        content = bytes(52 << 20 if kind == "s3" else 3 << 20)  # s3fs takes 50 MiB in one piece
        place.store.objects[LARGE] = content
        place.on("get", LARGE, slow(len(content) / 4.0))
        assert place.told() == ""
        assert place.files()[LARGE] == content
    finally:
        place.close()


def test_a_file_with_the_name_of_a_folder_is_told(place: Place) -> None:
    assert place.told() == ""
    place.store.objects["prod/m/1/model.py/inner"] = b"x"
    text = place.told()
    if place.store.kind != "hf":  # whose folders are Git's
        assert text == "'1/model.py' is both a file and a folder"
        assert place.files() == FILES


def test_files_of_models_that_never_came_do_not_pile_up(tmp_path: Path) -> None:
    place = Place("s3", tmp_path)
    incoming = tmp_path / "cache/incoming"
    try:
        place.on("get", LARGE, refusal("s3", 403))
        for number in range(3):
            place.store.objects["prod/m/1/model.py"] = b"%d" % number
            assert "refuses access" in place.told()
            assert len(list(incoming.glob("*.lock"))) == 1
        place.store.objects = {"prod/other/1/model.py": b""}
        assert place.told() == ""
        assert list(incoming.iterdir()) == []
    finally:
        place.close()


STATUSES = {
    401: "the store refuses access, or has been shown no credentials",
    403: "the store refuses access, or has been shown no credentials",
    404: "it is not there",
    400: "the store answers with status 400",
}


def test_a_refusal_is_told_in_words(place: Place) -> None:
    for status, words in STATUSES.items():
        for what, about in (("get", "file '1/weights'"), ("list", place.store.url)):
            place.on(what, LARGE if what == "get" else "", refusal(place.store.kind, status))
            assert f"{about}: {words}" in place.told()


def refusal(kind: str, status: int) -> Any:
    """Return an act that answers with a status and an error whose code no library knows."""
    text = {"s3": "<Error><Code>Odd</Code></Error>", "az": "<Error><Code>Odd</Code></Error>"}
    body = text.get(kind, f'{{"error": {{"code": {status}, "message": "odd"}}}}').encode()
    return lambda _, answer: (status, {}, body)


def test_a_file_that_drips_ends_at_the_deadline(hub: Place) -> None:
    hub.on("get", LARGE, slow(3_000.0))
    assert hub.told() == f"file '{LARGE.removeprefix('prod/m/')}': repository_timeout_s is over"


def test_a_store_that_demands_a_long_pause_gets_none(hub: Place) -> None:
    def wait(_: Any, answer: Answer) -> Answer:
        return 429, {"Retry-After": "100000", "ratelimit": '"api";r=0;t=100000'}, b""

    hub.on("list", "", wait)
    assert "the store does not answer in time" in hub.told()


def test_an_answer_with_more_than_was_asked_for_is_given_up(hub: Place) -> None:
    def endless(handler: BaseHTTPRequestHandler, _: Answer) -> None:
        begin(handler, (206, {"Content-Length": str(1 << 40)}, b""))
        while True:
            handler.wfile.write(bytes(1 << 20))

    hub.on("get", LARGE, endless)
    assert "more bytes than were asked for" in hub.told()


def test_the_token_goes_to_the_hub_alone(hub: Place) -> None:
    elsewhere = StandIn("hf")
    try:
        elsewhere.objects = hub.store.objects
        link = f'<http://127.0.0.1:{elsewhere.port}/api/models/me/box/tree/main>; rel="next"'
        hub.on("list", "", lambda _, answer: (answer[0], {**answer[1], "Link": link}, answer[2]))
        hub.told()
        assert elsewhere.asked
        assert SECRET in str(hub.store.fields)
        assert SECRET not in str(elsewhere.fields)
    finally:
        elsewhere.close()


def test_signed_addresses_are_not_logged(hub: Place) -> None:
    """`Place.close` looks for the secret in the log."""

    def redirect(handler: BaseHTTPRequestHandler, answer: Answer) -> Answer:
        if SECRET in handler.path:
            return answer
        return 302, {"Location": f"{handler.path}?Signature={SECRET}"}, b""

    hub.on("get", "", redirect)
    assert hub.told() == ""
    assert hub.files() == FILES


def account(token_uri: str) -> str:
    """Return the file of a service account of Google's."""
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    about = {"type": "service_account", "client_email": "me@box", "token_uri": token_uri}
    return json.dumps({**about, "private_key": pem})


def test_a_silent_server_of_tokens_stops_no_other_store(tmp_path: Path) -> None:
    google, amazon = StandIn("gs"), StandIn("s3")
    google.objects = amazon.objects = FILES
    (tmp_path / "account.json").write_text(account(f"http://127.0.0.1:{google.port}/token"))
    environ = {**google.environ(), **amazon.environ()}
    environ["GOOGLE_APPLICATION_CREDENTIALS"] = str(tmp_path / "account.json")
    program = Program(tmp_path / "log", "", **environ)
    asked, answer = threading.Event(), threading.Event()

    def fault(what: str, _key: str, _handler: BaseHTTPRequestHandler, right: Answer) -> Answer:
        if what == "token":
            asked.set()
            answer.wait(60)
        return right

    google.fault = fault
    try:
        limits = {"repository_silence_s": 2}
        slow, quick = (
            Fetcher(program, s.url, tmp_path / s.kind, **limits) for s in (google, amazon)
        )
        slow.ask("*")
        wait_until(asked.is_set, "a token is asked for")
        assert quick.round() == {}
        answer.set()
        assert slow.answer() == ({}, [])
    finally:
        answer.set()
        program.end()
        google.close()
        amazon.close()
