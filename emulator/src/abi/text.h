// How the lae_ functions return text: memory that the caller frees, or null and an error.
#pragma once

#include <exception>
#include <string>

namespace emulator {

std::string& last_text_error();  // of the calling thread's latest failed lae_ function

char* given(const std::string& text);

template <typename Body>
char* text_of(Body body) {
    try {
        return given(body());
    } catch (const std::exception& problem) {
        last_text_error() = problem.what();
        return nullptr;
    }
}

}  // namespace emulator
