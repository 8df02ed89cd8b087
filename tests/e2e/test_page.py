"""The metrics page in a real browser, beside a real service under load."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.cuda import fake
from tests.pages import CHARTS, assert_fits, browsing, visited
from tests.running_server import wait_until
from tests.servers import SMALL, Server

pytestmark = pytest.mark.needs("browser")
MODELS = Path(__file__).parents[1] / "repositories" / "monitor"
GPU_CHARTS = 4
browser = browsing()
GOOD = {"inputs": [{"name": "X", "shape": [3], "datatype": "FP32", "data": [1, 2, 6]}]}
BAD = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [-1]}]}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Service that one client keeps busy, on a host with two GPUs, one of which is visible."""
    stop = threading.Event()
    environ = fake.environment(tmp_path_factory.mktemp("libcuda"), devices=2)
    environ["CUDA_VISIBLE_DEVICES"] = "1"
    with Server(MODELS, environ, **SMALL) as server:

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


def drawn(page: Page) -> list[str]:
    """Every chart's picture."""
    found: list[str] = page.locator("figure svg").evaluate_all(
        "all => all.map(one => one.innerHTML)"
    )
    return found


def tile(page: Page, name: str) -> float:
    text = page.locator("#tiles div", has=page.locator("dt", has_text=name)).first
    value = re.match(r"[\d.,]+", text.locator("dd.value").inner_text())
    return float(value[0].replace(",", "")) if value else 0.0


def test_everything_moves_under_load_without_a_click(browser: Browser, busy: Server) -> None:
    with visited(browser, busy) as page:
        wait_until(lambda: tile(page, "Requests") > 0, "requests")
        # one more chart for each value that the model reports
        expect(page.locator("figure svg")).to_have_count(CHARTS + GPU_CHARTS + 6)
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


def test_numbers_agree_with_the_metrics(browser: Browser) -> None:
    with Server(MODELS, **SMALL) as server:
        for document in [GOOD] * 37 + [BAD] * 3:
            server.infer("reports", document)
        with visited(browser, server) as page:
            _, _, text = server.request("GET", "/metrics")
            found = re.findall(
                rb'^shmserve_requests_total{model="reports".*} ([0-9.]+)', text, re.M
            )
            assert sum(map(float, found)) == 40
            row = page.locator("#models tbody tr")
            expect(row.locator("th")).to_have_text("reports")
            expect(row.locator("td").nth(-1)).to_have_text("40")
            row.get_by_role("button").click()
            expect(page.locator("#models dl div").last).to_have_text("Failed in all3")
            expect(page.locator("#troubles tbody tr").first).to_contain_text("the model raised")
            held = server.show("processes")
            # one process asks
            expect(page.locator("#processes tbody tr")).to_have_count(len(held) - 1)
            expect(page.locator("#gpus-section")).to_be_hidden()


def test_gpus_have_charts_of_their_own(browser: Browser, busy: Server) -> None:
    with visited(browser, busy) as page:
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
        _, _, text = busy.request("GET", "/metrics")  # type: ignore[assignment]
        assert re.search(rb'^shmserve_gpu_power_watts{gpu="1",.*} 150.001$', text, re.M)  # type: ignore[call-overload]
        page.get_by_label("60 min").check()
        expect(page.locator("#now-title")).to_have_text("This minute")
        expect(cells.nth(2)).to_have_text("31 %")


def many(document: dict[str, Any]) -> None:
    """Make of a document's model 60, some failing, and 20 more, which are gone."""
    (row,) = document["models"]
    name = "a_rather_long_name_of_a_model_that_recognises_the_text_of_receipts"
    reason = "No module named 'tokens': install its distribution, and load the model again. " * 3

    def made(number: int, state: str, reason: str = "") -> dict[str, Any]:
        made_name = f"{name}_{number}" if number % 10 == 1 else f"model_{number}"
        return row | {"name": made_name, "state": state, "reason": reason, "series": {}}

    document["models"] = [
        *([row] + [made(number, "READY") for number in range(1, 50)]),
        *(made(number, "UNAVAILABLE", reason) for number in range(50, 60)),
        *(made(number, "UNLOADED") for number in range(60, 80)),
    ]
    trouble = {"last": document["now"], "what": f"{name}/1", "text": reason, "count": 1}
    document["troubles"] = [trouble] * 50


