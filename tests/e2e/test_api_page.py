"""The page of the HTTP API in a real browser."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.pages import API, assert_fits, browsing, visited
from tests.servers import SMALL, Server, served

pytestmark = pytest.mark.needs("browser")
server = served(Path(__file__).parents[1] / "repositories" / "monitor", **SMALL)
browser = browsing()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_api_is_shown_whole(browser: Browser, server: Server, width: int) -> None:
    status, document = server.get("/openapi.json")
    assert status == 200
    viewport: Any = {"width": width, "height": 800}
    with visited(browser, server, API, viewport=viewport) as page:
        operations = {
            f"{method.upper()} {path} {operation['summary']} "
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if method not in ("parameters", "head")
        }
        shown = page.locator("#api summary:has(b)").all_text_contents()
        assert len(shown) == len(operations)
        assert set(shown) == operations
        page.locator("summary").evaluate_all("all => all.forEach(one => one.click())")
        body = page.locator("#post_v2_models_name_infer > div")
        expect(body).to_contain_text("inputs array of InputDocument, required")
        assert_fits(page, width)


def test_the_api_page_sends_what_only_reads(browser: Browser, server: Server) -> None:
    with visited(browser, server, API, faultless=False) as page:
        page.locator("summary").evaluate_all("all => all.forEach(one => one.click())")
        tried = page.locator("details:has(form)").evaluate_all("all => all.map(one => one.id)")
        assert "get_v2_models_name" in tried
        assert not [name for name in tried if not name.startswith("get_")]
        assert not [name for name in tried if "offline" in name or "online" in name]
        model = page.locator("#get_v2_models_name")
        answer = model.locator("form + pre")
        send = model.get_by_role("button")
        for name in ("", ".."):
            model.locator("input").fill(name)
            send.click()
            expect(answer).to_be_hidden()
        model.locator("input").fill("reports")
        send.click()
        expect(answer).to_contain_text('200 application/json\n{\n  "name": "reports"')
        model.locator("input").fill("no such?one")
        send.click()
        expect(answer).to_contain_text("404 application/json")
        expect(answer).to_contain_text("'no such?one'")


def test_a_document_that_is_refused_is_told(browser: Browser, server: Server) -> None:
    page = browser.new_page()
    page.route(
        "**/openapi.json", lambda route: route.fulfill(status=403, json={"error": "Restricted"})
    )
    page.goto(server.base_url + API)
    expect(page.locator("#problem")).to_have_text("The API's document did not come: Restricted")
    page.close()
