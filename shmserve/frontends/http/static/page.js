// The metrics page: asks for what is new once a second and shows it.

import { Chart } from "./charts.js";
import * as format from "./format.js";
import { Series, gpuKey, modelKey, valueKey } from "./series.js";
import { drawTables, listen, made, put } from "./tables.js";

const POLL_MS = 1000;
const PATIENCE_MS = 8000;
const MAX_LINES = 8;
const MAX_VALUE_CHARTS = 24;
const RECENT = 10; // newest seconds that the tiles show together
const NOW = { second: "Last ten seconds", minute: "This minute", hour: "This hour", day: "This day" };
const REASONS = {
  failed_bad_request: "malformed",
  failed_queue_full: "queue full",
  failed_no_memory: "no memory",
  failed_no_executor: "no executor",
  failed_executor_died: "executor died",
  failed_deadline: "deadline",
  failed_cancelled: "cancelled",
  failed_model: "model error",
  failed_internal: "internal",
};

const element = (id) => document.getElementById(id);
const series = new Series();
const charts = new Map();
let level = "second";
let latest = null; // answer
let bounds = []; // of the latency histogram's buckets, in milliseconds

// ---------------------------------------------------------------- what is drawn

const columns = (key, names) => () =>
  Object.entries(names).map(([name, label], colour) => ({ label, colour, values: series.column(key, name) }));

const perModel = (name) => (data) => {
  const lines = shown(data).map((model) => ({ label: title(model), colour: hue(model), values: series.column(modelKey(model), name) }));
  const busy = lines.filter((line) => line.values.some((value) => value));
  return busy.length ? busy : lines;
};

const CHARTS = [
  { id: "requests", title: "Requests", unit: "per second, by model", show: format.number, lines: perModel("requests") },
  {
    id: "latency", title: "Latency", unit: "answered requests", show: format.milliseconds,
    lines: columns("total", { latency_avg: "average", latency_p50: "50 %", latency_p99: "99 %", latency_max: "maximum ≤" }),
  },
  { id: "latency-models", title: "Latency by model", unit: "99 % of requests", show: format.milliseconds, lines: perModel("latency_p99") },
  { id: "distribution", title: "Latency distribution", unit: "share of answered requests", show: format.percent, legend: share, lines: histogram },
  {
    id: "failures", title: "Failures", unit: "per second, by reason", show: format.number,
    lines: () => columns("total", REASONS)().filter((line, index) => index === 7 || line.values.some((value) => value > 0)),
  },
  { id: "failure-rate", title: "Failure rate", unit: "of requests, by model", show: format.percent, top: (high) => Math.min(100, Math.max(1, high * 1.1)), lines: perModel("failed") },
  { id: "queues", title: "Waiting or running", unit: "requests, by model", show: format.number, whole: true, lines: perModel("depth") },
  { id: "batches", title: "Batch size", unit: "elements per execution, by model", show: format.number, lines: perModel("batch") },
  {
    id: "stages", title: "Time in the executor", unit: "average of a request", show: format.milliseconds,
    lines: columns("total", { queue: "in the queue", compute: "computing" }),
  },
  {
    id: "cpu", title: "CPU", unit: "100 % is one core", show: format.percent,
    lines: columns("system", { cpu_http: "HTTP", cpu_grpc: "gRPC", cpu_executor: "executors", cpu_coordinator: "coordinator", cpu_supervisor: "supervisor" }),
  },
  {
    id: "memory", title: "Memory", unit: "bytes", show: format.bytes,
    lines: columns("system", { memory: "of processes", pool_used: "shared pool" }),
  },
  { id: "copied", title: "Copied tensor bytes", unit: "per second, by stage", show: format.bytes, lines: columns("total", { copied_in: "in", copied_batch: "batch", copied_out: "out", copied_device: "device" }) },
  { id: "slots", title: "Slots in use", unit: "tensors in shared memory", show: format.number, whole: true, lines: columns("system", { slots: "slots", abandoned: "abandoned requests" }) },
  { id: "regions", title: "Client memory", unit: "registered bytes", show: format.bytes, lines: columns("system", { region_bytes: "regions" }) },
  { id: "connections", title: "Connections", unit: "of clients", show: format.number, whole: true, lines: columns("system", { connections: "open" }) },
];

const perGpu = (name) => (data) => data.gpus.map((gpu) => ({ label: `GPU ${gpu.index}`, colour: gpu.index, values: series.column(gpuKey(gpu), name) }));

