// libshmserve for C++17: shmserve.h with owners, spans and std::chrono. A header alone; link with libshmserve, or
// compile shmserve.c along.
//
//     shmserve::Client client;                     // the connection, for all threads
//     shmserve::Lane lane = client.lane("echo");   // a lane to one model, for one thread at a time
//     auto in = client.allocate<float>(1024), out = client.allocate<float>(1024);
//     lane.infer(shmserve::Request().input("IN", in).output("OUT", out));
//
// - The last parameter of functions that can fail is `shmserve_error *error`. Without it they throw shmserve::Error;
//   with it they throw nothing, write the failure there, and return an empty object, false or 0. It is written on
//   failure only. Where exceptions are turned off, a failure without `error` ends the program.
// - What shmserve.h says of threads, buffers, lifetimes and time limits holds here. A client must live longer than its
//   lanes and buffers.
// - Requests and answers refer to names and data, and do not copy them.
#ifndef SHMSERVE_HPP
#define SHMSERVE_HPP

#if __cplusplus < 201703L
#error "shmserve.hpp needs C++17: compile with -std=c++17"
#endif

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "shmserve.h"

namespace shmserve {

using Nanoseconds = std::chrono::nanoseconds;
using Shape = std::initializer_list<std::int64_t>;

// A time limit that never passes, for Lane::take.
constexpr Nanoseconds forever{-1};

// ---------------------------------------------------------------------------------------------------- errors

// A failure, as an exception.
class Error : public std::exception {
public:
    explicit Error(const shmserve_error &error) noexcept : error_(error) {}
    const char *what() const noexcept override { return error_.text; }
    shmserve_code code() const noexcept { return error_.code; }
    int http_status() const noexcept { return error_.http_status; } // 0: the library found the failure

private:
    shmserve_error error_;
};

namespace detail {

[[noreturn]] inline void raise(const shmserve_error &error) {
#if defined(__cpp_exceptions)
    throw Error(error);
#else
    std::fprintf(stderr, "%s: %s\n", shmserve_code_name(error.code), error.text);
    std::abort();
#endif
}

// Call `function` with a place for its failure. Throw the failure, unless the caller has given a place.
template <class Function> shmserve_code call(shmserve_error *error, Function function) {
    shmserve_error own{};
    const shmserve_code code = function(error ? error : &own);
    if (code != SHMSERVE_OK && !error) raise(own);
    return code;
}

inline void fail(shmserve_error *error, shmserve_code code, const char *what, const char *name) {
    shmserve_error made{};
    made.code = code;
    std::snprintf(made.text, sizeof made.text, "%s: %s", name, what);
    if (!error) raise(made);
    *error = made;
}

template <class C, void (*close)(C *)> struct Closer {
    void operator()(C *object) const noexcept { close(object); }
};

} // namespace detail

// ----------------------------------------------------------------------------------------------------- spans

// A number of elements in somebody's memory, as std::span of C++20.
template <class T> class Span {
public:
    constexpr Span() noexcept = default;
    constexpr Span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    // From what has contiguous elements: a vector, an array, a Buffer, another Span.
    template <class Range, class = std::enable_if_t<
                               std::is_convertible_v<decltype(std::data(std::declval<Range &>())), T *>>>
    constexpr Span(Range &&range) noexcept : data_(std::data(range)), size_(std::size(range)) {}

    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
    constexpr bool empty() const noexcept { return !size_; }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }
    constexpr T &operator[](std::size_t index) const noexcept { return data_[index]; }
    constexpr Span subspan(std::size_t first, std::size_t count) const noexcept { return {data_ + first, count}; }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

// The datatype of a C++ type. FP16, BF16 and BYTES have none: name them where they are used.
template <class T> constexpr shmserve_datatype datatype_of() {
    using U = std::remove_cv_t<T>;
    if constexpr (std::is_same_v<U, bool>) return SHMSERVE_BOOL;
    else if constexpr (std::is_same_v<U, float>) return SHMSERVE_FP32;
    else if constexpr (std::is_same_v<U, double>) return SHMSERVE_FP64;
    else {
        static_assert(std::is_integral_v<U> && sizeof(U) <= 8, "give the datatype of such elements");
        constexpr bool is_signed = std::is_signed_v<U>;
        if constexpr (sizeof(U) == 1) return is_signed ? SHMSERVE_INT8 : SHMSERVE_UINT8;
        else if constexpr (sizeof(U) == 2) return is_signed ? SHMSERVE_INT16 : SHMSERVE_UINT16;
        else if constexpr (sizeof(U) == 4) return is_signed ? SHMSERVE_INT32 : SHMSERVE_UINT32;
        else return is_signed ? SHMSERVE_INT64 : SHMSERVE_UINT64;
    }
}

// Return the bytes of a BYTES tensor with these elements. Empty if an element is too long.
inline std::vector<std::byte> encode_strings(Span<const std::string_view> strings) {
    std::vector<shmserve_bytes> elements;
    elements.reserve(strings.size());
    for (const std::string_view &each : strings) elements.push_back({each.data(), each.size()});
    std::vector<std::byte> bytes(shmserve_bytes_size(elements.data(), elements.size()));
    shmserve_bytes_encode(bytes.data(), bytes.size(), elements.data(), elements.size());
    return bytes;
}

// ----------------------------------------------------------------------------------------------------- memory

// Shared memory for a number of elements, freed at the end. The requests that name it must have been answered then.
template <class T> class Buffer {
    static_assert(std::is_trivially_copyable_v<T>, "elements are shared with other processes");

public:
    using value_type = T;
    Buffer() noexcept = default;
    Buffer(Buffer &&other) noexcept { swap(other); }
    Buffer &operator=(Buffer other) noexcept { return swap(other), *this; }
    ~Buffer() { shmserve_free(client_, data_); }
    void swap(Buffer &other) noexcept {
        std::swap(client_, other.client_), std::swap(data_, other.data_), std::swap(size_, other.size_);
    }

    explicit operator bool() const noexcept { return data_; }
    T *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    T *begin() const noexcept { return data_; }
    T *end() const noexcept { return data_ + size_; }
    T &operator[](std::size_t index) const noexcept { return data_[index]; }
    Span<T> span() const noexcept { return {data_, size_}; }

    // Give the buffer new memory at the same address, after requests that ended without their answers (shmserve_renew).
    bool renew(shmserve_error *error = nullptr) {
        return !detail::call(error, [&](shmserve_error *e) { return shmserve_renew(client_, data_, e); });
    }

private:
    friend class Client;
    Buffer(shmserve_client *client, T *data, std::size_t size) noexcept : client_(client), data_(data), size_(size) {}

    shmserve_client *client_ = nullptr;
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

// --------------------------------------------------------------------------------------------------- requests

// A request, made step by step. Make it once, and use it for many calls: what it refers to may change between them.
class Request {
public:
    // An input whose elements lie in a range: a Buffer, a Span, a vector. Without shape it has one dimension.
    template <class Range> Request &input(const char *name, const Range &range, Shape shape = {}) {
        using T = std::remove_pointer_t<decltype(std::data(range))>;
        const std::size_t count = std::size(range);
        const std::int64_t flat = static_cast<std::int64_t>(count);
        if (!shape.size()) return input(name, datatype_of<T>(), std::data(range), count * sizeof(T), {flat});
        return input(name, datatype_of<T>(), std::data(range), count * sizeof(T), shape);
    }
    // An input of any datatype.
    Request &input(const char *name, shmserve_datatype datatype, const void *data, std::size_t nbytes, Shape shape) {
        inputs_.push_back({name, datatype, shape.size(), nullptr, data, nbytes});
        dims_.insert(dims_.end(), shape.begin(), shape.end());
        return *this;
    }
    // An output that is written to a part of a Buffer, or to all of it.
    template <class Range> Request &output(const char *name, Range &&range) {
        using T = std::remove_pointer_t<decltype(std::data(range))>;
        static_assert(!std::is_const_v<T>, "the output is written there");
        outputs_.push_back({name, std::data(range), std::size(range) * sizeof(T)});
        return *this;
    }
    // A small output that comes in the answer.
    Request &output(const char *name) { return outputs_.push_back({name, nullptr, 0}), *this; }

    Request &parameter(const char *name, const char *text) {
        return add(name, SHMSERVE_IS_STRING, [&](shmserve_parameter &p) { p.value.string = text; });
    }
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> Request &parameter(const char *name, T value) {
        static_assert(std::is_signed_v<T> || sizeof(T) < 8, "parameters are of at most int64_t: convert the value");
        if constexpr (std::is_same_v<T, bool>)
            return add(name, SHMSERVE_IS_BOOL, [&](shmserve_parameter &p) { p.value.boolean = value; });
        else if constexpr (std::is_floating_point_v<T>)
            return add(name, SHMSERVE_IS_DOUBLE, [&](shmserve_parameter &p) { p.value.number = value; });
        else return add(name, SHMSERVE_IS_INT, [&](shmserve_parameter &p) { p.value.integer = std::int64_t{value}; });
    }

    Request &id(const char *id) { return request_.id = id, *this; }
    // Longest wait for the (last) answer, from each call on; 0: the server's limit.
    Request &timeout(Nanoseconds timeout) { return request_.timeout_ns = timeout.count(), *this; }
    // Time by which the (last) answer must have come. The earlier of timeout and deadline counts.
    Request &deadline(std::chrono::steady_clock::time_point at) {
        request_.deadline_ns = std::chrono::duration_cast<Nanoseconds>(at.time_since_epoch()).count();
        return *this;
    }
    // Decoupled models: how many answers may be unread, 1 to 16. `hold`: the caller gives credit by Lane::credit.
    Request &credit(std::uint32_t answers, bool hold = false) {
        return request_.credit = answers, request_.hold_credit = hold, *this;
    }
    // A pointer that the answers repeat.
    Request &user(void *user) { return request_.user = user, *this; }

    // The request for functions of shmserve.h, valid until the next change.
    const shmserve_request *c() const noexcept {
        const std::int64_t *dims = dims_.data();
        for (shmserve_tensor &input : inputs_) input.shape = dims, dims += input.rank;
        request_.inputs = inputs_.data(), request_.input_count = inputs_.size();
        request_.outputs = outputs_.data(), request_.output_count = outputs_.size();
        request_.parameters = parameters_.data(), request_.parameter_count = parameters_.size();
        return &request_;
    }

private:
    template <class Set> Request &add(const char *name, shmserve_kind kind, Set set) {
        shmserve_parameter parameter{};
        parameter.name = name, parameter.kind = kind;
        set(parameter);
        return parameters_.push_back(parameter), *this;
    }

    mutable std::vector<shmserve_tensor> inputs_;
    std::vector<std::int64_t> dims_; // of all inputs, one after the other
    std::vector<shmserve_output> outputs_;
    std::vector<shmserve_parameter> parameters_;
    mutable shmserve_request request_{};
};

// A tensor of an answer.
class Output {
public:
    explicit Output(const shmserve_tensor *tensor = nullptr) noexcept : tensor_(tensor) {}
    explicit operator bool() const noexcept { return tensor_; }
    const char *name() const noexcept { return tensor_->name; }
    shmserve_datatype datatype() const noexcept { return tensor_->datatype; }
    Span<const std::int64_t> shape() const noexcept { return {tensor_->shape, tensor_->rank}; }
    Span<const std::byte> bytes() const noexcept {
        return {static_cast<const std::byte *>(tensor_->data), tensor_->nbytes};
    }
    // Return the elements. INVALID_ARGUMENT: they have another datatype.
    template <class T> Span<const T> as(shmserve_error *error = nullptr) const {
        if (datatype() == datatype_of<T>()) return {static_cast<const T *>(tensor_->data), tensor_->nbytes / sizeof(T)};
        return detail::fail(error, SHMSERVE_INVALID_ARGUMENT, "the output has another datatype", name()), Span<const T>();
    }
    // Return the elements of a BYTES tensor, which point into the answer. INVALID_ARGUMENT: it is none.
    std::vector<std::string_view> strings(shmserve_error *error = nullptr) const {
        std::vector<std::string_view> found;
        if (datatype() != SHMSERVE_BYTES)
            return detail::fail(error, SHMSERVE_INVALID_ARGUMENT, "the output is no BYTES tensor", name()), found;
        std::size_t offset = 0;
        shmserve_bytes element;
        while (shmserve_bytes_next(tensor_->data, tensor_->nbytes, &offset, &element))
            found.emplace_back(static_cast<const char *>(element.data), element.size);
        return found;
    }

private:
    const shmserve_tensor *tensor_;
};

// An answer, or none. Valid until the next call with the lane (cancel excepted).
class Answer {
public:
    explicit Answer(const shmserve_answer *answer = nullptr) noexcept : answer_(answer) {}
    explicit operator bool() const noexcept { return answer_; } // there is an answer
    bool ok() const noexcept { return answer_->code == SHMSERVE_OK; }
    shmserve_code code() const noexcept { return answer_->code; }
    int http_status() const noexcept { return answer_->http_status; }
    const char *text() const noexcept { return answer_->text; } // of a failure
    bool final() const noexcept { return answer_->final; }
    std::uint64_t ticket() const noexcept { return answer_->ticket; }
    void *user() const noexcept { return answer_->user; }
    std::uint32_t attempts() const noexcept { return answer_->attempts; }
    const shmserve_receipt &receipt() const noexcept { return answer_->receipt; }
    Span<const shmserve_parameter> parameters() const noexcept {
        return {answer_->parameters, answer_->parameter_count};
    }
    std::size_t size() const noexcept { return answer_->output_count; } // number of outputs
    Output operator[](std::size_t index) const noexcept { return Output(answer_->outputs + index); }
    // Return an output by its name. NOT_FOUND: the answer has none of this name.
    Output output(std::string_view name, shmserve_error *error = nullptr) const {
        for (std::size_t i = 0; i < size(); i++)
            if (name == answer_->outputs[i].name) return (*this)[i];
        char text[64];
        std::snprintf(text, sizeof text, "%.*s", static_cast<int>(name.size() < 60 ? name.size() : 60), name.data());
        return detail::fail(error, SHMSERVE_NOT_FOUND, "the answer has no such output", text), Output();
    }
    // Throw the failure that the answer is, if it is one.
    const Answer &check() const {
        if (ok()) return *this;
        shmserve_error error{};
        error.code = code(), error.http_status = http_status();
        std::size_t length = std::string_view(text()).size();
        if (length >= sizeof error.text) // cut where no character is divided
            for (length = sizeof error.text - 1; length && (text()[length] & 0xc0) == 0x80;) length--;
        std::snprintf(error.text, sizeof error.text, "%.*s", static_cast<int>(length), text());
        detail::raise(error);
    }
    const shmserve_answer *c() const noexcept { return answer_; }

private:
    const shmserve_answer *answer_;
};

// ------------------------------------------------------------------------------------------- models and lanes

// The inputs and outputs of a model; -1 in a shape is an open dimension.
class Model {
public:
    Model() noexcept = default;
    explicit operator bool() const noexcept { return static_cast<bool>(model_); }
    const char *name() const noexcept { return model_->name; }
    const char *version() const noexcept { return model_->version; }
    bool decoupled() const noexcept { return model_->decoupled; }
    Span<const shmserve_spec> inputs() const noexcept { return {model_->inputs, model_->input_count}; }
    Span<const shmserve_spec> outputs() const noexcept { return {model_->outputs, model_->output_count}; }

private:
    friend class Client;
    explicit Model(shmserve_model *model) noexcept : model_(model) {}
    std::unique_ptr<shmserve_model, detail::Closer<shmserve_model, shmserve_model_free>> model_;
};

// A lane to one model, for one thread at a time; `cancel` may be called from any thread.
class Lane {
public:
    Lane() noexcept = default;
    explicit operator bool() const noexcept { return static_cast<bool>(lane_); }

    // Run the model and wait for its answer. With `error`, the answer of a failed request is returned as well.
    Answer infer(const Request &request, shmserve_error *error = nullptr) {
        const shmserve_answer *answer = nullptr;
        detail::call(error, [&](shmserve_error *e) { return shmserve_infer(c(), request.c(), &answer, e); });
        return Answer(answer);
    }
    // Send a request, and return its ticket.
    std::uint64_t submit(const Request &request, shmserve_error *error = nullptr) {
        std::uint64_t ticket = 0;
        detail::call(error, [&](shmserve_error *e) { return shmserve_submit(c(), request.c(), &ticket, e); });
        return ticket;
    }
    // Take the next answer of any request under way; none if none came in time, or no request is under way. The failure
    // of a request is an answer (Answer::check throws it).
    Answer take(Nanoseconds timeout = forever, shmserve_error *error = nullptr) {
        const shmserve_answer *answer = nullptr;
        detail::call(error, [&](shmserve_error *e) { return shmserve_take(c(), timeout.count(), &answer, e); });
        return Answer(answer);
    }
    // Give credit for answers of a request that holds its credit.
    bool credit(std::uint64_t ticket, std::uint32_t answers, shmserve_error *error = nullptr) {
        return !detail::call(error, [&](shmserve_error *e) { return shmserve_credit(c(), ticket, answers, e); });
    }
    // Ask to end a request; 0: all requests under way. They are answered all the same.
    bool cancel(std::uint64_t ticket = 0, shmserve_error *error = nullptr) {
        return !detail::call(error, [&](shmserve_error *e) { return shmserve_cancel(c(), ticket, e); });
    }
    std::size_t under_way() const noexcept { return shmserve_under_way(c()); }
    const char *version() const noexcept { return shmserve_lane_version(c()); }
    const char *instance() const noexcept { return shmserve_lane_instance(c()); }

    // For event loops: a descriptor that is readable when `take` should be called, and the milliseconds after which it
    // should be called anyway (-1: never).
    int fd() noexcept { return shmserve_lane_fd(c()); }
    int poll_ms() const noexcept { return shmserve_lane_poll_ms(c()); }

    shmserve_lane *c() const noexcept { return lane_.get(); }

private:
    friend class Client;
    explicit Lane(shmserve_lane *lane) noexcept : lane_(lane) {}
    std::unique_ptr<shmserve_lane, detail::Closer<shmserve_lane, shmserve_lane_close>> lane_;
};

// ------------------------------------------------------------------------------------------------- connection

struct Options {
    const char *path = nullptr; // of the client socket; nullptr: found as shmserve.h says
    Nanoseconds timeout{0};     // longest wait for the connection; 0: 5 s
    Nanoseconds reconnect{0};   // how long a call may wait for a server that restarts; 0: 3 s, negative: not at all
    std::size_t max_bytes = 0;  // limit of the pool; 0: 1 GiB
    std::chrono::duration<std::int32_t, std::micro> look{0}; // longest poll before sleeping; 0: 400 us, negative: never
};

// The connection to a server, with its shared memory. Thread-safe.
class Client {
public:
    explicit Client(const Options &options = {}, shmserve_error *error = nullptr) {
        shmserve_options given{};
        given.path = options.path, given.max_bytes = options.max_bytes, given.look_us = options.look.count();
        given.timeout_ns = options.timeout.count(), given.reconnect_ns = options.reconnect.count();
        shmserve_client *client = nullptr;
        if (!detail::call(error, [&](shmserve_error *e) { return shmserve_connect(&given, &client, e); }))
            client_.reset(client);
    }
    explicit Client(const char *path, shmserve_error *error = nullptr) : Client(at(path), error) {}
    explicit operator bool() const noexcept { return static_cast<bool>(client_); }

    // Allocate shared memory. Each buffer is a region of the server: allocate few, keep them, and use parts.
    template <class T> Buffer<T> allocate(std::size_t count, shmserve_error *error = nullptr) {
        void *data = nullptr;
        const std::size_t nbytes = count > SIZE_MAX / sizeof(T) ? SIZE_MAX : count * sizeof(T);
        detail::call(error, [&](shmserve_error *e) {
            shmserve_error own{};
            data = shmserve_alloc(c(), nbytes, &own);
            if (!data) *e = own;
            return own.code;
        });
        return Buffer<T>(c(), static_cast<T *>(data), data ? count : 0);
    }
    // Describe a model; version "": the newest. A timeout of 0 is 5 s.
    Model describe(const char *name, const char *version = "", Nanoseconds timeout = {}, shmserve_error *error = nullptr) {
        shmserve_model *found = nullptr;
        detail::call(error, [&](shmserve_error *e) {
            return shmserve_describe(c(), name, version, timeout.count(), &found, e);
        });
        return Model(found);
    }
    // Open a lane; version "": the newest at any time. A timeout of 0 is 5 s.
    Lane lane(const char *model, const char *version = "", Nanoseconds timeout = {}, shmserve_error *error = nullptr) {
        shmserve_lane *opened = nullptr;
        detail::call(error, [&](shmserve_error *e) {
            return shmserve_lane_open(c(), model, version, timeout.count(), &opened, e);
        });
        return Lane(opened);
    }

    shmserve_client *c() const noexcept { return client_.get(); }

private:
    static Options at(const char *path) {
        Options options;
        options.path = path;
        return options;
    }

    std::unique_ptr<shmserve_client, detail::Closer<shmserve_client, shmserve_close>> client_;
};

} // namespace shmserve

#endif
