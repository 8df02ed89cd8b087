// grpc-js as a client: `client.js HOST:PORT CELL MESSAGES IDLE_S`, with PROTO_PATH for the .proto files.
"use strict";

const assert = require("node:assert");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const reflection = require("grpc-reflection-js");

const [target, cell, messages, idle] = process.argv.slice(2);
const OPTIONS = { keepCase: true, longs: Number, defaults: true, oneofs: true };
const CHANNEL = {
  "grpc.max_receive_message_length": -1,
  "grpc.keepalive_time_ms": 10000,
  "grpc.keepalive_permit_without_calls": 1,
  "grpc.max_reconnect_backoff_ms": 500,
};
const insecure = grpc.credentials.createInsecure();
const proto = loader.loadSync("grpc_service.proto", { ...OPTIONS, includeDirs: [process.env.PROTO_PATH] });
const Service = grpc.loadPackageDefinition(proto).inference.GRPCInferenceService;
const client = new Service(target, insecure, CHANNEL);

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const upTo = (count) => Int32Array.from({ length: count }, (_, i) => i);
const within = (ms = 600000) => ({ deadline: Date.now() + ms });

function request(model, values, parameters = {}) {
  const numbers = Int32Array.from(values);
  const input = { name: "INPUT0", datatype: "INT32", shape: [1, numbers.length] };
  return { model_name: model, inputs: [input], raw_input_contents: [Buffer.from(numbers.buffer)], parameters };
}

function call(method, asked, options = within(), metadata = new grpc.Metadata(), started = () => {}) {
  return new Promise((resolve, reject) =>
    started(client[method](asked, metadata, options, (error, answer) => (error ? reject(error) : resolve(answer)))),
  );
}

async function infer(values, model = "identity", options = within(), metadata = new grpc.Metadata()) {
  const asked = request(model, values);
  const answer = await call("ModelInfer", asked, options, metadata);
  assert.ok(answer.raw_output_contents[0].equals(asked.raw_input_contents[0]), "another answer");
}

function open(metadata = new grpc.Metadata()) {
  const stream = client.ModelStreamInfer(metadata, within(600000 + 1000 * idle));
  const answers = [];
  stream.ended = new Promise((resolve, reject) => stream.on("end", () => resolve(answers)).on("error", reject));
  stream.ended.catch(() => {});
  stream.first = new Promise((resolve) => stream.once("data", resolve));
  stream.on("data", (message) => {
    if (message.error_message) stream.destroy(new Error(message.error_message));
    const raw = message.infer_response?.raw_output_contents ?? [];
    if (raw.length) answers.push(raw[0].readInt32LE(0));
  });
  return stream;
}

async function counted(stream, count) {
  stream.end();
  assert.deepEqual(await stream.ended, [...Array(count).keys()]);
}

async function told(part, metadata) {
  const answer = await call("ModelInfer", request("told", [1]), within(), metadata);
  assert.ok(answer.raw_output_contents[0].includes(part), "metadata did not arrive");
}

