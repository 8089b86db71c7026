// The threads that calls run on.
#pragma once

#include <functional>

namespace liteattention::cpu {

// Runs body(0) ... body(threads - 1), body(0) on the caller, and returns when all are done. The
// caller may run others as well, one after the other: a body must not wait for another one.
//
// They run on the threads of the OpenMP run-time that the process has loaded, if it has one. Its
// barriers wait awake, which on a machine with other work burns whole time slices. So once one of
// its threads comes late, calls of the next 1 to 8 seconds run on threads of our own, as they
// always do without OpenMP and in a forked child. Those sleep while they wait, are created on first
// need and kept, and run where OpenMP's may. `body` must not throw.
void ParallelRun(int threads, const std::function<void(int)>& body);

}  // namespace liteattention::cpu
