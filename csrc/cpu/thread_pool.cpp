#include "thread_pool.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace liteattention::cpu {
namespace {

class Pool {
   public:
    void Run(int threads, const std::function<void(int)>& body) {
        std::lock_guard<std::mutex> turn(turn_);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (workers_ < threads - 1) {
                const int index = ++workers_;
                std::thread([this, index, seen = round_] { Work(index, seen); }).detach();
            }
            body_ = &body;
            active_ = threads - 1;
            pending_ = threads - 1;
            ++round_;
        }
        wake_.notify_all();
        body(0);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return pending_ == 0; });
        body_ = nullptr;
    }

   private:
    void Work(int index, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (index > active_) continue;
            const std::function<void(int)>* body = body_;
            lock.unlock();
            (*body)(index);
            lock.lock();
            if (--pending_ == 0) done_.notify_one();
        }
    }

    std::mutex turn_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    const std::function<void(int)>* body_ = nullptr;
    uint64_t round_ = 0;
    int workers_ = 0;
    int active_ = 0;
    int pending_ = 0;
};

// Never destroyed: workers may outlive static destruction. A forked child has no workers, so it
// drops the parent's pool (whose locks may be held) and starts its own.
Pool* g_pool = nullptr;
std::once_flag g_once;

Pool& Instance() {
    std::call_once(g_once, [] {
        g_pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { g_pool = new Pool; });
    });
    return *g_pool;
}

}  // namespace

void ParallelRun(int threads, const std::function<void(int)>& body) {
    if (threads <= 1) {
        body(0);
        return;
    }
    Instance().Run(threads, body);
}

}  // namespace liteattention::cpu
