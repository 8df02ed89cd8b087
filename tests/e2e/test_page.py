"""The metrics page in a real browser, beside a real service under load."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from shmserve.testing.running_server import RunningServer, wait_until
from tests.cuda import fake

MODELS = Path(__file__).parents[1] / "monitor_models"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
CHARTS = 15
GPU_CHARTS = 4
GOOD = {"inputs": [{"name": "X", "shape": [3], "datatype": "FP32", "data": [1, 2, 6]}]}
BAD = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [-1]}]}
PATIENCE_MS = 60_000  # a watchdog


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A service that one client keeps busy, on a host with two GPUs, one of which is visible."""
    stop = threading.Event()
    environ = fake.environment(tmp_path_factory.mktemp("libcuda"), devices=2)
    environ["CUDA_VISIBLE_DEVICES"] = "1"
    with RunningServer(MODELS, environ, http_workers=1, grpc_processes=0) as server:

        def load() -> None:
            for number in iter(int, 1):
                if stop.wait(0.02):
                    return
                server.infer("reports", BAD if number % 20 == 19 else GOOD)

        client = threading.Thread(target=load)
        client.start()
        try:
            yield server
        finally:
            stop.set()
            client.join()
    assert server.leaks() == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.fail(
            "the page is tested in a browser: apt-get install chromium, "
            "or name one with the variable CHROMIUM",
            pytrace=False,
        )
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


class Seen:
    """What a page should not do: complain, fail to load something, or ask elsewhere."""

    def __init__(self, page: Page, server: RunningServer) -> None:
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


def visit(
    browser: Browser, server: RunningServer, path: str = "/", **context: Any
) -> tuple[Page, Seen]:
    """A page that shows numbers."""
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    seen = Seen(page, server)
    page.goto(server.base_url + path)
    expect(page.locator("#charts figure canvas")).to_have_count(CHARTS)
    return page, seen


def drawn(page: Page) -> list[str]:
    """Every chart's picture."""
    script = "all => all.map(canvas => canvas.toDataURL())"
    found: list[str] = page.locator("figure canvas").evaluate_all(script)
    return found


def tile(page: Page, name: str) -> float:
    text = page.locator("#tiles div", has=page.locator("dt", has_text=name)).first
    value = re.match(r"[\d.,]+", text.locator("dd.value").inner_text())
    return float(value[0].replace(",", "")) if value else 0.0


def test_everything_moves_under_load_without_a_click(browser: Browser, busy: RunningServer) -> None:
    page, seen = visit(browser, busy)
    wait_until(lambda: tile(page, "Requests") > 0, "requests")
    # one chart more for each value that the model reports
    expect(page.locator("figure canvas")).to_have_count(CHARTS + GPU_CHARTS + 6)
    before = drawn(page)
    labels = page.locator("figure").evaluate_all(
        "all => all.map(one => one.querySelector('.plot').getAttribute('aria-label'))"
    )
    wait_until(
        lambda: all(old != new for old, new in zip(before, drawn(page), strict=False)),
        "every chart to move",
    )
    assert all(re.match(r"[^:]+, [^:]*: .", label) for label in labels), labels
    assert any(re.search(r"Requests, .*: reports [1-9]", label) for label in labels), labels
    assert tile(page, "Latency, average") > 0
    assert tile(page, "CPU") > 0
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#problem")).to_be_hidden()
    assert seen.complaints == []
    page.context.close()


def test_numbers_agree_with_the_metrics(browser: Browser) -> None:
    with RunningServer(MODELS, http_workers=1, grpc_processes=0) as server:
        for document in [GOOD] * 37 + [BAD] * 3:
            server.infer("reports", document)
        page, seen = visit(browser, server)
        _, _, text = server.request("GET", "/metrics")
        found = re.findall(rb'^shmserve_requests_total{model="reports".*} ([0-9.]+)', text, re.M)
        assert sum(map(float, found)) == 40
        row = page.locator("#models tbody tr")
        expect(row.locator("th")).to_have_text("reports")
        expect(row.locator("td").nth(-2)).to_have_text("40")
        expect(row.locator("td").nth(-1)).to_have_text("3")
        expect(page.locator("#troubles tbody tr").first).to_contain_text("the model raised")
        held = server.show("processes")
        expect(page.locator("#processes tbody tr")).to_have_count(len(held) - 1)  # one asks
        expect(page.locator("#gpus-section")).to_be_hidden()
        assert seen.complaints == []
        page.context.close()


