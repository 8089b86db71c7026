// Kernels whose workgroups share global memory, rightly and wrongly.
#define KERNEL(n) extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, n)))

typedef unsigned int u32;
typedef unsigned long long u64;

static inline __attribute__((device)) u32 group() { return __builtin_amdgcn_workgroup_id_x(); }
static inline __attribute__((device)) u32 item() { return __builtin_amdgcn_workitem_id_x(); }

// A workgroup reads its own row of `read` and writes row + shift of `write`.
KERNEL(64) void rows(const u32* read, u32* write, u32 shift) {
    write[(group() + shift) * 64 + item()] = read[group() * 64 + item()] + 1;
}

// All workgroups store a value to the same words: their own, or one of all.
KERNEL(64) void collide(u32* out, u32 same) { out[item()] = same ? same : group(); }

// Neighbouring bytes of a word, one of each of four workgroups, and one that they all know.
KERNEL(64) void bytes(unsigned char* out) {
    out[item() * 4 + group()] = static_cast<unsigned char>(group() + 1);
}

// A sum over workgroups: the last one that adds to `count`, or (wrongly) the one of the highest
// number, adds up what all have stored.
KERNEL(64) void sum(u32* parts, u32* count, u32* out, u32 groups, u32 by_number) {
    __attribute__((shared)) static u32 last;
    parts[group() * 64 + item()] = group() + item();
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    if (item() == 0)
        last = by_number ? group()
                         : __hip_atomic_fetch_add(count, 1, __ATOMIC_RELAXED,
                                                  __HIP_MEMORY_SCOPE_AGENT);
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    if (last != groups - 1) return;
    u32 total = 0;
    for (u32 g = 0; g < groups; ++g) total += parts[g * 64 + item()];
    out[item()] = total;
}

// The first workgroup hands its values to the second with a flag, which is an atomic or is not.
KERNEL(64) void hand_over(u32* values, u32* flag, u32* out, u32 plain) {
    if (group() == 0) {
        values[item()] = item() * 3;
        if (plain)
            *flag = 1;
        else
            __hip_atomic_store(flag, 1, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
    } else if (plain) {
        out[item()] = *flag ? values[item()] : 0;
    } else {
        while (__hip_atomic_load(flag, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT) == 0)
            __builtin_amdgcn_s_sleep(1);
        out[item()] = values[item()];
    }
}

// A histogram by atomics; the last workgroup also reads (wrongly) without one.
KERNEL(64) void count(u32* bins, u32* out, u32 peek) {
    __hip_atomic_fetch_add(&bins[item() % 4], 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    if (group() == peek) out[item()] = bins[item() % 4];
}

__attribute__((device, used)) const u32 kTable[64] = {1, 2, 3};

// Stores into its own code, or into a table of constants; loading from both is allowed.
KERNEL(64) void scribble(u32* out, u32 where) {
    u64 here;
    __asm__ volatile("s_getpc_b64 %0" : "=s"(here));
    u32* to = where == 0 ? reinterpret_cast<u32*>(here)
                         : const_cast<u32*>(reinterpret_cast<const u32*>(&kTable[0]));
    __asm__ volatile("" : "+v"(to));
    out[item()] = to[item() % 4];
    if (where == 2) __hip_atomic_fetch_add(&to[item()], 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    if (where < 2) to[item()] = 7;
}
