// What a Node program with grpc-js finds without any .proto file: it asks the server's reflection for
// its services, and calls them with what it is told. Argument: the gRPC address. Prints one word a part.
"use strict";

const assert = require("node:assert");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const reflection = require("grpc-reflection-js");

const [address] = process.argv.slice(2);
const insecure = grpc.credentials.createInsecure();
const OPTIONS = { keepCase: true, longs: Number, defaults: true, enums: String, oneofs: true };

async function service(asked, symbol) {
  const root = await asked.fileContainingSymbol(symbol);
  const loaded = grpc.loadPackageDefinition(loader.fromJSON(root.toJSON(), OPTIONS));
  const Client = symbol.split(".").reduce((part, name) => part[name], loaded);
  return new Client(address, insecure);
}

function call(client, method, request) {
  const deadline = Date.now() + 30000;
  return new Promise((resolve, reject) =>
    client[method](request, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer))),
  );
}

function events(stream, count) {
  return new Promise((resolve, reject) => {
    const seen = [];
    stream.on("error", reject);
    stream.on("data", (event) => seen.push(event) === count && resolve(seen));
  });
}

async function health(client) {
  for (const asked of ["", "inference.GRPCInferenceService", "simple"])
    assert.equal((await call(client, "Check", { service: asked })).status, "SERVING", asked);
  await assert.rejects(call(client, "Check", { service: "nosuch" }), { code: grpc.status.NOT_FOUND });
  const watch = client.Watch({ service: "simple" });
  const [now] = await events(watch, 1);
  assert.equal(now.status, "SERVING");
  watch.removeAllListeners("error").on("error", () => {}); // cancelled
  watch.cancel();
}

function request(model) {
  const numbers = Int32Array.from({ length: 16 }, (_, i) => i);
  const raw = Buffer.from(numbers.buffer);
  const input = (name) => ({ name, datatype: "INT32", shape: [1, 16] });
  return {
    model_name: model,
    id: "js",
    inputs: [input("INPUT0"), input("INPUT1")],
    raw_input_contents: [raw, raw],
  };
}

function check(answer) {
  const at = answer.outputs.findIndex((output) => output.name === "OUTPUT0");
  assert.deepEqual(answer.outputs[at].shape, [1, 16]);
  const raw = Buffer.from(answer.raw_output_contents[at]);
  for (let i = 0; i < 16; i++) assert.equal(raw.readInt32LE(4 * i), 2 * i);
  assert.equal(answer.id, "js");
}

async function inference(client) {
  assert.equal((await call(client, "ServerLive", {})).live, true);
  assert.equal((await call(client, "ModelReady", { name: "simple" })).ready, true);
  check(await call(client, "ModelInfer", request("simple")));
  await assert.rejects(call(client, "ModelInfer", request("nosuch")), {
    code: grpc.status.NOT_FOUND,
    details: "Request for unknown model: 'nosuch' is not found",
  });
  const stream = client.ModelStreamInfer();
  const answers = events(stream, 2);
  stream.write(request("simple"));
  stream.write(request("simple"));
  for (const answer of await answers) check(answer.infer_response);
  stream.end();
}

async function main() {
  const asked = new reflection.Client(address, insecure);
  const services = await asked.listServices();
  for (const name of ["inference.GRPCInferenceService", "grpc.health.v1.Health"])
    assert.ok(services.includes(name), services);
  console.log("reflection");
  await health(await service(asked, "grpc.health.v1.Health"));
  console.log("health");
  await inference(await service(asked, "inference.GRPCInferenceService"));
  console.log("inference");
  process.exit(0);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
