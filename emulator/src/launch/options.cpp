#include "launch/options.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "exec/exec.h"

namespace emulator {
namespace {

uint64_t number(const std::string& what, const std::string& text) {
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size())
        throw std::invalid_argument(what + " must be a number, not '" + text + "'");
    return value;
}

bool flag(const std::string& what, const std::string& text) {
    if (text == "on" || text == "1") return true;
    if (text == "off" || text == "0") return false;
    throw std::invalid_argument(what + " must be on or off, not '" + text + "'");
}

}  // namespace

Order Order::parse(const std::string& text) {
    Order order;
    const size_t colon = text.find(':');
    const std::string name = text.substr(0, colon);
    const bool more = colon != std::string::npos;
    const std::string rest = more ? text.substr(colon + 1) : "";
    if (name == "round-robin") {
        if (more)
            order.quantum = static_cast<uint32_t>(
                std::min<uint64_t>(number("quantum of order round-robin", rest), 1u << 30));
        if (order.quantum == 0)
            throw std::invalid_argument("quantum of order round-robin must be > 0");
        return order;
    }
    if (name == "random" && more) {
        order.kind = Kind::random;
        order.seed = number("seed of order random", rest);
        return order;
    }
    if (!more && (name == "first-ahead" || name == "last-ahead")) {
        order.kind = name == "first-ahead" ? Kind::first_ahead : Kind::last_ahead;
        return order;
    }
    throw std::invalid_argument("order '" + text +
                                "' is none of round-robin[:QUANTUM], random:SEED, first-ahead, "
                                "last-ahead");
}

void Options::set(const std::string& name, const std::string& value) {
    if (name == "check") {
        check = flag(name, value);
    } else if (name == "count") {
        count = flag(name, value);
    } else if (name == "threads") {
        const uint64_t wanted = number(name, value);
        if (wanted > 1024) throw std::invalid_argument("threads must be at most 1024");
        threads = static_cast<unsigned>(wanted);
    } else if (name == "order") {
        order = Order::parse(value);
    } else if (name == "variant") {
        handlers(value);
        variant = value;
    } else if (name == "steps") {
        steps = number(name, value);
        if (steps == 0) throw std::invalid_argument("steps must be > 0");
    } else {
        throw std::invalid_argument("option '" + name +
                                    "' is none of check, count, threads, order, variant, steps");
    }
}

Options Options::from_environment() {
    Options options;
    bool counted = false;
    for (const char* name : {"check", "count", "threads", "order", "variant", "steps"}) {
        std::string variable = "LITEATTENTION_EMULATOR_";
        for (const char* c = name; *c; ++c) variable += static_cast<char>(*c - 'a' + 'A');
        const char* value = std::getenv(variable.c_str());
        if (!value || !*value) continue;
        try {
            options.set(name, value);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(variable + ": " + error.what());
        }
        counted |= std::strcmp(name, "count") == 0;
    }
    if (!counted) options.count = options.check;
    return options;
}

}  // namespace emulator