const cells = {
  async unary() {
    await infer(upTo(1024));
    await infer(upTo(4 << 20));
  },
  async parallel() {
    const caller = async () => {
      for (let n = 0; n < 10; n++) await infer(upTo(1024));
    };
    await Promise.all(Array.from({ length: 50 }, caller));
  },
  async stream() {
    const stream = open();
    for (let n = 0; n < messages; n++)
      if (!stream.write(request("identity", [n])))
        await Promise.race([stream.ended, new Promise((resolve) => stream.once("drain", resolve))]);
    await counted(stream, Number(messages));
  },
  async decoupled() {
    const stream = open();
    stream.write(request("count", [1000, 0]));
    await counted(stream, 1000);
  },
  async sequence() {
    const stream = open();
    const id = { int64_param: Date.now() * 1000 };
    for (let n = 0; n < 10; n++) {
      const ends = { sequence_start: { bool_param: n === 0 }, sequence_end: { bool_param: n === 9 } };
      stream.write(request("sum", [n], { sequence_id: id, ...ends }));
    }
    stream.end();
    assert.equal((await stream.ended).pop(), 45);
  },
  async metadata() {
    const metadata = new grpc.Metadata();
    metadata.set("x-long", "a".repeat(8192));
    metadata.set("x-interop-bin", Buffer.from([0, 1, 254, 255]));
    await told("a".repeat(8192), metadata);
  },
  async blanks() {
    const metadata = new grpc.Metadata();
    metadata.set("x-blanks", " both ends ");
    await told("both ends", metadata);
  },
  async deadline() {
    const late = call("ModelInfer", request("slow", [2000]), within(200));
    await assert.rejects(late, { code: grpc.status.DEADLINE_EXCEEDED });
    await infer([1]);
  },
  async cancel() {
    const stream = open();
    stream.write(request("count", [1000, 20]));
    await stream.first;
    stream.cancel();
    await assert.rejects(stream.ended, { code: grpc.status.CANCELLED });
    const soon = (started) => setTimeout(() => started.cancel(), 200);
    const waiting = call("ModelInfer", request("slow", [2000]), within(), new grpc.Metadata(), soon);
    await assert.rejects(waiting, { code: grpc.status.CANCELLED });
    await infer([1]);
  },
  async half_close() {
    const stream = open();
    for (let n = 0; n < 3; n++) stream.write(request("identity", [n]));
    await counted(stream, 3);
    await counted(open(), 0);
  },
  async gzip() {
    const metadata = new grpc.Metadata();
    metadata.set("grpc-encoding", "gzip"); // grpc-js compresses what says so
    await infer(upTo(65536), "identity", within(), metadata);
    const stream = open(metadata);
    for (let n = 0; n < 3; n++) stream.write(request("identity", [n]));
    await counted(stream, 3);
  },
  async errors() {
    const nosuch = call("ModelInfer", request("nosuch", [1]));
    await assert.rejects(nosuch, { code: grpc.status.NOT_FOUND, details: /nosuch/ });
    const path = "/inference.GRPCInferenceService/NoSuch";
    const bytes = (given) => given;
    const unknown = new Promise((resolve, reject) =>
      client.makeUnaryRequest(path, bytes, bytes, Buffer.alloc(0), (error) => (error ? reject(error) : resolve())),
    );
    await assert.rejects(unknown, { code: grpc.status.UNIMPLEMENTED });
  },
  async reflection() {
    const services = await new reflection.Client(target, insecure).listServices();
    assert.ok(services.includes("inference.GRPCInferenceService"), services);
  },
  async health() {
    const root = await new reflection.Client(target, insecure).fileContainingSymbol("grpc.health.v1.Health");
    const loaded = grpc.loadPackageDefinition(loader.fromJSON(root.toJSON(), { ...OPTIONS, enums: String }));
    const health = new loaded.grpc.health.v1.Health(target, insecure);
    const check = (service) =>
      new Promise((resolve, reject) =>
        health.Check({ service }, (error, answer) => (error ? reject(error) : resolve(answer.status))),
      );
    assert.equal(await check(""), "SERVING");
    await assert.rejects(check("nosuch"), { code: grpc.status.NOT_FOUND });
    const watch = health.Watch({ service: "" }).on("error", () => {}); // cancelled below
    assert.equal((await new Promise((resolve) => watch.once("data", resolve))).status, "SERVING");
    watch.cancel();
  },
  async idle() {
    const stream = open();
    stream.write(request("identity", [0]));
    await stream.first;
    await sleep(500 * idle);
    stream.write(request("identity", [1]));
    await counted(stream, 2);
    await sleep(500 * idle);
    await infer([1]);
  },
  async drain() {
    const slow = Array.from({ length: 5 }, () => infer([3000], "slow"));
    const stream = open();
    stream.write(request("count", [100, 30]));
    await stream.first;
    await sleep(1000);
    console.log("running");
    await Promise.all([counted(stream, 100), ...slow]);
    const waiting = new grpc.Metadata();
    waiting.setOptions({ waitForReady: true });
    for (const end = Date.now() + 120000; ; await sleep(100)) {
      const failed = await infer([1], "identity", within(), waiting).catch((error) => error);
      if (!failed) return;
      if (failed.code !== grpc.status.UNAVAILABLE || Date.now() > end) throw failed; // it loads its models
    }
  },
};

cells[cell]().then(
  () => {
    console.log("ok");
    process.exit(0);
  },
  (error) => {
    console.log(String(error).replaceAll("\n", " "));
    process.exit(1);
  },
);