@pytest.mark.parametrize("width", [1280, 390])
def test_sixty_models_and_their_errors_fit(browser: Browser, busy: Server, width: int) -> None:
    viewport: Any = {"width": width, "height": 800}
    with visited(browser, busy, change=many, viewport=viewport) as page:
        models = page.locator("#models tbody tr:not(.below)")
        expect(models).to_have_count(61)
        gone = page.get_by_role("button", name="20 models no longer in the repository")
        gone.press("Enter")
        expect(models).to_have_count(81)
        expect(gone).to_have_attribute("aria-expanded", "true")
        button = page.get_by_role("button", name="reports")
        button.press("Enter")
        total = models.first.locator("td").last
        before = total.inner_text()
        wait_until(lambda: total.inner_text() != before, "numbers that change")
        expect(button).to_be_focused()
        expect(page.locator("#models dl")).to_have_count(1)
        page.get_by_role("button", name="42 more").click()
        expect(page.locator("#troubles tbody tr")).to_have_count(51)
        assert_fits(page, width)
        error = page.locator("#troubles .text").first.bounding_box()
        assert error is not None
        assert error["width"] > width / 2
        gone.click()
        expect(models).to_have_count(61)


def test_a_focused_model_stays_focused_when_models_above_come_and_go(
    browser: Browser, busy: Server
) -> None:
    above: list[str] = []

    def change(document: dict[str, Any]) -> None:
        (model,) = document["models"]
        added = [
            model | {"name": name, "state": "UNAVAILABLE", "reason": "broken", "series": {}}
            for name in above
        ]
        document["models"] = [*added, model]

    with visited(browser, busy, change=change) as page:
        heads = page.locator("#models tbody tr:not(.below) th")
        button = page.get_by_role("button", name="reports")
        button.press("Enter")
        for names in (["a"], ["a", "b"], ["b"], []):
            above[:] = names
            expect(heads).to_have_text([*names, "reports"])
            expect(button).to_be_focused()
            expect(page.locator("#models tr.below")).to_have_count(len(names) + 1)
        page.keyboard.press("Enter")
        expect(button).to_have_attribute("aria-expanded", "false")
        expect(page.locator("#models dl")).to_have_count(0)


def test_tiles_are_of_ten_seconds(browser: Browser, busy: Server) -> None:
    def change(document: dict[str, Any]) -> None:
        """Let nine tenths of a second's requests be in the last of ten seconds, half failed."""
        total, first = document["total"], document["first"]
        numbers = [(first + at) % 10 for at in range(len(total["requests"]))]
        total["requests"] = [float(number) for number in numbers]
        total["failed"] = [50.0 if number == 9 else 0.0 for number in numbers]
        total["latency_avg"] = [20.0 if number == 9 else 10.0 for number in numbers]
        total["latency_max"] = [document["bounds_ms"][8]] * len(numbers)
        for name in total:
            if name.startswith("bucket_"):
                total[name] = [int(name == "bucket_8")] * len(numbers)
        low, high = document["bounds_ms"][7:9]
        expected.update({part: low + (high - low) * part / 100 for part in (50, 99)})

    expected: dict[int, float] = {}
    with visited(browser, busy, change=change) as page:
        wait_until(lambda: tile(page, "Requests") == 4.5, "ten seconds")
        expect(page.locator("#tiles .more").first).to_have_text("10 % failed")
        average = (36 * 10 + 4.5 * 20) / 40.5
        assert tile(page, "Latency, average") == pytest.approx(average, rel=0.01)
        assert tile(page, "Latency, 99 %") == pytest.approx(expected[99], rel=0.01)
        half = page.locator("#tiles .more").nth(1).inner_text()
        shown = float(half.removeprefix("50 %: ").removesuffix(" ms"))
        assert shown == pytest.approx(expected[50], rel=0.01)


def test_a_chart_without_values_says_so(browser: Browser) -> None:
    with Server(MODELS, **SMALL) as server, visited(browser, server) as page:
        for title in ("Latency", "Client memory"):
            chart = page.get_by_role("img", name=f"{title}, ").filter(visible=True).first
            expect(chart).to_have_attribute("aria-label", re.compile(": nothing yet$"))
            words = chart.evaluate("one => getComputedStyle(one, '::after').content")
            assert words == '"nothing yet"'
        server.infer("reports", GOOD)
        latency = page.get_by_role("img", name="Latency, answered requests").first
        expect(latency).to_have_attribute("data-none", "")


def test_what_models_say_is_shown_and_not_run(browser: Browser, busy: Server) -> None:
    with visited(browser, busy) as page:
        name = "<img src=x onerror=document.title='hurt'>"
        expect(page.locator("#values h3").get_by_text(name, exact=True)).to_be_visible()
        assert page.locator("img").count() == 0
        assert "hurt" not in page.title()
        shown = {text.strip() for text in page.locator("#values h3").all_text_contents()}
        assert shown == {"mean", "top", "bottom", "sum", "spread", name}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (1280, 800), (768, 1024), (390, 844), (360, 740)])
