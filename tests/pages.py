"""The server's pages in a real browser."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests import needs
from tests.servers import Server

CHARTS = 15
PATIENCE_MS = 60_000  # a watchdog
API = "/monitor/api"


def browsing() -> Any:
    """Return a fixture: a browser, for the tests of one module."""

    @pytest.fixture(scope="module")
    def browser() -> Iterator[Browser]:
        with sync_playwright() as playwright:
            path = needs.browser()
            found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            yield found
            found.close()

    return browser


class Seen:
    """Faults of a page: console messages, failed loads, and requests to other hosts."""

    def __init__(self, page: Page, server: Server) -> None:
        self.complaints: list[str] = []
        page.on("console", lambda m: self.complaints.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda r: self._asked(r.url, server.base_url))
        page.on("response", lambda r: self._got(r.url, r.status))

    def _asked(self, url: str, base: str) -> None:
        if not url.startswith(base):
            self.complaints.append(f"asked elsewhere: {url}")

    def _got(self, url: str, status: int) -> None:
        if status not in (200, 304):
            self.complaints.append(f"{status}: {url}")


@contextmanager
def visited(
    browser: Browser,
    server: Server,
    path: str = "/",
    faultless: bool = True,
    change: Callable[[dict[str, Any]], None] | None = None,
    **context: Any,
) -> Iterator[Page]:
    """Open a page that shows numbers or the API; with `faultless` it must have no faults until the
    end. `change` changes the numbers before the page gets them."""
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    seen = Seen(page, server)
    if change is not None:

        def answer(route: Route) -> None:
            given = route.fetch()
            document = given.json()
            change(document)
            route.fulfill(response=given, json=document)

        page.route("**/monitor/data?*", answer)
    page.goto(server.base_url + path)
    if path == API:
        page.locator("#api h2").last.wait_for()
    else:
        expect(page.locator("#charts figure svg")).to_have_count(CHARTS)
    yield page
    assert seen.complaints == [] or not faultless
    page.unroute_all(behavior="ignoreErrors")
    page.context.close()


def assert_fits(page: Page, width: int) -> None:
    """Check the page: nothing is wider than the screen, or scrolls by itself."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(_SCROLLING) == []


_SCROLLING = """() => [...document.querySelectorAll("body *")].filter(one => {
  const { overflowX, overflowY } = getComputedStyle(one);
  const over = /auto|scroll/.test(overflowX + overflowY);
  return over && (one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight);
}).map(one => one.outerHTML.slice(0, 80))"""
