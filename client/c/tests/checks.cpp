// Checks of shmserve.hpp against a server (tests/integration/test_client_examples.py): checks_cpp CLIENT_SOCKET
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../shmserve.hpp"

using namespace std::chrono_literals;

#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                              \
            std::exit(1);                                                                                             \
        }                                                                                                             \
    } while (0)

namespace {

template <class Function> shmserve_code thrown(Function function) {
    try {
        function();
    } catch (const shmserve::Error &error) {
        CHECK(*error.what());
        return error.code();
    }
    return SHMSERVE_OK;
}

// Error::what() of a long text ends before the character that has no room.
void long_text() {
    std::string text(SHMSERVE_TEXT - 2, 'x'), kept = text;
    text += "\u00e9\u00e9";
    shmserve_answer failed{};
    failed.code = SHMSERVE_INTERNAL, failed.text = text.c_str();
    try {
        shmserve::Answer(&failed).check();
        CHECK(false);
    } catch (const shmserve::Error &error) {
        CHECK(error.what() == kept);
    }
}

void calls(shmserve::Client &client) {
    shmserve::Lane lane = client.lane("pair");
    CHECK(std::string(lane.version()) == "1" && *lane.instance());
    auto in = client.allocate<float>(2000), out = client.allocate<float>(2000);
    CHECK(in.size() == 2000 && in.span().size_bytes() == 8000);
    shmserve::Buffer<float> moved = std::move(in);
    CHECK(!in && moved);
    for (float &value : moved) value = 2;
    shmserve::Request request;
    request.input("IN", moved).output("OUT", out).output("PID").id("one").timeout(30s);
    shmserve::Answer answer = lane.infer(request);
    CHECK(answer && answer.ok() && answer.final() && answer.attempts() == 1 && answer.size() == 2);
    CHECK(out[0] == 3 && out[1999] == 3 && answer.receipt().compute_ns > 0);
    CHECK(answer.output("PID").as<std::int64_t>()[0] > 0 && answer[0].shape()[0] == 2000);
    CHECK(thrown([&] { answer.output("PID").as<float>(); }) == SHMSERVE_INVALID_ARGUMENT);
    CHECK(thrown([&] { answer.output("X"); }) == SHMSERVE_NOT_FOUND);

    const shmserve::Span<float> part = moved.span().subspan(0, 3);
    const std::array<double, 3> wrong{};
    answer = lane.infer(shmserve::Request().input("IN", part, {3}).parameter("a", 1).parameter("b", "text"));
    CHECK(answer.output("OUT").bytes().size() == 12);
    CHECK(thrown([&] { lane.infer(shmserve::Request().input("IN", wrong)); }) == SHMSERVE_INVALID_ARGUMENT);

    shmserve_error error{};
    answer = lane.infer(shmserve::Request().input("IN", wrong), &error);
    CHECK(error.code == SHMSERVE_INVALID_ARGUMENT && answer && answer.code() == error.code && *answer.text());
    CHECK(answer.http_status() == 400 && thrown([&] { answer.check(); }) == SHMSERVE_INVALID_ARGUMENT);
    CHECK(moved.renew());
}

void several(shmserve::Client &client) {
    shmserve::Lane lane = client.lane("misbehaving");
    const std::array<std::string_view, 1> command{"sleep:0.5"};
    const auto bytes = shmserve::encode_strings(command);
    shmserve::Request request;
    request.input("COMMAND", SHMSERVE_BYTES, bytes.data(), bytes.size(), {1}).user(&client);
    const std::uint64_t ticket = lane.submit(request.deadline(std::chrono::steady_clock::now() + 100s));
    CHECK(ticket && lane.under_way() == 1 && lane.fd() >= 0 && lane.poll_ms() > 0);
    CHECK(!lane.take(0ns));
    CHECK(lane.cancel(ticket));
    const shmserve::Answer answer = lane.take();
    CHECK(answer.ticket() == ticket && answer.user() == &client);
    CHECK(answer.ok() || answer.code() == SHMSERVE_CANCELLED); // a model that has begun may go on to its end
    CHECK(!lane.under_way() && !lane.take());
}

void streams(shmserve::Client &client) {
    shmserve::Lane lane = client.lane("teller");
    const std::array<std::string_view, 1> command{"count:4"};
    const auto bytes = shmserve::encode_strings(command);
    shmserve::Request request;
    request.input("COMMAND", SHMSERVE_BYTES, bytes.data(), bytes.size(), {1}).output("N").credit(1, true);
    const std::uint64_t ticket = lane.submit(request);
    int count = 0;
    for (bool final = false; !final;) {
        const shmserve::Answer answer = lane.take().check();
        count += answer.size() > 0;
        if (!(final = answer.final())) lane.credit(ticket, 1);
    }
    CHECK(count == 4);
}

void strings(shmserve::Client &client) {
    shmserve::Lane lane = client.lane("identity_bytes");
    const std::array<std::string_view, 3> texts{"one", "", "three"};
    const auto bytes = shmserve::encode_strings(texts);
    shmserve::Request request;
    request.input("INPUT0", SHMSERVE_BYTES, bytes.data(), bytes.size(), {3});
    const auto found = lane.infer(request).output("OUTPUT0").strings();
    CHECK(found.size() == 3 && found[0] == texts[0] && found[1].empty() && found[2] == texts[2]);
}

void models(shmserve::Client &client) {
    shmserve::Model model = client.describe("pair");
    CHECK(std::string(model.name()) == "pair" && std::string(model.version()) == "1" && !model.decoupled());
    CHECK(model.inputs().size() == 1 && model.outputs()[0].shape[0] == -1);
    shmserve_error error{};
    CHECK(!client.describe("nope", "", 1s, &error) && error.code == SHMSERVE_NOT_FOUND);
    CHECK(!client.lane("nope", "", {}, &error) && error.http_status == 404);
    CHECK(thrown([&] { client.lane("nope"); }) == SHMSERVE_NOT_FOUND);
    CHECK(!client.allocate<double>(SIZE_MAX / 4, &error) && error.code == SHMSERVE_RESOURCE_EXHAUSTED);
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc == 2);
    long_text();
    shmserve::Options options;
    options.path = argv[1], options.timeout = 30s, options.look = std::chrono::microseconds(200);
    shmserve::Client client(options);
    calls(client), several(client), streams(client), strings(client), models(client);
    shmserve_error error{};
    const shmserve::Client none("/nowhere", &error);
    CHECK(!none && error.code == SHMSERVE_UNAVAILABLE);
    std::puts("ok");
}
