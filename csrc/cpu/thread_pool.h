// The threads that calls run on.
#pragma once

#include <functional>

namespace liteattention::cpu {

// Runs body(0) ... body(threads - 1), body(0) on the caller, and returns when all are done.
// They are those of the OpenMP run-time that the process has loaded, if it has one; otherwise, and
// in a forked child, workers of our own, created on first need and kept, for which calls from
// several threads take turns. `body` must not throw.
void ParallelRun(int threads, const std::function<void(int)>& body);

}  // namespace liteattention::cpu
