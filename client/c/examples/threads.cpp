// Threads with a lane each and one connection: the lanes are spread over the model's instances.
//
//     threads THREADS REQUESTS
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "shmserve.hpp"

namespace {

constexpr std::size_t elements = 1024;

// Send requests over a lane of this thread, and return how many answers were right.
int work(shmserve::Client &client, int requests) {
    shmserve::Lane lane = client.lane("identity");
    auto in = client.allocate<float>(elements), out = client.allocate<float>(elements);
    shmserve::Request request;
    request.input("INPUT0", in).output("OUTPUT0", out).timeout(std::chrono::seconds(30));
    int right = 0;
    for (int number = 0; number < requests; number++) {
        std::fill(in.begin(), in.end(), static_cast<float>(number));
        lane.infer(request); // throws shmserve::Error
        right += std::equal(in.begin(), in.end(), out.begin());
    }
    return right;
}

} // namespace

int main(int argc, char **argv) try {
    if (argc != 3) return std::fprintf(stderr, "usage: threads THREADS REQUESTS\n"), 2;
    shmserve::Client client;
    std::atomic<int> right{0}, failed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < std::atoi(argv[1]); i++)
        threads.emplace_back([&] {
            try {
                right += work(client, std::atoi(argv[2]));
            } catch (const shmserve::Error &error) {
                std::fprintf(stderr, "%s: %s\n", shmserve_code_name(error.code()), error.what());
                failed++;
            }
        });
    for (std::thread &thread : threads) thread.join();
    std::printf("right=%d\n", right.load());
    return failed ? 1 : 0;
} catch (const shmserve::Error &error) {
    return std::fprintf(stderr, "%s: %s\n", shmserve_code_name(error.code()), error.what()), 1;
}
