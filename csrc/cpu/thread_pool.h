// A pool of worker threads that lives as long as the process.
#pragma once

#include <functional>

namespace liteattention::cpu {

// Runs body(0) ... body(threads - 1), body(0) on the caller, and returns when all are done.
// Workers are created on first need and kept; calls from several threads take turns. After a
// fork the child starts with no workers and makes its own. `body` must not throw.
void ParallelRun(int threads, const std::function<void(int)>& body);

}  // namespace liteattention::cpu