const GPU_CHARTS = [
  { id: "gpu-utilization", title: "GPU utilisation", unit: "time in which anything ran", show: format.percent, top: () => 105, lines: perGpu("utilization") },
  { id: "gpu-memory", title: "GPU memory", unit: "bytes in use", show: format.bytes, lines: perGpu("memory") },
  { id: "gpu-temperature", title: "GPU temperature", unit: "degrees Celsius", show: format.degrees, lines: perGpu("temperature") },
  { id: "gpu-power", title: "GPU power", unit: "watts", show: format.watts, lines: perGpu("power") },
];

const hues = new Map(); // a model keeps its colour

function hue(model) {
  const key = modelKey(model);
  if (!hues.has(key)) hues.set(key, hues.size);
  return hues.get(key);
}

const title = (model) => (model.only ? model.name : `${model.name} ${model.version}`);

/** The models that have lines: all, or the busiest of what is shown. */
function shown(data) {
  const busy = (model) => series.sum(modelKey(model), "requests");
  const known = data.models.filter((model) => series.tracks.has(modelKey(model)) && model.version && (model.state !== "UNLOADED" || busy(model)));
  if (known.length <= MAX_LINES) return known;
  return known.sort((a, b) => busy(b) - busy(a)).slice(0, MAX_LINES);
}

/** Answered requests by bucket, in the newest `points` of what is shown. */
const buckets = (points) => [...bounds, null].map((_, index) => series.sum("total", `bucket_${index}`, points));

function histogram() {
  const counts = buckets();
  const all = counts.reduce((total, count) => total + count, 0);
  return [{ label: "requests", colour: 0, values: counts.map((count) => (all ? (100 * count) / all : 0)) }];
}

function share(value, at) {
  if (at === null) return "in the time shown";
  const from = at ? format.milliseconds(bounds[at - 1]) : "0";
  const to = at < bounds.length ? `to ${format.milliseconds(bounds[at])}` : "or more";
  return `${format.percent(value)} took ${from} ${to}`;
}

/** Marks between bars, where a power of ten is the bound. */
function decades() {
  return new Map(bounds.flatMap((bound, index) => (Number.isInteger(Math.log10(bound)) ? [[index + 0.5, bound >= 1000 ? `${bound / 1000} s` : `${bound} ms`]] : [])));
}

function drawCharts(data) {
  const end = series.times.at(-1) ?? 0;
  const span = [end - (data.points - (data.running ? 0 : 1)) * data.seconds, end];
  const view = { level, span, none: data.age_s < end - span[0] ? "nothing yet" : "nothing in this time" };
  for (const spec of CHARTS) {
    const bars = spec.id === "distribution";
    const chart = chartOf(spec.id, element("charts"), () => (bars ? { ...spec, ticks: decades() } : spec));
    const lines = spec.lines(data);
    const times = bars ? lines[0].values.map((_, index) => index) : series.times;
    chart.draw(times, lines, bars ? { ...view, span: [-0.7, bounds.length + 0.7] } : view);
  }
  drawGpus(data, view);
  drawValues(data, view);
}

function drawGpus(data, view) {
  element("gpus-section").hidden = !data.gpus.length;
  if (!data.gpus.length) return;
  for (const spec of GPU_CHARTS) {
    chartOf(spec.id, element("gpu-charts"), () => spec).draw(series.times, spec.lines(data), view);
  }
}

function drawValues(data, view) {
  const wanted = data.values.slice(0, MAX_VALUE_CHARTS);
  element("values-section").hidden = !wanted.length;
  const ids = new Set();
  for (const value of wanted) {
    const key = valueKey(value);
    const names = value.kind === "cdf" ? { p50: "50 %", p90: "90 %", p99: "99 %" } : { value: KINDS[value.kind] };
    ids.add(key);
    const unit = `${value.model} ${value.version}`;
    const chart = chartOf(key, element("values"), () => ({ title: value.name, unit, show: format.number }));
    chart.draw(series.times, columns(key, names)(), view);
  }
  for (const [id, chart] of charts) {
    if (id.startsWith("[") && !ids.has(id)) {
      chart.remove();
      charts.delete(id);
    }
  }
}

const KINDS = { avg: "average", max: "maximum", min: "minimum", inc: "sum of a second" };

function chartOf(id, parent, spec) {
  if (!charts.has(id)) charts.set(id, new Chart(parent, spec()));
  return charts.get(id);
}

// ------------------------------------------------------------- numbers

