// The page's tables. On a narrow screen every row becomes a card whose cells name themselves; the
// roles are said because a table that is laid out otherwise loses them.

import * as format from "./format.js";
import { gpuKey, modelKey } from "./series.js";

const ROLES = { http: "HTTP worker", grpc: "gRPC process" };
const STATES = { READY: "good", LOADING: "warn", UNLOADING: "warn", UNAVAILABLE: "bad" };
const SHOWN = 8; // rows of a long table that are not folded away
const open = new Set(); // what is unfolded

export function made(tag, text, className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

/** Make `old` like `next`. What has not changed stays: it may be selected, or have the focus. */
function become(old, next) {
  if (old.isEqualNode(next)) return;
  if (old.nodeType !== Node.ELEMENT_NODE || old.nodeName !== next.nodeName) {
    old.replaceWith(next);
    return;
  }
  for (const name of old.getAttributeNames()) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const name of next.getAttributeNames()) old.setAttribute(name, next.getAttribute(name));
  put(old, [...next.childNodes]);
}

/** Let `parent` have these children. The node of a child with a key is the one with that key, so it
 * keeps the focus when nodes above come and go; the node of another child is the one at its place. */
export function put(parent, children) {
  const keys = new Set(children.map(keyOf));
  [...parent.childNodes].filter((node) => !keys.has(keyOf(node))).forEach((node) => node.remove());
  const keyed = new Map([...parent.childNodes].map((node) => [keyOf(node), node]));
  children.forEach((node, index) => {
    const key = keyOf(node);
    const there = parent.childNodes[index] ?? null;
    const old = key ? keyed.get(key) : there;
    if (!old || keyOf(old) !== key) {
      parent.insertBefore(node, there);
      return;
    }
    if (old !== there) parent.insertBefore(old, there);
    become(old, node);
  });
  [...parent.childNodes].slice(children.length).forEach((node) => node.remove());
}

const keyOf = (node) => node.dataset?.key ?? "";

const right = (text) => [text, "number"];

function row(cells, className = "", key = "") {
  const node = document.createElement("tr");
  node.setAttribute("role", "row");
  if (key) node.dataset.key = key;
  if (className) node.className = className;
  node.append(...cells);
  return node;
}

function cell(content, tag, role) {
  const node = Array.isArray(content) ? made(tag, ...content) : made(tag, content);
  node.setAttribute("role", role);
  return node;
}

/** A row with one cell as wide as the table. */
function wide(heads, content, className, key) {
  const node = cell(["", "text"], "td", "cell");
  node.colSpan = heads.length;
  node.append(content);
  return row([node], className, key);
}

/** A button that unfolds what `key` stands for, and folds it away again. */
function fold(key, text) {
  const node = made("button", text);
  node.type = "button";
  node.dataset.open = JSON.stringify(key);
  node.setAttribute("aria-expanded", open.has(node.dataset.open));
  return node;
}

const unfolded = (key) => open.has(JSON.stringify(key));

/** Call `redraw` after something was unfolded or folded away. */
export function listen(redraw) {
  document.addEventListener("click", (event) => {
    const key = event.target.closest("[data-open]")?.dataset.open;
    if (!key) return;
    if (!open.delete(key)) open.add(key);
    redraw();
  });
}

/** A row. Cells: text, or [text, class]; the first is the row's heading. */
function line(heads, cells) {
  return row(cells.map((content, index) => {
    const node = index ? cell(content, "td", "cell") : cell(content, "th", "rowheader");
    node.dataset.head = [heads[index]].flat()[0];
    if (node.textContent === format.NONE) node.classList.add("none");
    return node;
  }));
}

/** A table of these nodes. */
function fill(id, heads, lines, caption) {
  const top = row(heads.map((head) => cell(head, "th", "columnheader")));
  const parts = [["thead", [top]], ["tbody", lines]].map(([tag, children]) => {
    const group = document.createElement(tag);
    group.setAttribute("role", "rowgroup");
    group.append(...children);
    return group;
  });
  if (caption) parts.unshift(made("caption", caption));
  put(document.getElementById(id), parts);
}

/** A table of rows of cells: the first ones, and the others if they are unfolded. */
function table(id, heads, rows, caption) {
  const lines = (some) => some.map((cells) => line(heads, cells));
  const rest = rows.slice(SHOWN);
  const folded = rest.length > 1 ? [wide(heads, fold([id], `${format.count(rest.length)} more`)), ...(unfolded([id]) ? lines(rest) : [])] : lines(rest);
  fill(id, heads, [...lines(rows.slice(0, SHOWN)), ...folded], caption);
}

/** All tables, from an answer and the series that are held. */
export function drawTables(data, series) {
  drawModels(data, series);
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

const MODEL_HEADS = ["Model", "Version", "State", ...["Per second", "Failed", "Average", "99\u00a0%", "In progress", "In\u00a0all"].map(right)];

function drawModels(data, series) {
  const gone = data.server.state === "starting" ? [] : data.models.filter((model) => model.state === "UNLOADED");
  const lines = (models) => models.flatMap((model) => modelLines(model, series));
  const there = lines(data.models.filter((model) => !gone.includes(model)));
  const folded = gone.length ? [wide(MODEL_HEADS, fold(["gone"], `${format.count(gone.length)} ${gone.length > 1 ? "models" : "model"} no longer in the repository, or not loaded`), "", "gone")] : [];
  if (unfolded(["gone"])) folded.push(...lines(gone));
  fill("models", MODEL_HEADS, [...there, ...folded], data.models.length ? "" : "No models.");
}

/** A model's row, why it is in its state, and the rest of its numbers if they are unfolded. */
function modelLines(model, series) {
  const key = modelKey(model);
  const shown = (name, show) => show(series.last(key, name));
  const last = (name, show) => right(shown(name, show));
  const mark = STATES[model.state] ?? "";
  const idle = ([text]) => [text, text === "0" ? "number none" : "number"]; // left out of cards
  const main = line(MODEL_HEADS, [
    "", model.version, [model.state, mark],
    idle(last("requests", format.number)), last("failed", format.percent), last("latency_avg", format.milliseconds), last("latency_p99", format.milliseconds),
    idle(last("depth", format.number)), idle(right(format.count(model.requests))),
  ]);
  main.firstChild.append(fold([key], model.name));
  main.dataset.key = key;
  const lines = [main];
  if (model.reason) lines.push(wide(MODEL_HEADS, made("span", model.reason, mark), "below", `${key} reason`));
  if (!unfolded([key])) return lines;
  const more = document.createElement("dl");
  for (const [name, value] of [
    ["Instances", format.count(model.instances)], ["50 %", shown("latency_p50", format.milliseconds)], ["Maximum\u00a0≤", shown("latency_max", format.milliseconds)],
    ["Batch", shown("batch", format.number)], ["CPU", shown("cpu", format.percent)], ["Memory", shown("memory", format.bytes)], ["Failed in all", format.count(model.failed)],
  ]) {
    const pair = more.appendChild(document.createElement("div"));
    pair.append(made("dt", name), made("dd", value));
  }
  return [...lines, wide(MODEL_HEADS, more, "below", `${key} more`)];
}