def test_gpus_have_charts_of_their_own(browser: Browser, busy: RunningServer) -> None:
    page, seen = visit(browser, busy)
    shown = {
        "GPU utilisation": "GPU 1 31 %",
        "GPU memory": "GPU 1 1 GiB",
        "GPU temperature": "GPU 1 41 °C",
        "GPU power": "GPU 1 150 W",
    }
    for title, text in shown.items():
        chart = page.get_by_role("img", name=re.compile(rf"^{title}, [^:]+: {text}$"))
        expect(chart).to_be_visible()
    cells = page.locator("#gpus tbody tr").locator("th, td")
    expect(cells).to_have_text(
        ["1", "Fake GPU", "31 %", "1 GiB", "4 GiB", "41 °C", "150 W", "300 W"]
    )
    (row,) = busy.show("gpus")
    assert (row["gpu"], row["temperature_celsius"]) == (1, 41)
    _, _, text = busy.request("GET", "/metrics")
    assert re.search(rb'^shmserve_gpu_power_watts{gpu="1",.*} 150.001$', text, re.M)
    page.get_by_label("60 min").check()
    expect(page.locator("#now-title")).to_have_text("This minute")
    expect(cells.nth(2)).to_have_text("31 %")
    assert seen.complaints == []
    page.context.close()


def test_what_models_say_is_shown_and_not_run(browser: Browser, busy: RunningServer) -> None:
    page, seen = visit(browser, busy)
    name = "<img src=x onerror=document.title='hurt'>"
    expect(page.locator("#values h3").get_by_text(name, exact=True)).to_be_visible()
    assert page.locator("img").count() == 0
    assert "hurt" not in page.title()
    shown = {text.strip() for text in page.locator("#values h3").all_inner_texts()}
    assert shown == {"mean", "top", "bottom", "sum", "spread", name}
    assert seen.complaints == []
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (768, 1024), (360, 740)])
def test_it_is_readable_by_day_and_night_on_any_screen(
    browser: Browser, busy: RunningServer, scheme: Any, size: tuple[int, int]
) -> None:
    viewport: Any = {"width": size[0], "height": size[1]}
    page, seen = visit(browser, busy, color_scheme=scheme, viewport=viewport)
    expect(page.locator("#models tbody tr")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    for chart in page.locator("figure").all():
        box = chart.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0]
    texts = ["--text", "--quiet", "--good", "--bad", "--accent"]
    for name, ratio in page.evaluate(_CONTRAST, texts).items():
        assert ratio >= 4.5, f"{name} on a card: {ratio:.2f}"
    lines = [f"--c{number}" for number in range(8)]
    for name, ratio in page.evaluate(_CONTRAST, lines).items():
        assert ratio >= 2.9, f"{name} on a card: {ratio:.2f}"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 300) == (scheme == "dark")
    assert seen.complaints == []
    page.context.close()


# The contrast of colours with a card's ground, as WCAG 2 measures it
_CONTRAST = """names => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const style = getComputedStyle(document.documentElement);
  const light = name => {
    canvas.fillStyle = style.getPropertyValue(name).trim();
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(part => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  return Object.fromEntries(names.map(name => {
    const pair = [light(name), light("--card")].sort((a, b) => b - a);
    return [name, pair[0] / pair[1]];
  }));
}"""


def test_colours_follow_the_system_while_it_is_shown(browser: Browser, busy: RunningServer) -> None:
    page, seen = visit(browser, busy, color_scheme="light")
    pixel = """one => {
        const copy = document.createElement("canvas");
        copy.width = one.width;
        copy.height = one.height;
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(one, 0, 0);
        return [...context.getImageData(0, 0, one.width, one.height).data]
            .reduce((sum, part, at) => sum + (at % 4 < 3 ? part : 0), 0);
    }"""
    chart = page.locator("#charts canvas").first
    by_day = chart.evaluate(pixel)
    page.emulate_media(color_scheme="dark")
    wait_until(lambda: chart.evaluate(pixel) > 1.2 * by_day, "lighter colours")
    assert seen.complaints == []
    page.context.close()


