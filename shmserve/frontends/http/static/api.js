// The page of the HTTP API: shows the server's openapi.json, and sends GET requests that read.

import { made } from "./tables.js";

const PATIENCE_MS = 8000;
const SHOWN = 20000; // characters of an answer
const DEEP = 6; // objects within objects, in an example
const ROOT = new URL("../../", import.meta.url);
const SEGMENT = "(?!\\.{1,2}$).+"; // "." and ".." would make another path

let api = null; // the document

const element = (id) => document.getElementById(id);

function grown(parent, tag, text = "", className = "") {
  return parent.appendChild(made(tag, text, className));
}

// -------------------------------------------------------------------- schemas

const named = (schema) => schema.$ref?.split("/").at(-1);
const whole = (schema) => (schema.$ref ? api.components.schemas[named(schema)] : schema);
const choices = (schema) => schema.anyOf ?? schema.oneOf;

/** A schema's type in a few words. */
function type(schema) {
  if (schema.$ref) return named(schema);
  if (choices(schema)) return choices(schema).map(type).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `array of ${type(schema.items ?? {})}`;
  const values = schema.additionalProperties;
  return typeof values === "object" ? `object of ${type(values)}` : (schema.type ?? "anything");
}

/** The object whose fields a schema lists: its own, or that of its elements or choices. */
function fields(schema) {
  const full = whole(schema);
  if (full.properties) return full;
  const inner = full.items ?? choices(full)?.find((choice) => fields(choice)) ?? full.additionalProperties;
  return inner && typeof inner === "object" ? fields(inner) : null;
}

/** Append a schema's fields, and theirs, but each object only once. */
function describe(parent, schema, seen = new Set()) {
  const full = fields(schema);
  if (!full || seen.has(full)) return;
  seen.add(full);
  if (full.description) grown(parent, "p", full.description, "quiet");
  const list = grown(parent, "ul");
  for (const [name, field] of Object.entries(full.properties)) {
    const item = grown(list, "li");
    grown(item, "code", name);
    const needed = full.required?.includes(name) ? ", required" : "";
    const preset = "default" in field ? `, default ${JSON.stringify(field.default)}` : "";
    grown(item, "span", ` ${type(field)}${needed}${preset}`, "quiet");
    describe(item, field, seen);
  }
}

/** A value as a schema has it; without `all`, of an object only what is required. */
function sample(schema, all, depth = 0) {
  const full = whole(schema);
  if ("default" in full) return full.default;
  if ("const" in full) return full.const;
  if (full.enum) return full.enum[0];
  if (choices(full)) return sample(choices(full)[0], all, depth);
  if (full.type === "array") return depth < DEEP && full.items && Object.keys(full.items).length ? [sample(full.items, all, depth + 1)] : [];
  if (full.type === "object") {
    const found = Object.entries(full.properties ?? {}).filter(([name]) => depth < DEEP && (all || full.required?.includes(name)));
    return Object.fromEntries(found.map(([name, field]) => [name, sample(field, all, depth + 1)]));
  }
  return { string: "", integer: 0, number: 0, boolean: false }[full.type] ?? null;
}

const pretty = (value) => JSON.stringify(value, null, 2);

/** Append what a body or an answer consists of. Return an example of its JSON, if it has some. */
function content(parent, types, all) {
  let example;
  for (const [media, { schema, example: given }] of Object.entries(types ?? {})) {
    const line = grown(parent, "p");
    grown(line, "code", media);
    if (!schema) continue;
    grown(line, "span", ` ${type(schema)}`, "quiet");
    describe(parent, schema);
    example = given ?? sample(schema, all);
    if (fields(schema)) grown(parent, "pre", pretty(example));
  }
  return example;
}

// ----------------------------------------------------------------- operations