def test_it_is_readable_by_day_and_night_on_any_screen(
    browser: Browser, busy: Server, scheme: Any, size: tuple[int, int]
) -> None:
    viewport: Any = {"width": size[0], "height": size[1]}
    with visited(browser, busy, color_scheme=scheme, viewport=viewport) as page:
        expect(page.locator("#models tbody tr")).to_have_count(1)
        assert_fits(page, size[0])
        for chart in page.locator("figure").all():
            box = chart.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= size[0]
        for table in page.locator("main table:visible").all():  # on a phone rows are cards
            fits = table.evaluate("one => one.scrollWidth <= one.parentElement.clientWidth")
            assert fits, table.get_attribute("id")
        texts = ["--text", "--quiet", "--good", "--bad", "--accent"]
        for name, ratio in page.evaluate(_CONTRAST, texts).items():
            assert ratio >= 4.5, f"{name} on a card: {ratio:.2f}"
        lines = [f"--c{number}" for number in range(8)]
        for name, ratio in page.evaluate(_CONTRAST, lines).items():
            assert ratio >= 2.9, f"{name} on a card: {ratio:.2f}"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 300) == (scheme == "dark")


# The contrast of colours with a card's background, as WCAG 2 measures it
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


def test_colours_follow_the_system_while_it_is_shown(browser: Browser, busy: Server) -> None:
    with visited(browser, busy, color_scheme="light") as page:
        line = page.locator("#charts .line").first
        by_day = line.evaluate("one => getComputedStyle(one).stroke")
        page.emulate_media(color_scheme="dark")
        expect(line).to_have_css("stroke", "rgb(108, 176, 255)")
        assert by_day == "rgb(31, 111, 235)"


def test_other_times_and_the_other_address(browser: Browser, busy: Server) -> None:
    with visited(browser, busy, "/grps/v1/monitor/metrics") as page:
        expect(page.locator("#now-title")).to_have_text("Last ten seconds")
        page.get_by_label("60 min").check()
        expect(page.locator("#now-title")).to_have_text("This minute")
        wait_until(lambda: tile(page, "Requests") > 0, "the minute that runs")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#now-title")).to_have_text("This hour")


def test_pointing_at_a_moment_shows_its_values_everywhere(browser: Browser, busy: Server) -> None:
    with visited(browser, busy) as page:
        figures = page.locator("#charts figure")
        pointed = page.locator("figure svg.pointed")
        requests = figures.first
        requests.locator(".plot").hover()
        over_time = CHARTS - 1 + GPU_CHARTS + 6
        expect(pointed).to_have_count(over_time)
        moment = requests.locator(".moment text")
        expect(moment).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
        expect(requests.locator(".near").filter(visible=True)).to_have_count(0)
        together = "all => new Set(all.map(one => one.textContent)).size"  # within one frame
        assert page.locator("#charts .lines .moment").evaluate_all(together) == 1
        figures.nth(3).locator(".plot").hover()
        expect(figures.nth(3).locator(".legend b")).to_contain_text("took")
        expect(pointed).to_have_count(1)
        page.locator("h1").hover()
        expect(pointed).to_have_count(0)
        expect(figures.nth(3).locator(".legend b")).to_have_text("in the time shown")


def test_a_plot_is_drawn_to_scale(browser: Browser, busy: Server) -> None:
    """Made-up points on known axes: gaps, points without neighbours, marks, crosshair."""
    with visited(browser, busy) as page:
        found = page.evaluate(_TO_SCALE)
        assert found["line"] == ["M62 144L72 76", "M62 110L72 110L82 110L92 110L102 110"]
        assert found["dots"] == ["M92 8h0", ""]
        assert found["area"] == ["", ""]
        assert found["grid"] == "M62 144H102M62 110H102M62 76H102M62 42H102M62 8H102"
        assert found["rows"] == ["0", "10 ms", "20 ms", "30 ms", "40 ms"]
        assert found["legend"] == [["–", "10 ms"], ["20 ms", "10 ms"]]  # the newest; at the pointer
        assert found["points"] == [["72", "76", "3"], ["72", "110", "3"]]
        assert found["alone"] == "M62 144L62 144L72 8L72 144Z"
        assert found["none"] == ["none", "t, u: none"]
        assert found["left"] == 0


