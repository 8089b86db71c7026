// The CPU kernels as Python sees them.
#include <bit>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../cpu/attention.h"
#include "../cpu/ragged.h"
#include "binding.h"

namespace liteattention::binding {

namespace {

cpu::Strides ToStrides(const Triple& t) { return {t[0], t[1], t[2]}; }

cpu::Isa ParseIsa(const std::string& name) {
    for (const cpu::IsaName& known : cpu::kIsaNames) {
        if (name != known.name) continue;
        for (cpu::Isa isa : cpu::AvailableIsas())
            if (isa == known.isa) return isa;
    }
    throw py::value_error("instruction set not available here: " + name);
}

// Address of a tensor's data, 0 for None.
uintptr_t Address(py::handle tensor) {
    static PyObject* const name = PyUnicode_InternFromString("data_ptr");
    if (tensor.is_none()) return 0;
    const auto address =
        py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), name));
    if (!address) throw py::error_already_set();
    return address.cast<uintptr_t>();
}

void BindRagged(py::module_& m) {
    py::enum_<cpu::KvType>(m, "CpuKvType")
        .value("same", cpu::KvType::kSame)
        .value("fp8_e4m3", cpu::KvType::kFp8E4m3)
        .value("fp8_e5m2", cpu::KvType::kFp8E5m2)
        .value("fp8_e4m3fnuz", cpu::KvType::kFp8E4m3Fnuz)
        .value("fp8_e5m2fnuz", cpu::KvType::kFp8E5m2Fnuz);

    using S = cpu::RaggedShape;
    py::class_<S>(m, "CpuRaggedShape")
        .def(py::init([](int64_t requests, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                         int64_t value_dim, int64_t page_size, cpu::DType dtype,
                         cpu::KvType kv_type, cpu::Rounding rounding, double scale, double v_scale,
                         double soft_cap, std::optional<int64_t> lookahead, int64_t window) {
            return S{requests,
                     q_heads,
                     kv_heads,
                     head_dim,
                     value_dim,
                     page_size,
                     dtype,
                     kv_type,
                     rounding,
                     scale,
                     v_scale,
                     soft_cap,
                     lookahead.value_or(cpu::kSeesAll),
                     window};
        }));

    using B = cpu::PagedRequests;
    m.def("lengths_hold", [](uintptr_t q_start, uintptr_t kv_len, int64_t requests,
                             int64_t max_q_len, int64_t max_kv_len) {
        const B batch{requests, At<int32_t>(q_start), At<int32_t>(kv_len), nullptr, 0, 0};
        return cpu::LengthsHold(batch, max_q_len, max_kv_len);
    });
    m.def("pages_hold", [](uintptr_t q_start, uintptr_t kv_len, uintptr_t table, int64_t requests,
                           int64_t width, int64_t stride, int64_t rows, int64_t pages,
                           int64_t page_size) {
        const B batch{
            requests, At<int32_t>(q_start), At<int32_t>(kv_len), At<int32_t>(table), width, stride};
        return cpu::PagesHold(batch, rows, pages, page_size);
    });

    using Seen = cpu::SeenBatch;
    py::class_<Seen, std::shared_ptr<Seen>>(m, "CpuSeenBatch")
        .def(py::init([](uintptr_t q_start, uintptr_t kv_len, int64_t requests, int64_t width,
                         int64_t stride) {
            return Seen(
                B{requests, At<int32_t>(q_start), At<int32_t>(kv_len), nullptr, width, stride});
        }))
        .def("same_lengths",
             [](const Seen& seen, uintptr_t q_start, uintptr_t kv_len) {
                 return seen.SameLengths(At<int32_t>(q_start), At<int32_t>(kv_len));
             })
        // What says, of the tensors at these addresses, whether they hold for calls of these sizes.
        .def("check", [](std::shared_ptr<Seen> seen, uintptr_t q_start, uintptr_t kv_len,
                         uintptr_t table, int64_t rows, int64_t pages, int64_t page_size) {
            return py::cpp_function([=] {
                return seen->Holds(At<int32_t>(q_start), At<int32_t>(kv_len), At<int32_t>(table),
                                   rows, pages, page_size);
            });
        });

    using R = cpu::RaggedPlan;
    py::class_<R, std::shared_ptr<R>>(m, "CpuRaggedPlan")
        .def(py::init([](const S& shape, uintptr_t q_start, uintptr_t kv, uintptr_t page_table,
                         int64_t table_stride, const std::string& isa) {
            return std::make_shared<R>(shape, At<int32_t>(q_start), At<int32_t>(kv),
                                       At<int32_t>(page_table), table_stride, ParseIsa(isa));
        }))
        .def_property_readonly("tiles", &R::tiles)
        .def_property_readonly("parts", &R::parts);

    // A plan with the strides of a layer's tensors. `threads` says how many to use, at every call.
    struct Run {
        std::shared_ptr<R> plan;
        cpu::RaggedTensors tensors;
        py::object threads;
    };
    py::class_<Run>(m, "CpuRaggedRun")
        .def(py::init([](std::shared_ptr<R> plan, const Triple& q_strides, const Triple& k_strides,
                         const Triple& v_strides, const Triple& out_strides, int64_t lse_head,
                         py::object threads) {
            cpu::RaggedTensors tensors{};
            tensors.q_strides = ToStrides(q_strides);
            tensors.k_strides = ToStrides(k_strides);
            tensors.v_strides = ToStrides(v_strides);
            tensors.out_strides = ToStrides(out_strides);
            tensors.lse_head = lse_head;
            return Run{std::move(plan), tensors, std::move(threads)};
        }))
        // Takes the tensors as the contract's tuple of them.
        .def("__call__", [](const Run& run, const py::tuple& given) {
            cpu::RaggedTensors tensors = run.tensors;
            tensors.q = At<void>(Address(given[0]));
            tensors.k = At<void>(Address(given[1]));
            tensors.v = At<void>(Address(given[2]));
            tensors.out = At<void>(Address(given[3]));
            tensors.lse = At<float>(Address(given[4]));
            tensors.sinks = At<float>(Address(given[5]));
            const int threads = run.threads().cast<int>();
            py::gil_scoped_release release;
            run.plan->Run(tensors, threads);
        });

    using W = cpu::KvWrite;
    py::class_<W>(m, "CpuKvWrite")
        .def(py::init([](const Triple& shape, const Triple& k_strides, const Triple& v_strides,
                         int64_t pages, int64_t page_size, const Triple& k_cache_strides,
                         const Triple& v_cache_strides, bool wide_slots, cpu::DType dtype,
                         cpu::KvType kv_type, double k_scale, double v_scale) {
            W w;
            w.rows = shape[0];
            w.kv_heads = shape[1];
            w.head_dim = shape[2];
            w.k_strides = ToStrides(k_strides);
            w.v_strides = ToStrides(v_strides);
            w.pages = pages;
            w.page_size = page_size;
            w.k_cache_strides = ToStrides(k_cache_strides);
            w.v_cache_strides = ToStrides(v_cache_strides);
            w.wide_slots = wide_slots;
            w.dtype = dtype;
            w.kv_type = kv_type;
            w.k_scale = k_scale;
            w.v_scale = v_scale;
            return w;
        }))
        .def("run", [](const W& write, uintptr_t k, uintptr_t v, uintptr_t k_cache,
                       uintptr_t v_cache, uintptr_t slots, int threads) {
            W w = write;
            w.k = At<void>(k);
            w.v = At<void>(v);
            w.k_cache = At<void>(k_cache);
            w.v_cache = At<void>(v_cache);
            w.slots = At<void>(slots);
            py::gil_scoped_release release;
            return cpu::WriteKv(w, threads);
        });
}

}  // namespace

