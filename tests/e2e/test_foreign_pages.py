"""Foreign web pages in a real browser cannot change a service on the browser's host."""

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests import needs
from tests.crash.reload import changed
from tests.faulty_store import FolderServer
from tests.integration.test_access import TELLS
from tests.running_server import ROOT
from tests.servers import Server, only

pytestmark = pytest.mark.needs("browser")
MODELS = ROOT / "tests/repositories/basic"
# Sends every request in turn, without reading the answers' contents.
ATTACK = """
async ([base, mode, asked]) => {
    const told = [];
    for (const [method, path, body] of asked) {
        try {
            const answer = await fetch(base + path, {method: method, mode: mode, body: body});
            told.push(answer.status);
        } catch (error) {
            told.push(String(error));
        }
    }
    await new Promise((done) => {  // as an image, which is a GET that no script sends
        const image = new Image();
        image.onload = image.onerror = done;
        image.src = base + "/grps/v1/health/offline?image";
    });
    return told;
}
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a foreign web site."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "index.html").write_text("<!doctype html><title>a page</title>")
    site = FolderServer(folder)
    yield site.port
    site.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Browser that resolves both sites, and the service's other name, to this host."""
    names = "MAP evil.example 127.0.0.1, MAP friend.example 127.0.0.1"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=needs.browser(),
            args=[
                *("--no-sandbox", "--no-proxy-server", f"--host-resolver-rules={names}"),
                # Newer browsers ask before pages reach this host. The service must be safe without
                # that question.
                "--disable-features=LocalNetworkAccessChecks",
            ],
        )
        yield found
        found.close()


@pytest.fixture(scope="module")
def service(elsewhere: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(MODELS / "echo", folder / "echo")
    friend = f"http://friend.example:{elsewhere}"
    with Server(
        folder, **only("echo"), grps_online="true", grpc_processes=0, allowed_origins=friend
    ) as server:
        yield server


@pytest.fixture
def memory() -> Iterator[str]:
    """Shared-memory object that the server's user owns."""
    key = f"page-{os.getpid()}"
    path = Path("/dev/shm") / key
    path.write_bytes(bytes(4096))
    yield f"/{key}"
    path.unlink()


def asked(mark: Path, key: str) -> list[tuple[str, str, str | None]]:
    code = base64.b64encode(TELLS.replace("MARK", str(mark)).encode()).decode()
    sent = {"parameters": {"config": changed(1), "file:1/model.py": code}}
    region = {"key": key, "offset": 0, "byte_size": 4096}
    return [
        ("GET", "/v2/models/echo", None),
        ("POST", "/v2/repository/models/echo/load", json.dumps(sent)),
        ("POST", "/v2/systemsharedmemory/region/page/register", json.dumps(region)),
        ("POST", "/v2/logging", json.dumps({"log_info": False})),
        ("GET", "/grps/v1/health/offline", None),
    ]


def done(server: Server, mark: Path) -> dict[str, bool]:
    """Return which of the page's requests took effect."""
    logging = server.get("/v2/logging")[1]
    return {
        "loaded": mark.exists(),
        "registered": bool(server.get("/v2/systemsharedmemory/status")[1]),
        "silent": logging["log_info"] is False,
        "offline": server.request("GET", "/grps/v1/health/ready")[0] != 200,
    }


def attack(browser: Browser, page_url: str, base: str, *arguments: Any) -> tuple[Any, list[int]]:
    """Return the statuses seen by the page's script, and the service's statuses in the browser."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(60_000)
    if not base:  # the page has rebound its name: it came from elsewhere, its requests go here
        context.route(
            page_url, lambda r: r.fulfill(body="<title>x</title>", content_type="text/html")
        )
    page.goto(page_url)
    statuses: list[int] = []
    page.on("response", lambda answer: statuses.append(answer.status))
    told = page.evaluate(ATTACK, [base, *arguments])
    context.close()
    return told, statuses


def test_a_page_elsewhere(
    browser: Browser, service: Server, elsewhere: int, tmp_path: Path, memory: str
) -> None:
    mark = tmp_path / "mark"
    page = f"http://evil.example:{elsewhere}/"
    for host in ("127.0.0.1", "localhost"):
        base = f"http://{host}:{service.http_port}"
        told, statuses = attack(browser, page, base, "no-cors", asked(mark, memory))
        assert told == [0] * 5, "a script is not even told"
        assert set(statuses) == {403}
        assert len(statuses) >= 5, "the image may be hidden from the page's debugger, too"
        told, _ = attack(browser, page, base, "cors", asked(mark, memory))
        assert all("Failed to fetch" in one for one in told)
    assert not any(done(service, mark).values())


def test_a_page_that_has_rebound_its_name(
    browser: Browser, service: Server, tmp_path: Path, memory: str
) -> None:
    """The browser sees the page and the service as the same origin."""
    mark = tmp_path / "mark"
    page = f"http://evil.example:{service.http_port}/page"
    told, statuses = attack(browser, page, "", "cors", asked(mark, memory))
    assert told == [403] * 5
    assert set(statuses) == {403}
    assert not any(done(service, mark).values())


def test_a_page_that_is_listed(
    browser: Browser, service: Server, elsewhere: int, tmp_path: Path, memory: str
) -> None:
    """Runs last: a permitted page succeeds with every request, so attacks could have succeeded."""
    mark = tmp_path / "mark"
    page = f"http://friend.example:{elsewhere}/"
    base = f"http://127.0.0.1:{service.http_port}"
    told, _ = attack(browser, page, base, "cors", asked(mark, memory))
    assert told == [200] * 5
    assert all(done(service, mark).values())
    assert service.request("POST", "/v2/systemsharedmemory/unregister")[0] == 200