_TO_SCALE = """async () => {
  const at = name => new URL(`monitor/assets/${name}`, location.origin + "/");
  const { Chart } = await import(at("charts.js"));
  const { milliseconds } = await import(at("format.js"));
  const host = document.body.appendChild(document.createElement("div"));
  host.id = "made-up";
  const chart = new Chart(host, { title: "t", unit: "u", show: milliseconds, top: high => high });
  chart.area.style.width = "122px"; // 40 of them between the edges
  const all = selector => [...host.querySelectorAll(selector)];
  const paths = name => all(`.${name}`).map(node => node.getAttribute("d"));
  const texts = selector => all(selector).map(node => node.textContent);
  const times = [100, 110, 120, 130, 140];
  const lines = [[0, 20, null, 40, null], [10, 10, 10, 10, 10]];
  const draw = (...columns) => {
    const shown = times.slice(0, columns[0].length);
    const made = columns.map((values, n) => ({ label: `${n}`, values }));
    chart.draw(shown, made, { level: "second", span: [100, shown.at(-1)], none: "none" });
  };
  draw(...lines);
  const found = { line: paths("line"), dots: paths("dots"), area: paths("area") };
  found.grid = paths("grid")[0];
  found.rows = texts(".rows text");
  found.legend = [texts(".legend b")];
  chart.area.scrollIntoView();
  const { left, top } = chart.area.getBoundingClientRect();
  const place = { clientX: left + 73, clientY: top + 50 };
  chart.area.dispatchEvent(new PointerEvent("pointermove", place));
  while (!host.querySelector("svg.pointed")) await new Promise(requestAnimationFrame);
  found.legend.push(texts(".legend b"));
  found.points = all("circle").map(node => ["cx", "cy", "r"].map(name => node.getAttribute(name)));
  chart.area.dispatchEvent(new PointerEvent("pointerleave"));
  chart.plot.resize(92);
  draw([0, 30]);
  found.alone = paths("area")[0];
  delete chart.spec.top; // which is 0 for these
  draw([0, null]);
  found.none = [chart.area.dataset.none, chart.area.getAttribute("aria-label")];
  chart.remove();
  found.left = host.childElementCount;
  return found;
}"""


def test_marks_are_round_in_number_size_and_time(browser: Browser, busy: Server) -> None:
    with visited(browser, busy, timezone_id="Asia/Kolkata", faultless=False) as page:
        found = page.evaluate(_MARKS)
        assert found["decimal"] == [0, 0.1, 0.2, 0.3]
        assert found["below"] == [-50, -25, 0, 25]
        assert found["whole"] == [0, 1, 2]
        assert found["binary"] == [0, 512, 1024]
        assert found["hours"] == ["00:00", "06:00", "12:00", "18:00"]
        assert found["texts"] == ["0", "1.5 ms", "20 %", "100", "1.5M", "0.0025", "512 MiB"]


_MARKS = """async () => {
  const at = name => new URL(`monitor/assets/${name}`, location.origin + "/");
  const ticks = await import(at("ticks.js"));
  const format = await import(at("format.js"));
  const day = Date.UTC(2024, 4, 1) / 1000 - 19800; // midnight in Kolkata
  return {
    decimal: ticks.marks(0, 0.32, 0.08, ticks.decimal),
    below: ticks.marks(-60, 30, 21, ticks.decimal),
    whole: ticks.marks(0, 2.2, 0.3, ticks.whole),
    binary: ticks.marks(0, 1100, 300, ticks.binary),
    hours: ticks.moments(day - 60, day + 86000, 20000).map(time => format.moment(time, "hour")),
    texts: [
      [0, format.bytes], [1.5, format.milliseconds], [20, format.percent], [100, format.number],
      [1.5e6, format.number], [0.0025, format.number], [512 * 2 ** 20, format.bytes],
    ].map(([value, show]) => format.mark(value, show)),
  };
}"""


def test_a_coordinator_that_is_away_is_told_and_forgotten(browser: Browser) -> None:
    with Server(MODELS, **SMALL) as server, visited(browser, server, faultless=False) as page:
        server.wait_arenas()
        (pid,) = server.pids("coordinator")
        os.kill(pid, signal.SIGSTOP)
        expect(page.locator("#problem")).to_contain_text("No numbers right now")
        expect(page.locator("#problem")).to_contain_text("coordinator")
        assert server.infer("reports", GOOD)[0] == 200
        os.kill(pid, signal.SIGKILL)
        expect(page.locator("#problem")).to_be_hidden()
        row = page.locator("#models tbody tr td").nth(-1)
        expect(row).to_have_text("1")


def test_points_that_come_piecemeal_are_the_same_as_all_at_once(
    browser: Browser, busy: Server
) -> None:
    """Compare `series.js` over random polls of a simulated history with the expected points."""
    with visited(browser, busy, faultless=False) as page:
        problems = page.evaluate(_PIECEMEAL)
        assert problems == []


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
