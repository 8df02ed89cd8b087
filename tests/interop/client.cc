// gRPC's C++ library as a client: `client HOST:PORT CELL MESSAGES IDLE_S`.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <future>
#include <iostream>
#include <map>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "grpc_service.grpc.pb.h"
#include "grpc_health/v1/health.grpc.pb.h"
#include "grpc_reflection/v1alpha/reflection.grpc.pb.h"

using namespace inference;
using grpc::ClientContext;
using grpc::Status;
using grpc::StatusCode;
using Clock = std::chrono::system_clock;
using Values = std::vector<int32_t>;

std::shared_ptr<grpc::Channel> channel;
std::unique_ptr<GRPCInferenceService::Stub> stub;
int messages;
double idle_s;

void check(bool good, const std::string& text) {
  if (!good) throw std::runtime_error(text);
}

void nap(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

struct Context : ClientContext {
  explicit Context(double timeout_s = 600) {
    set_deadline(Clock::now() + std::chrono::milliseconds(int64_t(1000 * timeout_s)));
  }
};

ModelInferRequest request(const std::string& model, const Values& values) {
  ModelInferRequest made;
  made.set_model_name(model);
  auto* input = made.add_inputs();
  input->set_name("INPUT0");
  input->set_datatype("INT32");
  input->add_shape(1);
  input->add_shape(values.size());
  made.add_raw_input_contents(values.data(), 4 * values.size());
  return made;
}

Values up_to(int count) {
  Values values(count);
  std::iota(values.begin(), values.end(), 0);
  return values;
}

Status status_of(ClientContext& context, const ModelInferRequest& asked, std::string* raw = nullptr) {
  ModelInferResponse answer;
  Status status = stub->ModelInfer(&context, asked, &answer);
  if (status.ok() && raw) *raw = answer.raw_output_contents(0);
  return status;
}

void infer(const Values& values, const std::string& model = "identity", ClientContext* given = nullptr) {
  Context context;
  auto asked = request(model, values);
  std::string raw;
  Status status = status_of(given ? *given : context, asked, &raw);
  check(status.ok(), "ModelInfer of " + model + ": " + status.error_message());
  check(raw == asked.raw_input_contents(0), "another answer than expected");
}

void fails(StatusCode code, const Status& status) {
  check(status.error_code() == code, "status " + std::to_string(status.error_code()) + " (" +
                                         status.error_message() + ") instead of " + std::to_string(code));
}

struct Stream {
  Context context;
  std::unique_ptr<grpc::ClientReaderWriter<ModelInferRequest, ModelStreamInferResponse>> io;
  explicit Stream(grpc_compression_algorithm compression = GRPC_COMPRESS_NONE) : context(600 + idle_s) {
    context.set_compression_algorithm(compression);
    io = stub->ModelStreamInfer(&context);
  }
  void send(const ModelInferRequest& message) { io->Write(message); }
  bool next(int32_t& number) {  // of the next answer; false at the end
    ModelStreamInferResponse answer;
    while (io->Read(&answer)) {
      check(answer.error_message().empty(), answer.error_message());
      if (answer.infer_response().raw_output_contents_size() == 0) continue;
      memcpy(&number, answer.infer_response().raw_output_contents(0).data(), 4);
      return true;
    }
    return false;
  }
  void expect(int from, int to) {
    int32_t number;
    int seen = from;
    while (next(number)) check(number == seen++, "answer " + std::to_string(seen - 1) + " is another one");
    Status status = io->Finish();
    std::string answers = std::to_string(seen) + " answers of " + std::to_string(to);
    check(status.ok() && seen == to, answers + ", and then: " + status.error_message());
  }
};

void told(const std::string& part, const std::map<std::string, std::string>& metadata) {
  Context context;
  for (auto& [name, value] : metadata) context.AddMetadata(name, value);
  std::string raw;
  Status status = status_of(context, request("told", {1}), &raw);
  check(status.ok(), "with metadata: " + status.error_message());
  check(raw.find(part) != std::string::npos, "metadata did not arrive");
}

void unary() { infer(up_to(1024)), infer(up_to(4 << 20)); }

void at_once(int callers, std::function<void()> call) {
  std::vector<std::thread> threads;
  std::string failure;
  std::mutex lock;
  for (int n = 0; n < callers; n++)
    threads.emplace_back([&] {
      try {
        call();
      } catch (std::exception& error) {
        std::lock_guard guard(lock);
        failure = error.what();
      }
    });
  for (auto& thread : threads) thread.join();
  check(failure.empty(), failure);
}

void parallel() {
  at_once(50, [] { for (int n = 0; n < 10; n++) infer(up_to(1024)); });
}

void long_stream() {
  Stream stream;
  std::thread sender([&] {
    for (int n = 0; n < messages && stream.io->Write(request("identity", {n})); n++) {}
    stream.io->WritesDone();
  });
  std::unique_ptr<std::thread, void (*)(std::thread*)> joined(&sender, [](std::thread* t) { t->join(); });
  stream.expect(0, messages);
}

void decoupled() {
  Stream stream;
  stream.send(request("count", {1000, 0}));
  stream.io->WritesDone();
  stream.expect(0, 1000);
}

void sequence() {
  Stream stream;
  int64_t id = Clock::now().time_since_epoch().count();
  for (int n = 0; n < 10; n++) {
    auto step = request("sum", {n});
    auto& parameters = *step.mutable_parameters();
    parameters["sequence_id"].set_int64_param(id);
    parameters["sequence_start"].set_bool_param(n == 0);
    parameters["sequence_end"].set_bool_param(n == 9);
    stream.send(step);
  }
  stream.io->WritesDone();
  int32_t last = 0;
  while (stream.next(last)) {}
  check(last == 45, "the sum is " + std::to_string(last) + ": " + stream.io->Finish().error_message());
}

void metadata() {
  std::string text(8192, 'a');
  told(text, {{"x-long", text}, {"x-interop-bin", std::string("\x00\x01\xfe\xff", 4)}});
}

void blanks() { told("both ends", {{"x-blanks", " both ends "}}); }

void deadline() {
  Context context(0.2);
  fails(StatusCode::DEADLINE_EXCEEDED, status_of(context, request("slow", {2000})));
  infer({1});
}

void cancel() {
  Stream stream;
  stream.send(request("count", {1000, 20}));
  int32_t number;
  stream.next(number);
  stream.context.TryCancel();
  while (stream.next(number)) {}
  fails(StatusCode::CANCELLED, stream.io->Finish());
  Context context;
  std::thread canceller([&] { nap(0.2), context.TryCancel(); });
  Status status = status_of(context, request("slow", {2000}));
  canceller.join();
  fails(StatusCode::CANCELLED, status);
  infer({1});
}

void three(Stream&& stream) {
  for (int n = 0; n < 3; n++) stream.send(request("identity", {n}));
  stream.io->WritesDone();
  stream.expect(0, 3);
}

void half_close() {
  three(Stream());
  Stream empty;
  empty.io->WritesDone();
  empty.expect(0, 0);
}

void gzip() {
  Context context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  infer(up_to(65536), "identity", &context);
  three(Stream(GRPC_COMPRESS_GZIP));
}

void errors() {
  Context context, other;
  Status status = status_of(context, request("nosuch", {1}));
  fails(StatusCode::NOT_FOUND, status);
  check(status.error_message().find("nosuch") != std::string::npos, "the error does not name the model");
  grpc::TemplatedGenericStub<ModelInferRequest, ModelInferResponse> generic(channel);
  auto asked = request("identity", {1});
  ModelInferResponse answer;
  std::promise<Status> ended;
  generic.UnaryCall(&other, "/inference.GRPCInferenceService/NoSuch", grpc::StubOptions(), &asked, &answer,
                    [&](Status given) { ended.set_value(given); });
  fails(StatusCode::UNIMPLEMENTED, ended.get_future().get());
}

void reflection() {
  using namespace grpc::reflection::v1alpha;
  Context context;
  auto io = ServerReflection::NewStub(channel)->ServerReflectionInfo(&context);
  ServerReflectionRequest asked;
  asked.set_list_services("");
  io->Write(asked);
  ServerReflectionResponse answer;
  check(io->Read(&answer), "no answer");
  auto text = answer.DebugString();
  check(text.find("inference.GRPCInferenceService") != std::string::npos, text);
}

void health() {
  using namespace grpc::health::v1;
  auto asked = Health::NewStub(channel);
  HealthCheckRequest whole, nosuch;
  nosuch.set_service("nosuch");
  HealthCheckResponse answer;
  Context first, second, third;
  Status status = asked->Check(&first, whole, &answer);
  check(answer.status() == HealthCheckResponse::SERVING, "not serving: " + status.error_message());
  fails(StatusCode::NOT_FOUND, asked->Check(&second, nosuch, &answer));
  auto watch = asked->Watch(&third, whole);
  check(watch->Read(&answer) && answer.status() == HealthCheckResponse::SERVING, "not serving, says the watch");
  third.TryCancel();
}

void idle() {
  Stream stream;
  int32_t number;
  stream.send(request("identity", {0}));
  check(stream.next(number), "the first answer");
  nap(idle_s / 2);
  stream.send(request("identity", {1}));
  stream.io->WritesDone();
  stream.expect(1, 2);
  nap(idle_s / 2);
  infer({1});
}

void drain() {
  std::string failure;
  std::thread slow([&] {
    try {
      at_once(5, [] { infer({3000}, "slow"); });
    } catch (std::exception& error) {
      failure = error.what();
    }
  });
  Stream stream;
  stream.send(request("count", {100, 30}));
  stream.io->WritesDone();
  int32_t number;
  stream.next(number);
  nap(1);
  std::cout << "running" << std::endl;
  std::unique_ptr<std::thread, void (*)(std::thread*)> joined(&slow, [](std::thread* t) { t->join(); });
  stream.expect(1, 100);
  joined.reset();
  check(failure.empty(), failure);
  Status status(StatusCode::UNAVAILABLE, "");
  for (int n = 0; n < 1200 && status.error_code() == StatusCode::UNAVAILABLE; n++) {
    Context again;  // the successor may not have its models yet
    again.set_wait_for_ready(true);
    status = status_of(again, request("identity", {1}));
    nap(0.1);
  }
  fails(StatusCode::OK, status);
}

int main(int, char** argv) {
  messages = std::stoi(argv[3]), idle_s = std::stod(argv[4]);
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  channel = grpc::CreateCustomChannel(argv[1], grpc::InsecureChannelCredentials(), arguments);
  stub = GRPCInferenceService::NewStub(channel);
  const std::map<std::string, void (*)()> cells = {
      {"unary", unary}, {"parallel", parallel}, {"stream", long_stream}, {"decoupled", decoupled},
      {"sequence", sequence}, {"metadata", metadata}, {"blanks", blanks}, {"deadline", deadline},
      {"cancel", cancel}, {"half_close", half_close}, {"gzip", gzip}, {"errors", errors},
      {"reflection", reflection}, {"health", health}, {"idle", idle}, {"drain", drain}};
  try {
    cells.at(argv[2])();
  } catch (std::exception& error) {
    std::cout << error.what() << std::endl;
    return 1;
  }
  std::cout << "ok" << std::endl;
}
