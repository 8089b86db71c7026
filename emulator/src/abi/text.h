// How lae_ functions hand text to their callers.
#pragma once

#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

namespace emulator {

// Of the calling thread's latest failed lae_ function.
std::string& last_error_text();

// Text that the caller returns with lae_free; null where there is no memory.
inline char* given(const std::string& text) {
    auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
    if (copy) std::memcpy(copy, text.c_str(), text.size() + 1);
    return copy;
}

// The text that `body` makes; null, and the reason in last_error_text, if it throws.
template <typename Body>
char* text_of(Body body) {
    try {
        return given(body());
    } catch (const std::exception& problem) {
        last_error_text() = problem.what();
        return nullptr;
    }
}

}  // namespace emulator