void BindCpu(py::module_& m) {
    m.attr("CPU_K_BLOCK") = cpu::kKBlock;
    m.attr("CPU_ROW_STEP") = cpu::kRowStep;
    m.attr("CPU_MAX_Q_BLOCK") = cpu::kMaxQBlock;
    m.attr("CPU_MAX_VOTE_ROWS") = cpu::kMaxQTile;
    m.attr("CPU_MAX_HEAD_DIM") = cpu::kMaxHeadDim;
    m.attr("CPU_ROW_GUARD") = cpu::kRowGuard;

    py::enum_<cpu::DType>(m, "DType")
        .value("bf16", cpu::DType::kBf16)
        .value("fp16", cpu::DType::kFp16)
        .value("fp32", cpu::DType::kFp32);
    py::enum_<cpu::Rounding>(m, "Rounding")
        .value("rtne", cpu::Rounding::kRtne)
        .value("rtna", cpu::Rounding::kRtna)
        .value("rtz", cpu::Rounding::kRtz);

    // A call with everything but its tensors. `threads` says how many to use, at every call.
    struct Call {
        cpu::AttentionParams params;
        int64_t batch;
        cpu::LiteParams lite;
        bool skips = false;
        cpu::Isa isa;
        py::object threads;
    };
    py::class_<Call>(m, "CpuAttention")
        .def(py::init([](const Triple& heads, const std::array<int64_t, 4>& sizes,
                         const Triple& q_strides, const Triple& k_strides, const Triple& v_strides,
                         const Triple& out_strides, cpu::DType dtype, cpu::Rounding rounding,
                         double scale, bool causal, const std::string& isa, py::object threads) {
            Call call{{}, heads[0], {}, false, ParseIsa(isa), std::move(threads)};
            cpu::AttentionParams& p = call.params;
            p.q_heads = heads[1];
            p.kv_heads = heads[2];
            p.q_len = p.lse_head = sizes[0];
            p.kv_len = sizes[1];
            p.head_dim = sizes[2];
            p.value_dim = sizes[3];
            p.q_strides = ToStrides(q_strides);
            p.k_strides = ToStrides(k_strides);
            p.v_strides = ToStrides(v_strides);
            p.out_strides = ToStrides(out_strides);
            p.dtype = dtype;
            p.rounding = rounding;
            p.scale = scale;
            if (causal) p.lookahead = 0;
            return call;
        }))
        .def("skip",
             [](Call& call, int64_t q_block, int64_t vote_rows, float threshold, bool descending,
                bool soft_skip, double budget) {
                 call.skips = true;
                 call.lite.budget = budget;
                 call.lite.q_block = q_block;
                 call.lite.vote_rows = vote_rows;
                 call.lite.threshold = threshold;
                 call.lite.descending = descending;
                 call.lite.soft_skip = soft_skip;
             })
        // Takes the tensors of the call as the contract's tuple of them: q, k, v, out, lse and, of
        // one that skips, read, write, must_do, must_skip, mass, tally (not written), limits.
        .def("__call__", [](const Call& call, const py::tuple& tensors) {
            cpu::AttentionParams p = call.params;
            p.q = At<void>(Address(tensors[0]));
            p.k = At<void>(Address(tensors[1]));
            p.v = At<void>(Address(tensors[2]));
            p.out = At<void>(Address(tensors[3]));
            p.lse = At<float>(Address(tensors[4]));
            cpu::LiteParams lite = call.lite;
            if (call.skips) {
                lite.read = At<uint32_t>(Address(tensors[5]));
                lite.write = At<uint32_t>(Address(tensors[6]));
                lite.must_do = At<uint32_t>(Address(tensors[7]));
                lite.must_skip = At<uint32_t>(Address(tensors[8]));
                lite.mass = At<float>(Address(tensors[9]));
                lite.limits = At<int32_t>(Address(tensors[11]));
            }
            const int threads = call.threads().cast<int>();
            py::gil_scoped_release release;
            cpu::Attention(p, call.batch, call.skips ? &lite : nullptr, threads, call.isa);
        });

    m.def("count_bits", [](uintptr_t words, int64_t count) {
        const uint32_t* word = At<uint32_t>(words);
        int64_t bits = 0;
        for (int64_t i = 0; i < count; ++i) bits += std::popcount(word[i]);
        return bits;
    });
    m.def("cpu_available_isas", [] {
        std::vector<std::string> names;
        for (cpu::Isa isa : cpu::AvailableIsas())
            for (const cpu::IsaName& known : cpu::kIsaNames)
                if (known.isa == isa) names.emplace_back(known.name);
        return names;
    });
    BindRagged(m);
}

}  // namespace liteattention::binding
