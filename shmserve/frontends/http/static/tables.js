// The page's tables. On a narrow screen every row becomes a card whose cells name themselves; the
// roles are said because a table that is laid out otherwise loses them.

import * as format from "./format.js";
import { gpuKey, modelKey } from "./series.js";

const ROLES = { http: "HTTP worker", grpc: "gRPC process" };
const STATES = { READY: "good", LOADING: "warn", UNLOADING: "warn", UNAVAILABLE: "bad" };
const contents = new Map(); // of tables: what has not changed may stay selected

export function made(tag, text, className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

const right = (text) => [text, "number"];

/** Cells: text, or [text, class]; the first of a row is its heading. */
function table(id, heads, rows, caption) {
  const content = JSON.stringify([rows, caption]);
  if (contents.get(id) === content) return;
  contents.set(id, content);
  const cell = (content, tag, role) => {
    const node = Array.isArray(content) ? made(tag, ...content) : made(tag, content);
    node.setAttribute("role", role);
    return node;
  };
  const line = (cells) => {
    const node = document.createElement("tr");
    node.setAttribute("role", "row");
    node.append(...cells);
    return node;
  };
  const top = heads.map((head) => cell(head, "th", "columnheader"));
  const lines = rows.map((cells) => line(cells.map((content, index) => {
    const node = index ? cell(content, "td", "cell") : cell(content, "th", "rowheader");
    node.dataset.head = top[index].textContent;
    return node;
  })));
  const parts = [["thead", [line(top)]], ["tbody", lines]].map(([tag, children]) => {
    const group = document.createElement(tag);
    group.setAttribute("role", "rowgroup");
    group.append(...children);
    return group;
  });
  if (caption) parts.unshift(made("caption", caption));
  const node = document.getElementById(id);
  node.setAttribute("role", "table");
  node.replaceChildren(...parts);
}

/** All tables, from an answer and the series that are held. */
export function drawTables(data, series) {
  table(
    "models",
    ["Model", "Version", "State", ...["Instances", "Per second", "Failed", "Average", "50 %", "99 %", "Maximum\u00a0≤", "In progress", "Batch", "CPU", "Memory", "In all", "Failed in all"].map(right)],
    data.models.map((model) => modelRow(model, series)),
    data.models.length ? "" : "No models.",
  );
  table(
    "gpus",
    ["GPU", "Name", ...["Utilisation", "Memory used", "Memory", "Temperature", "Power", "Power limit"].map(right)],
    data.gpus.map((gpu) => gpuRow(gpu, series)),
  );
  table("troubles", ["When", "What", "Error", right("Times")], data.troubles.map((entry) => [
    when(entry.last, data.now), [entry.what, "wide"], [entry.said ? `${entry.text}: ${entry.said}` : entry.text, "text"], right(format.count(entry.count)),
  ]), data.troubles.length ? "" : "None since the coordinator started.");
  const lives = Object.entries(data.starts).map(([role, starts]) => `${ROLES[role] ?? role}: ${starts} started, ${data.ends[role] ?? 0} ended`);
  table("processes", ["Process", "Instance", right("Up"), right("CPU"), right("Memory")], data.processes.map((process) => [
    ROLES[process.role] ?? process.role, [process.instance, "wide"], right(format.duration(process.up_s)), right(format.percent(process.cpu_percent)), right(format.bytes(process.private_bytes)),
  ]), lives.join(" · "));
  table("resources", ["Resource", "Device", right("Held"), right("Of"), "Held by", "Waiting, the next first"], data.resources.map((use) => [
    use.name, use.device || "all", right(format.count(use.held)), right(format.count(use.count)), [use.holders.join(", "), "wide"], [use.waiting.join(", "), "wide"],
  ]));
  document.getElementById("resources-section").hidden = !data.resources.length;
  const cached = data.models.filter((model) => model.cache_hits + model.cache_misses);
  table("cache", ["Model", "Version", right("Hits"), right("Misses"), right("Hit rate")], cached.map((model) => [
    model.name, model.version, right(format.count(model.cache_hits)), right(format.count(model.cache_misses)),
    right(format.percent((100 * model.cache_hits) / (model.cache_hits + model.cache_misses))),
  ]), `${format.bytes(data.cache_bytes)} kept by all processes`);
  document.getElementById("cache-section").hidden = !cached.length;
  table("regions", ["Kind", right("Regions"), right("Bytes"), right("Quarantined")], data.regions.map((kind) => [
    kind.kind, right(format.count(kind.regions)), right(format.bytes(kind.nbytes)), right(format.count(kind.quarantined)),
  ]), data.regions.length ? "" : "No client has registered memory.");
}

function gpuRow(gpu, series) {
  const last = (name, show) => right(show(series.last(gpuKey(gpu), name)));
  return [
    format.count(gpu.index), gpu.name, last("utilization", format.percent), last("memory", format.bytes), right(format.bytes(gpu.memory_total)),
    last("temperature", format.degrees), last("power", format.watts), right(format.watts(gpu.power_limit)),
  ];
}

/** A clock time, with its day unless that is within the last twelve hours. */
function when(seconds, now) {
  const day = now - seconds < 43200 ? "" : `${format.moment(seconds, "day")} `;
  return day + format.moment(seconds, "second");
}

function modelRow(model, series) {
  const last = (name, show) => right(show(series.last(modelKey(model), name)));
  const mark = STATES[model.state] ?? "";
  const state = model.reason ? [`${model.state}: ${model.reason}`, `${mark} text`] : [model.state, mark];
  return [
    model.name, model.version, state, right(format.count(model.instances)),
    last("requests", format.number), last("failed", format.percent),
    ...["latency_avg", "latency_p50", "latency_p99", "latency_max"].map((name) => last(name, format.milliseconds)),
    last("depth", format.number), last("batch", format.number), last("cpu", format.percent), last("memory", format.bytes),
    right(format.count(model.requests)), right(format.count(model.failed)),
  ];
}