def test_other_times_and_the_other_address(browser: Browser, busy: RunningServer) -> None:
    page, seen = visit(browser, busy, "/grps/v1/monitor/metrics")
    expect(page.locator("#now-title")).to_have_text("Last second")
    page.get_by_label("60 min").check()
    expect(page.locator("#now-title")).to_have_text("This minute")
    wait_until(lambda: tile(page, "Requests") > 0, "the minute that runs")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#now-title")).to_have_text("This hour")
    assert seen.complaints == []
    page.context.close()


def test_pointing_at_a_moment_shows_its_values_everywhere(
    browser: Browser, busy: RunningServer
) -> None:
    page, seen = visit(browser, busy)
    page.locator("#charts .u-over").first.hover()
    shown = page.locator("#charts .u-cursor-x")
    visible = (
        "all => all.filter(one => one.offsetParent && !one.classList.contains('u-off')).length"
    )
    wait_until(lambda: shown.evaluate_all(visible) >= CHARTS - 1, "a line in all charts over time")
    page.locator("#charts figure").nth(3).locator(".u-over").hover()
    expect(page.locator("#charts figure").nth(3).locator(".legend b")).to_contain_text("took")
    assert seen.complaints == []
    page.context.close()


def test_a_coordinator_that_is_away_is_told_and_forgotten(browser: Browser) -> None:
    with RunningServer(MODELS, http_workers=1, grpc_processes=0) as server:
        page, _ = visit(browser, server)
        server.wait_arenas()
        (pid,) = server.pids("coordinator")
        os.kill(pid, signal.SIGSTOP)
        expect(page.locator("#problem")).to_contain_text("No numbers right now")
        expect(page.locator("#problem")).to_contain_text("coordinator")
        assert server.infer("reports", GOOD)[0] == 200
        os.kill(pid, signal.SIGKILL)
        expect(page.locator("#problem")).to_be_hidden()
        row = page.locator("#models tbody tr td").nth(-2)
        expect(row).to_have_text("1")
        page.context.close()


def test_points_that_come_piecemeal_are_the_same_as_all_at_once(
    browser: Browser, busy: RunningServer
) -> None:
    """`series.js` over random polls of a made-up history, against what it should hold."""
    page, _ = visit(browser, busy)
    problems = page.evaluate(_PIECEMEAL)
    assert problems == []
    page.context.close()


_PIECEMEAL = """async () => {
  const { Series } = await import(new URL("monitor/assets/series.js", location.origin + "/"));
  const problems = [];
  let seed = 7;
  const random = limit => {  // as good as needed, and the same every time
    seed = Math.imul(seed ^ (seed >>> 15), 2246822519) + 0x6d2b79f5 | 0;
    return ((seed ^ (seed >>> 13)) >>> 0) % limit;
  };
  for (let round = 0; round < 200; round += 1) {
    const points = 2 + random(6);
    const running = random(2) === 1;
    const series = new Series();
    let until = random(4);
    let life = "a";
    for (let poll = 0; poll < 12; poll += 1) {
      if (random(12) === 0) { life += "x"; until = 0; }
      const query = new URLSearchParams(series.query("second"));
      const since = query.get("life") === life ? Number(query.get("since")) : 0;
      const first = Math.min(until, Math.max(since, until - points, 0));
      const cells = Array.from({ length: until - first }, (_, at) => first + at);
      if (running) cells.push(-until);
      const late = poll > 5; // a model that comes later
      series.add({
        life, level: "second", seconds: 1, points, first, until, running, ended_at: 100 + until,
        total: { n: cells }, system: {}, values: [], gpus: [],
        models: late ? [{ name: "m", version: "1", series: { n: cells } }] : [],
      });
      const wanted = [];
      for (let n = Math.max(0, until - points); n < until; n += 1) wanted.push(n);
      if (running) wanted.push(-until);
      const held = series.column("total", "n");
      const same = JSON.stringify(held) === JSON.stringify(wanted);
      const times = series.times.every((time, at) =>
        wanted[at] < 0 || time === 100 + wanted[at] + 1);
      const model = series.column(JSON.stringify(["model", "m", "1"]), "n");
      const known = model.every((value, at) => value === null || value === wanted[at]);
      const whole = [held, model].every(column => column.length === series.times.length);
      if (!same || !times || !known || !whole) problems.push({ round, poll, wanted, held, model });
      until += random(4);
    }
  }
  return problems.slice(0, 3);
}"""