/** Milliseconds within which `percent` of these requests were answered, as the server estimates it. */
function quantile(percent, counts, top) {
  let remaining = (percent / 100) * counts.reduce((total, count) => total + count, 0);
  for (const [index, count] of counts.entries()) {
    const low = index ? bounds[index - 1] : 0;
    const high = Math.max(low, Math.min(bounds[index] ?? top, top));
    if (count && remaining <= count) return low + ((high - low) * remaining) / count;
    remaining -= count;
  }
  return null;
}

function drawTiles(data) {
  const points = level === "second" ? RECENT : 1;
  const total = (name, ...weights) => series.mean("total", name, points, ...weights);
  const system = (name) => series.mean("system", name, points);
  const requests = series.column("total", "requests");
  const answered = requests.map((count, at) => count * (1 - series.column("total", "failed")[at] / 100));
  const counts = buckets(points);
  const slowest = series.column("total", "latency_max").slice(-points).filter((value) => value !== null);
  const top = slowest.length ? Math.max(...slowest) : null;
  const failed = total("failed", requests);
  const tiles = [
    ["Requests", format.number(total("requests")), "/s", `${format.percent(failed)} failed`, failed > 1 ? "bad" : ""],
    ["Latency, average", ...split(format.milliseconds(total("latency_avg", answered))), `50 %: ${format.milliseconds(quantile(50, counts, top))}`],
    ["Latency, 99 %", ...split(format.milliseconds(quantile(99, counts, top))), `max ≤ ${format.milliseconds(top)}`],
    ["In progress", format.number(total("depth")), "", `batch size: ${format.number(total("batch", series.column("total", "executions")))}`],
    ["CPU", ...split(format.percent(system("cpu"))), `of ${100 * data.processors} %`],
    ["Process memory", ...split(format.bytes(system("memory"))), `with pool ${format.percent(system("memory_percent"))} of RAM`],
    ["Shared pool", ...split(format.bytes(system("pool_used"))), `of ${format.bytes(data.pool_bytes)}`],
    ["Copied", ...split(format.bytes(total("copied"))), "per second"],
  ];
  const boxes = tiles.map(([name, value, unit, more, mark]) => {
    const box = document.createElement("div");
    box.append(made("dt", name));
    const shown = box.appendChild(made("dd", `${value} `, "value"));
    shown.append(made("small", unit));
    box.append(made("dd", more, `more ${mark ?? ""}`));
    return box;
  });
  put(element("tiles"), boxes);
  element("now-title").textContent = NOW[level];
}

const split = (text) => (text.includes(" ") ? text.split(" ") : [text, ""]);

function drawHead(data) {
  const { name, version, state } = data.server;
  element("server").textContent = name;
  document.title = `${name}: ${format.number(series.mean("total", "requests", level === "second" ? RECENT : 1))} requests/s`;
  element("about").textContent = `shmserve ${version}, history of ${format.duration(data.age_s)}`;
  const badge = element("state");
  badge.textContent = state;
  badge.className = `badge ${{ ready: "good", draining: "warn" }[state] ?? "bad"}`;
}

// --------------------------------------------------------------------- the loop

function show(data) {
  bounds = data.bounds_ms;
  for (const model of data.models) {
    model.only = data.models.filter((other) => other.name === model.name).length === 1;
  }
  series.add(data);
  drawHead(data);
  drawTiles(data);
  drawCharts(data);
  drawTables(data, series);
  latest = data;
}

function problem(text) {
  const box = element("problem");
  box.hidden = !text;
  if (box.textContent !== text) box.textContent = text;
}

async function ask() {
  const asked = level;
  const url = new URL(`../data?${series.query(asked)}`, import.meta.url);
  let answer;
  try {
    answer = await fetch(url, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
  } catch {
    problem("The server does not answer. Trying again every second.");
    return;
  }
  const data = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    problem(`No numbers right now: ${data.error ?? answer.status}. Requests are served meanwhile; trying again every second.`);
    return;
  }
  if (asked !== level) return;
  problem("");
  show(data);
}

async function loop() {
  for (;;) {
    const begun = performance.now();
    if (!document.hidden) await ask();
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, Math.max(50, POLL_MS - (performance.now() - begun)));
    });
  }
}

let wake = () => {};
element("levels").addEventListener("change", (event) => {
  level = event.target.value;
  wake();
});
listen(() => drawTables(latest, series));
document.addEventListener("visibilitychange", () => wake());
level = document.querySelector("#levels input:checked").value; // as the browser remembers it
loop();