function show(parent, path, method, operation, parameters) {
  grown(parent, "p", `Right: ${operation["x-action"]}`, "quiet");
  if (parameters.length) {
    grown(parent, "h3", "Parameters");
    const list = grown(parent, "ul");
    for (const parameter of parameters) {
      const item = grown(list, "li");
      grown(item, "code", parameter.name);
      const needed = parameter.required ? ", required" : "";
      grown(item, "span", ` ${type(parameter.schema)} in the ${parameter.in}${needed}. ${parameter.description ?? ""}`, "quiet");
    }
  }
  if (method === "GET" && operation["x-action"] === "use") form(parent, path, parameters);
  let example;
  if (operation.requestBody) {
    grown(parent, "h3", `Body, ${operation.requestBody.required ? "required" : "may be left out"}`);
    example = content(parent, operation.requestBody.content, false);
  }
  const data = example === undefined ? "" : ` -d '${JSON.stringify(example).replaceAll("'", "'\\''")}'`;
  grown(parent, "h3", "With curl");
  grown(parent, "pre", `curl ${method === "GET" ? "" : `-X ${method} `}'${new URL(path.slice(1), ROOT).href.replace(/%7B|%7D/g, decodeURI)}'${data}`);
  for (const [status, answer] of Object.entries(operation.responses)) {
    if (status === "default") {
      const kinds = Object.entries(answer.content ?? {}).map(([media, { schema }]) => `: ${media} ${schema ? type(schema) : ""}`);
      grown(parent, "h3", `Any other answer${kinds.join()}`);
    } else {
      grown(parent, "h3", `Answer ${status}`);
      content(parent, answer.content, true);
    }
  }
}

/** A form that sends a GET request. */
function form(parent, path, parameters) {
  grown(parent, "h3", "Try");
  const node = grown(parent, "form");
  const inputs = parameters.map((parameter) => {
    const input = grown(grown(node, "label", parameter.name), "input");
    input.required = parameter.required ?? false;
    if (parameter.in === "path") input.pattern = SEGMENT;
    return [parameter, input];
  });
  grown(node, "button", "Send");
  const output = grown(parent, "pre");
  output.hidden = true;
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    let filled = path.slice(1);
    const query = new URLSearchParams();
    for (const [{ name, in: place }, { value }] of inputs) {
      if (place === "path") filled = filled.replace(`{${name}}`, () => encodeURIComponent(value));
      else if (place === "query" && value) query.set(name, value);
    }
    const url = new URL(filled, ROOT);
    url.search = query;
    output.hidden = false;
    output.textContent = await answered(url);
  });
}

/** The beginning of an answer, as text. */
async function answered(url) {
  try {
    const answer = await fetch(url, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store", redirect: "error" });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    let end = false;
    while (!end && text.length <= SHOWN) {
      const { value = "", done } = await reader.read();
      text += value;
      end = done;
    }
    if (!end) await reader.cancel();
    const head = `${answer.status} ${answer.headers.get("Content-Type") ?? ""}`;
    if (text.length > SHOWN) return `${head}, its first ${SHOWN} characters\n${text.slice(0, SHOWN)}`;
    try {
      text = pretty(JSON.parse(text));
    } catch {
      // not JSON: shown as it came
    }
    return `${head}\n${text}`;
  } catch (error) {
    return `No answer: ${error.message}`;
  }
}

// ----------------------------------------------------------------------- page

/** A line that unfolds; `fill` makes its content when it is first seen. */
function folded(parent, id, parts, fill) {
  const details = grown(parent, "details");
  details.id = id;
  grown(details, "summary").append(...parts.flatMap((part) => [part, " "]));
  details.addEventListener("toggle", () => fill(grown(details, "div")), { once: true });
}

function draw() {
  element("server").textContent = `HTTP API of ${api.info.title}`;
  document.title = `HTTP API of ${api.info.title}`;
  element("about").textContent = `shmserve ${api.info.version}`;
  element("description").textContent = api.info.description;
  const tags = new Map();
  for (const { name } of api.tags) tags.set(name, grown(element("api"), "section"));
  for (const [path, { parameters: common = [], ...methods }] of Object.entries(api.paths)) {
    for (const [name, operation] of Object.entries(methods)) {
      if (name === "head" && methods.get) continue;
      const [tag] = operation.tags;
      const section = tags.get(tag);
      if (!section.firstChild) grown(section, "h2", tag);
      const method = name.toUpperCase();
      const parts = [made("b", method, method), made("code", path), made("span", operation.summary, "quiet")];
      folded(section, operation.operationId, parts, (body) => show(body, path, method, operation, [...common, ...(operation.parameters ?? [])]));
    }
  }
  const section = grown(element("api"), "section");
  grown(section, "h2", "Schemas");
  for (const name of Object.keys(api.components.schemas).sort()) {
    folded(section, `schema-${name}`, [made("code", name)], (body) => describe(body, { $ref: `#/components/schemas/${name}` }));
  }
}

try {
  const answer = await fetch(new URL("openapi.json", ROOT), { signal: AbortSignal.timeout(PATIENCE_MS) });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? answer.status);
  api = found;
  draw();
} catch (error) {
  element("problem").hidden = false;
  element("problem").textContent = `The API's document did not come: ${error.message}`;
}
