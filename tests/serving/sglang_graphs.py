"""Decode steps that SGLang captures in a graph and replays, on the emulated MI300X.

SGLang's own runner needs a GPU. Here its part is played with its own classes: pools, static buffers
and their padding, the view of a batch that a replay gets, and the order of the hooks. The device's
part is played by the emulator: a graph holds the backend's kernels as machine code, the one that
gathers page tables as Triton compiles it for gfx942, and what other kernels do as host functions.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator.swa import PureSWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.plugins import load_plugins
from torch.utils._python_dispatch import TorchDispatchMode

from liteattention_emulator import (
    EmulatorError,
    Graph,
    Stream,
    capture,
    library,
    native,
    registered,
    set_option,
)
from liteattention_rocm import remembered
from liteattention_rocm.engines import LIBRARY_VARIABLE
from liteattention_rocm.engines.environment import settings
from liteattention_sglang import srt, srt_kernels, srt_step
from tests.emulator.triton_kernels import compile_for_gfx942
from tests.engines.gfx942.host.test_language_model import (
    HIDDEN,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    VOCABULARY,
    Model,
)

load_plugins()

DIM, SLOTS, CONTEXT = 64, 4096, 4096
#: Slots that requests may have: fewer than they want in all.
USED = 400
#: Requests that there are graphs for.
GRAPHS = (2, 4)
#: Prompts (tokens), when they come, and how many tokens they make.
PROMPTS = ((270, 0, 14), (5, 0, 9), (23, 0, 4), (12, 0, 10), (40, 5, 7), (9, 5, 3))
#: Of prompts with which no step's two best tokens are close.
SEED = 44
TYPES = {torch.int32: "*i32", torch.int64: "*i64"}


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Attend on an engine by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITEATTENTION_ENGINE", name)
        patch.setenv(LIBRARY_VARIABLE, str(library()))
        settings.cache_clear()
        remembered.forget()
        yield
    settings.cache_clear()
    remembered.forget()


class Launcher:
    """Launches a Triton kernel as Triton does, on the emulated device and its current stream.

    Modules are loaded by a launch outside of captures, as Triton does.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._hip, self._loaded = kernel, native.functions(), {}

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
        hip, given = self._hip, {}
        for name, value in zip(self._kernel.arg_names, arguments, strict=False):
            if value is None:
                constants[name] = None
            else:
                given[name] = value
        types = {n: TYPES[v.dtype] if hasattr(v, "dtype") else "i32" for n, v in given.items()}
        key = (*types.items(), *constants.items())
        if key not in self._loaded:
            compiled = compile_for_gfx942(self._kernel, types, constants)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            error = hip.hipModuleLoadData(ctypes.byref(module), compiled.code_object)
            native.check(error, "hipModuleLoadData")
            name = compiled.name.encode()
            error = hip.hipModuleGetFunction(ctypes.byref(function), module, name)
            native.check(error, "hipModuleGetFunction")
            self._loaded[key] = compiled, function
        compiled, function = self._loaded[key]
        tensors = [v for v in given.values() if isinstance(v, torch.Tensor)]
        packed = [
            ctypes.c_void_p(v.data_ptr()) if isinstance(v, torch.Tensor) else ctypes.c_int32(v)
            for v in given.values()
        ]
        packed += [ctypes.c_void_p()] * 2  # Triton's scratch
        addresses = (ctypes.c_void_p * (len(packed) + 1))(*map(ctypes.addressof, packed), None)
        stream = hip.lae_current_stream()
        launch = functools.partial(
            hip.hipModuleLaunchKernel, function, *grid, 1, compiled.threads, 1, 1,
            compiled.lds_bytes, stream, addresses, None,
        )  # fmt: skip
        hip.lae_capturing.argtypes = [ctypes.c_void_p]
        if hip.lae_capturing(stream):
            hip.lae_graph_touches.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
            for tensor in tensors:
                whole = tensor.untyped_storage()
                hip.lae_graph_touches(stream, whole.data_ptr(), whole.nbytes())
            native.check(launch(), "hipModuleLaunchKernel")
        else:
            with registered(*tensors):
                native.check(launch(), "hipModuleLaunchKernel")


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield Launcher(srt_kernels.fill_step)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> Iterator[None]:
    """CPU tensors are the memory of the emulated device, whose checkers are on."""
    set_option("check", "on")
    monkeypatch.setattr(srt_step, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(srt_kernels, "fill_step", launcher)
    with engine("gfx942"):
        yield
    set_option("check", "")


@dataclass
class Request:
    """Tokens so far, how many it may have, its row of ``req_to_token``, its pages."""

    tokens: list[int]
    most: int
    row: int
    done: int = 0
    pages: list[int] = field(default_factory=list)


class Runner:
    """A model runner of SGLang: pools, static buffers, a backend; the model is a small llama.

    The last ``windows`` layers see 40 keys each, and have slots of their own.
    """

    def __init__(self, page: int = 16, windows: int = 1, name: str = "") -> None:
        self.page, self.random = page, torch.Generator().manual_seed(9)
        self.model = Model(DIM, torch.bfloat16, name)
        self.layers = [
            RadixAttention(Q_HEADS, DIM, DIM**-0.5, KV_HEADS, n,
                           sliding_window_size=39 if n >= LAYERS - windows else -1)
            for n in range(LAYERS)
        ]  # fmt: skip
        options = {
            "page_size": page, "dtype": torch.bfloat16, "head_num": KV_HEADS, "head_dim": DIM,
            "device": "cpu",
        }  # fmt: skip
        full, near = list(range(LAYERS - windows)), list(range(LAYERS - windows, LAYERS))
        if windows:
            self.pool = SWAKVPool(
                size=SLOTS if full else 0, size_swa=SLOTS, swa_attention_layer_ids=near,
                full_attention_layer_ids=full, **options,
            )  # fmt: skip
        if not full:
            PureSWATokenToKVPoolAllocator(SLOTS, page, torch.bfloat16, "cpu", self.pool, False)
        elif windows:
            moved = torch.randperm(SLOTS // page - 1, generator=self.random) + 1
            mapping = torch.zeros(SLOTS + page + 1, dtype=torch.int64)
            mapping[page:SLOTS] = (moved[:, None] * page + torch.arange(page)).flatten()
            self.pool.register_mapping(mapping)
        else:
            self.pool = MHATokenToKVPool(
                size=SLOTS, layer_num=LAYERS, enable_memory_saver=False, **options
            )
        self.requests = ReqToTokenPool(8, CONTEXT, "cpu", enable_memory_saver=False)
        self.backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](
            SimpleNamespace(
                model=torch.nn.ModuleList(self.layers), token_to_kv_pool=self.pool,
                req_to_token_pool=self.requests, page_size=page, is_draft_worker=False,
                kv_index_translator=SimpleNamespace(is_translating=False), dtype=torch.bfloat16,
                kv_cache_dtype=torch.bfloat16,
            )
        )  # fmt: skip
        pages = torch.randperm(SLOTS // page - 1, generator=self.random) + 1
        self.free = pages[: USED // page].tolist()

    def make_buffers(self) -> None:
        """SGLang's static buffers of decode steps."""
        most = max(GRAPHS)
        self.backend.init_cuda_graph_state(most, most)
        self.fill_value = self.backend.get_cuda_graph_seq_len_fill_value()
        self.buffers = build_decode_registry(
            device=torch.device("cpu"), max_bs=most, max_num_token=most,
            seq_len_fill_value=self.fill_value, cache_loc_dtype=torch.int64, share_pool=False,
        )  # fmt: skip
        for name in ("seq_lens", "seq_lens_cpu"):
            self.buffers.get_slot(name).buffer.fill_(self.fill_value)

    def batch(self, requests: list[Request], new: list[int]) -> ForwardBatch:
        """The next ``new`` tokens of each request, which are given slots."""
        slots, tokens, positions = [], [], []
        table = self.requests.req_to_token
        for request, count in zip(requests, new, strict=True):
            while len(request.pages) * self.page < request.done + count:
                request.pages.append(self.free.pop())
            for at in range(request.done, request.done + count):
                slots.append(request.pages[at // self.page] * self.page + at % self.page)
                table[request.row, at] = slots[-1]
                tokens.append(request.tokens[at])
                positions.append(at)
            request.done += count
        lengths = torch.tensor([request.done for request in requests])
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE, batch_size=len(requests),
            input_ids=torch.tensor(tokens), positions=torch.tensor(positions),
            req_pool_indices=torch.tensor([request.row for request in requests]),
            seq_lens=lengths, seq_lens_cpu=lengths.clone(), out_cache_loc=torch.tensor(slots),
            seq_lens_sum=int(lengths.sum()),
        )  # fmt: skip
        if max(new) > 1:
            batch.forward_mode = ForwardMode.EXTEND
            batch.extend_seq_lens = torch.tensor(new, dtype=torch.int32)
            batch.extend_seq_lens_cpu = new
        return batch

    def forward(self, batch: ForwardBatch, host: Callable[[Callable[[], None]], None]) -> Any:
        """Logits of every row; ``host`` runs, or records, what is no launch of the backend."""
        rows, model = batch.input_ids.shape[0], self.model
        x, logits = torch.zeros(rows, HIDDEN), torch.zeros(rows, VOCABULARY)
        norm = functools.partial(torch.nn.functional.rms_norm, normalized_shape=(HIDDEN,))

        def embed() -> None:
            x.copy_(model.embedding[batch.input_ids])

        def project(w: Any, q: Any, k: Any, v: Any) -> None:
            h = norm(x)
            for to, name in ((q, "q"), (k, "k"), (v, "v")):
                heads = (h @ w[name].T).unflatten(-1, (-1, DIM))
                if name != "v":
                    heads = model.rotate(heads, batch.positions)
                to.copy_(heads.view(to.shape))

        def finish(w: Any, out: Any) -> None:
            x.add_(out.float() @ w["o"].T)
            h = norm(x)
            x.add_((torch.nn.functional.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T)

        def predict() -> None:
            logits.copy_(norm(x) @ model.head.T)

        host(embed)
        for w, layer in zip(model.layers, self.layers, strict=True):
            q = torch.zeros(rows, Q_HEADS * DIM).bfloat16()
            k, v = torch.zeros(2, rows, KV_HEADS, DIM).bfloat16()
            host(functools.partial(project, w, q, k, v))
            out = self.backend.forward(q, k, v, layer, batch)
            host(functools.partial(finish, w, out))
        host(predict)
        return logits

    def eager(self, batch: ForwardBatch) -> Any:
        self.backend.init_forward_metadata(batch)
        return self.forward(batch, lambda function: function())

    def static(self, size: int) -> ForwardBatch:
        """A batch of the static buffers, as SGLang captures it."""
        slot = {
            name: self.buffers.get_slot(name).slice_for(size, size)
            for name in ("input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu",
                         "out_cache_loc", "positions")
        }  # fmt: skip
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE, batch_size=size, seq_lens_sum=size, **slot
        )

    def capture(self, size: int, metadata: bool = True) -> tuple[Graph, Any]:
        """The graph of a step and its logits, captured in the order of SGLang's runner.

        Without ``metadata`` the backend's in-graph hook runs before the capture only.
        """
        batch = self.static(size)
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)

        def once(host: Callable[[Callable[[], None]], None], hook: bool) -> Any:
            if hook:
                self.backend.init_forward_metadata_in_graph(batch)
            return self.forward(batch, host)

        with Stream() as stream:
            for _ in range(2):
                once(lambda function: function(), True)
                self.backend.on_after_cuda_graph_warmup()
            with capture(stream) as graph:
                logits = once(graph.call, metadata)
        return graph, logits

    def replay(self, graphs: dict[int, tuple[Graph, Any]], batch: ForwardBatch) -> Any:
        """Bring the step into the static buffers, padded, and launch its graph, if there is one."""
        raw = batch.batch_size
        if raw > max(graphs):
            return self.eager(batch)
        size = min(n for n in graphs if n >= raw)
        self.buffers.fill_from(
            batch, raw_bs=raw, padded_bs=size, raw_num_tokens=raw, padded_num_tokens=size
        )
        buffers = SimpleNamespace(
            **{
                name: self.buffers.get_slot(name).buffer
                for name in ("input_ids", "positions", "req_pool_indices", "seq_lens",
                             "seq_lens_cpu")
            },
            mamba_track_indices=None,
        )  # fmt: skip
        view = build_replay_fb_view(
            batch, buffers, size, raw, size, None, self.fill_value, ForwardMode.DECODE, False
        )
        self.backend.init_forward_metadata_out_graph(view)
        graph, logits = graphs[size]
        graph.launch()
        return logits[:raw]


def serve(runner: Runner, decode: Callable[[ForwardBatch], Any], steps: int = 99) -> Any:
    """Serve PROMPTS greedily; returns tokens, logits, and the requests of each decode step."""
    g = torch.Generator().manual_seed(SEED)
    everyone = [
        Request(torch.randint(VOCABULARY, (length,), generator=g).tolist(), length + made, row)
        for row, (length, _, made) in enumerate(PROMPTS, 1)
    ]
    logits, sizes = [], []

    def take(requests: list[Request], rows: Any) -> None:
        for request, row in zip(requests, rows, strict=True):
            logits.append(row.clone())
            request.tokens.append(int(row.argmax()))
            if len(request.tokens) == request.most:
                runner.free[:0] = request.pages  # others are given them

    for step in range(steps):
        for request, (length, comes, _) in zip(everyone, PROMPTS, strict=True):
            if comes == step:
                take([request], runner.eager(runner.batch([request], [length]))[-1:])
        active = [
            request
            for request, (_, comes, _) in zip(everyone, PROMPTS, strict=True)
            if comes <= step and len(request.tokens) < request.most
        ]
        if not active:
            break
        take(active, decode(runner.batch(active, [1] * len(active))))
        sizes.append(len(active))
    made = [r.tokens[length:] for r, (length, _, _) in zip(everyone, PROMPTS, strict=True)]
    return made, torch.stack(logits), sizes


KINDS = [
    pytest.param(16, 1, id="pages, windows"),
    pytest.param(1, 0, id="slots"),
    pytest.param(1, LAYERS, id="slots, windows only"),
]


@functools.cache
def expected(page: int, windows: int) -> Any:
    """What the CPU engine serves, eagerly."""
    with engine("cpu"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(srt_step, "on_gpu", lambda tensor: False)
        runner = Runner(page, windows)
        return serve(runner, runner.eager)


@pytest.mark.parametrize(("page", "windows"), KINDS)
def test_graphs_captured_once_serve_every_step(page: int, windows: int, gpu: None) -> None:
    truth = expected(page, windows)
    runner = Runner(page, windows)
    runner.make_buffers()
    graphs = {size: runner.capture(size) for size in reversed(GRAPHS)}
    others, kernels = ("hipLaunchHostFunc",) * 2, ("write_kv", "attention_decode_bf16_d64_rtne")
    merge = "merge_decode_bf16_rtne"
    first, last = (kernels if windows > n else (*kernels, merge) for n in (1, 0))
    for graph, _ in graphs.values():  # one launch for what a step brings
        assert graph.nodes == ("fill_step", *others, *first, *others, *last, *others)
    found = serve(runner, functools.partial(runner.replay, graphs))
    # Full graphs, padded ones, and eager steps between them; pages of requests that have ended.
    assert {1, 2, 3, 4, 5} == set(found[2]) and found[2] == truth[2]
    assert sum(length + made for length, _, made in PROMPTS) > USED
    assert found[0] == truth[0]
    # Nor is that luck: no winner's lead over the second differs by more than half between engines.
    top = truth[1].topk(2)
    lead = top.values[:, 0] - top.values[:, 1]
    near = found[1].gather(-1, top.indices)
    change = (near[:, 0] - near[:, 1] - lead).abs()
    assert (lead > 2 * change).all(), f"lead {lead.min():.4f}, {(lead / change).min():.2f} changes"
    for graph, _ in graphs.values():
        graph.close()


def test_tables_of_the_capture_are_noticed(gpu: None) -> None:
    """What a backend would do that gathers lengths and pages outside of its graph."""
    made = serve(Runner(), lambda batch: torch.zeros(batch.batch_size, VOCABULARY), 1)[0]
    runner, truth = Runner(), expected(16, 1)
    runner.make_buffers()
    graph = runner.capture(4, metadata=False)
    found = serve(runner, functools.partial(runner.replay, {4: graph}), 3)[0]
    assert [tokens[0] for tokens in found[:4]] == [tokens[0] for tokens in made[:4]]
    assert any(a != b[: len(a)] for a, b in zip(found, truth[0], strict=True))


def test_what_a_capture_forbids_fails_it(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Had a hook allocated, waited for the device, or loaded its kernel too late."""
    runner, hip = Runner(), native.functions()
    runner.make_buffers()
    runner.capture(2)[0].close()
    batch, host, place = runner.static(2), (ctypes.c_char * 64)(), ctypes.c_void_p()
    refill = runner.backend._steps.refill
    cold = Launcher(srt_kernels.fill_step._kernel)
    for call, name in (
        (lambda: hip.hipMalloc(ctypes.byref(place), 64), "hipMalloc"),
        (lambda: hip.hipMemcpy(host, batch.seq_lens.data_ptr(), 16, 2), "hipMemcpy"),
        (lambda: monkeypatch.setattr(srt_kernels, "fill_step", cold), "hipModuleLoadData"),
    ):

        def late(batch: Any, call: Callable[[], Any] = call) -> Any:
            call()
            return refill(batch)

        monkeypatch.setattr(runner.backend._steps, "refill", late)
        with Stream() as stream, pytest.raises(EmulatorError) as error, capture(stream):
            runner.backend.init_forward_metadata_in_graph(batch)
        assert name in str(error.value) or "Invalidated" in str(error.value)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_kernel_gathers_what_the_cpu_gathers(
    gpu: None, monkeypatch: pytest.MonkeyPatch, page: int, parts: int
) -> None:
    """Several blocks of pages, fewer programs than blocks, rows and tables with strides."""
    monkeypatch.setattr(srt_kernels, "BLOCK", 64)
    monkeypatch.setattr(srt_kernels, "MOST_PARTS", parts)
    g = torch.Generator().manual_seed(3)
    context, near = 200 * page, 37
    pages = torch.randperm(9 * 200, generator=g).view(9, 200, 1) + 1
    slots = (pages * page + torch.arange(page)).view(9, context).int()
    wide = torch.full((9, context + 5), -7, dtype=torch.int32)
    wide[:, :context] = slots
    moved = (torch.randperm(1801, generator=g)[:, None] * page + torch.arange(page)).flatten()
    lengths = torch.tensor([1, context, 63 * page + 1, 64 * page, 30])
    rows = torch.tensor([3, 0, 8, 1, 4])
    out = torch.tensor([int(slots[row, n - 1]) for row, n in zip(rows, lengths, strict=True)])
    for windows in (moved, None):
        found = []
        for on_gpu in (True, False):
            monkeypatch.setattr(srt_step, "on_gpu", lambda tensor, on_gpu=on_gpu: on_gpu)
            kv_len = torch.zeros(5, dtype=torch.int32)
            tables = torch.full((2, 5, 203), -1, dtype=torch.int32)
            window_slots = torch.full((7,), -1)
            srt_step.fill(
                wide[:, :context], rows, lengths, kv_len, tables, page, windows, out,
                window_slots, near,
            )  # fmt: skip
            assert kv_len.tolist() == lengths.tolist()
            assert window_slots.tolist() == ([-1] * 7 if windows is None else
                                             [*moved[out].tolist(), -1, -1])  # fmt: skip
            found.append(tables)
        for r, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
            used, first = -(-length // page), max(length - near, 0) // page
            right = slots[row, : used * page : page]
            for tables in found:
                assert tables[0, r, :used].tolist() == (right // page).tolist()
                if windows is not None:
                    seen = (moved[right[first:].long()] // page).tolist()
                    assert tables[1, r, first:used].tolist() == seen
            # The kernel goes no further than a request is long.
            assert (found[0][0, r, used:] == -1).all()
        assert (found[0][1] == -1).all() == (windows is None)


class Operations(TorchDispatchMode):
    """PyTorch operations that are more than views, and the bytes of new storages."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.allocated = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.names.append(str(function))
            given = [*args, *(kwargs or {}).values()]
            known = {x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                self.allocated += out.untyped_storage().nbytes()
        return out


def test_a_replay_asks_nothing_of_the_host(gpu: None) -> None:
    """Nor does what a capture records: no operation but the backend's own launches."""
    runner = Runner()
    runner.make_buffers()
    runner.capture(4)[0].close()
    batch = runner.static(4)
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        calls.append(argument.__name__ if event == "c_call" else frame.f_code.co_name)

    with Operations() as operations:
        runner.backend.init_forward_metadata_in_graph(batch)
        assert not operations.names
        sys.setprofile(note)
        runner.backend.init_forward_metadata_out_graph(batch)
        sys.setprofile(None)
    assert [c for c in calls if c != "setprofile"] == ["init_forward_metadata_out_graph"] * 2
    # And the check is sharp: an eager step on a CPU does read lengths.
    with Operations() as operations, pytest.MonkeyPatch.context() as patch:
        patch.setattr(srt_step, "on_gpu", lambda tensor: False)
        runner.backend.init_forward_metadata(batch)
    assert "aten._local_scalar_dense.default" in operations.names


#: What waits for a device or copies what lies on it, as PyTorch's functions are called.
WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize"}
#: What allocates. A layer's output does, in the memory of the graph.
ALLOCATES = {"empty", "zeros", "full", "arange", "tensor", "clone", "contiguous", "to", "float"}


def test_the_host_does_little_for_a_layer(gpu: None) -> None:
    """Python functions per layer, its cache written and its rows attended to."""
    runner = Runner()
    runner.make_buffers()
    batch = runner.static(4)
    runner.capture(4)[0].close()
    q = torch.zeros(4, Q_HEADS * DIM).bfloat16()
    k, v = torch.zeros(2, 4, KV_HEADS, DIM).bfloat16()
    runner.backend.init_forward_metadata_in_graph(batch)
    python: list[str] = []
    native_calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            python.append(frame.f_code.co_name)
        elif event == "c_call":
            native_calls.append(argument.__name__)

    for layer in runner.layers:
        runner.backend.forward_decode(q, k, v, layer, batch)
        python.clear()
        native_calls.clear()
        sys.setprofile(note)
        runner.backend.forward_decode(q, k, v, layer, batch)
        sys.setprofile(None)
        print(f"{len(python)} Python functions: {python}\n{native_calls}")
        assert len(python) <= 25
        assert not WAITS & set(native_calls) and not ALLOCATES & set(native_calls)
        assert native_calls.count("empty_like") == 1


@pytest.mark.parametrize("page", [1, 16])
def test_no_memory_grows_with_the_context(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    """Tables are as wide as what requests have, and stay from one step to the next."""
    allocated, tables = [], []
    for context in (2048, 131072):
        table = torch.zeros(65, context, dtype=torch.int32)
        steps = srt_step.Steps(table, page, context)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE, batch_size=64, req_pool_indices=torch.arange(64),
            seq_lens=torch.full((64,), 1000), seq_lens_cpu=torch.full((64,), 1000),
            out_cache_loc=torch.zeros(64, dtype=torch.int64),
        )  # fmt: skip
        first = steps.eager(batch)
        with Operations() as operations:
            second = steps.eager(batch)
        assert first is not None and second is not None
        assert first.batch.page_table.data_ptr() == second.batch.page_table.data_ptr()
        allocated.append(operations.allocated)
        tables.append(steps._eager.tables.nbytes)
    assert allocated[0] == allocated[1] < 100  # the longest request, and nothing of each
    # The tables that there are: of 64 requests' 1,000 tokens, rounded up; 4 bytes a page.
    assert tables[0] == tables[1] <= 64 * 1024 // page * 4

    monkeypatch.setattr(srt_step, "on_gpu", lambda tensor: True)
    with engine("reference"):
        steps = srt_step.Steps(table, page, 131072)
        steps.prepare_graphs(256, 256)
        # Once for all graphs, whose sizes share it: 134 MB at one token a page, 8 MB at 16.
        assert steps._graphs is not None
        assert steps._graphs.tables.nbytes == 256 * 131072 // page * 4
        places = {steps.captured(n).batch.page_table.data_ptr() for n in (256, 8, 1)}
        assert len(places) == 1
        with Operations() as operations:
            assert steps.captured(8) is steps.captured(8)
        assert not operations.names


def test_bounds_are_never_below_a_step() -> None:
    """Warm-ups bring dummy steps that are longer than the cache; plans are shared below that."""
    with engine("reference"):
        steps = srt_step.Steps(torch.zeros(3, 300, dtype=torch.int32), 1, 200)
        bounds = []
        for length in (5, 8, 150, 200, 290):
            batch = SimpleNamespace(
                forward_mode=ForwardMode.DECODE, batch_size=1, req_pool_indices=torch.tensor([2]),
                seq_lens=torch.tensor([length]), seq_lens_cpu=torch.tensor([length]),
                out_cache_loc=torch.tensor([0]),
            )  # fmt: skip
            step = steps.eager(batch)
            assert step is not None
            bounds.append((step.batch.max_kv_len, step.batch.page_table.shape[1]))
    assert bounds == [(n, n) for n in (8, 8, 200, 200, 290)]


def test_graphs_need_an_engine_that_plans_from_bounds() -> None:
    with engine("cpu"), pytest.raises(ValueError, match="--cuda-graph-backend-decode=disabled"):
        Runner().make_buffers()


def test_prompts_are_not_captured_whole(gpu: None) -> None:
    runner = Runner()
    runner.make_buffers()
    batch = runner.static(2)
    batch.forward_mode = ForwardMode.EXTEND
    with pytest.raises(ValueError, match="--cuda-graph-backend-prefill=breakable"):
        runner.backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_a_breakable_graph_of_a_prompt_gets_its_rows_in_its_own_memory() -> None:
    """Its segments are of a padded size; attention runs between them on the rows there are."""
    with engine("cpu"):
        runner, other = Runner(), Runner()
        requests = [Request([1] * n, 99, row) for row, n in ((1, 30), (2, 3))]
        again = [Request([1] * n, 99, row) for row, n in ((1, 30), (2, 3))]
        batch, same = runner.batch(requests, [30, 3]), other.batch(again, [30, 3])
        runner.backend.init_forward_metadata(batch)
        other.backend.init_forward_metadata(same)
        padded = torch.full((48, Q_HEADS * DIM), 7.0).bfloat16()
        q = torch.randn(33, Q_HEADS * DIM).bfloat16()
        k, v = torch.randn(2, 33, KV_HEADS, DIM).bfloat16()
        # As RadixAttention does when it is in such a graph.
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(15, dtype=torch.int64)])
        for layer, twin in zip(runner.layers, other.layers, strict=True):
            batch._attn_output = padded[:33]
            out = runner.backend.forward(q, k, v, layer, batch)
            right = other.backend.forward(q, k, v, twin, same)
            assert out.data_ptr() == padded.data_ptr() and torch.equal(out, right)
            assert (padded[33:] == 7.0).all()


def test_sinks_follow_the_weights() -> None:
    """SGLang does not say when weights change; those of all layers are converted once per step."""
    with engine("cpu"):
        runner = Runner(windows=0)
        requests = [Request([1] * 9, 99, 1)]
        sinks = [torch.zeros(Q_HEADS).bfloat16() for _ in runner.layers]
        q = torch.randn(1, Q_HEADS * DIM).bfloat16()
        k, v = torch.randn(2, 1, KV_HEADS, DIM).bfloat16()
        found = []
        for change in (0.0, 0.0, 3.0):
            for x in sinks:
                x.data += change  # PyTorch's version counter does not see it
            runner.backend.init_forward_metadata(runner.batch(requests, [1]))
            requests[0].done -= 1
            with Operations() as operations:
                runner.backend._sinks.refresh()
            assert len(operations.names) <= 1 + len(runner.layers)  # one operation; CPU: copies
            for layer, x in zip(runner.layers, sinks, strict=True):
                batch = runner.batch(requests, [1])
                requests[0].done -= 1
                found.append(runner.backend.forward(q, k, v, layer, batch, sinks=x))
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
        assert not torch.equal(found[0], found[4]) and not torch.equal(found[1], found[5])
