"""torch.compile sees one opaque call per layer; Ulysses keeps lists for the heads of each rank."""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np
import pytest
import torch

import liteattention_diffusers
from liteattention_diffusers import enable
from liteattention_e2e import tiny
from liteattention_rocm import SkipPolicy

from .diffusers_cases import TILE

SKIPPING = SkipPolicy(threshold=-2.0)


@pytest.mark.parametrize("how", ["transformer", "blocks"])
def test_compiled_pipeline_is_one_graph_and_equals_eager(
    pipe: Any, generate: Any, how: str
) -> None:
    torch._dynamo.reset()
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        eager = generate(pipe)
        statistics = handle.statistics.by_step()
        handle.reset()
        torch._dynamo.utils.counters.clear()
        with torch._dynamo.config.patch(error_on_recompile=True):
            if how == "transformer":
                pipe.transformer.compile(fullgraph=True, backend="aot_eager")
            else:
                pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
            compiled = generate(pipe)
            again = generate(pipe)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        records = handle.statistics.to_records()
    assert np.array_equal(compiled, eager)
    assert np.array_equal(again, eager)
    assert graphs == 1
    first = [row for row in records if row["generation"] == records[0]["generation"]]
    for step in statistics:
        computed = sum(row["tiles_computed"] for row in first if row["step"] == step["step"])
        assert computed == step["tiles_computed"]


def test_operator_passes_opcheck() -> None:
    model = tiny.wan_transformer()
    with enable(model, geometry=TILE) as handle:
        slot = next(iter(handle._layers)).slot
        q, k, v = torch.randn(3, 1, 64, 2, 32)
        torch.library.opcheck(
            torch.ops.liteattention_rocm_diffusers.self_attention.default,
            (q, k, v, slot, None),
            test_utils=("test_schema", "test_faketensor"),
        )


def _rank(rank: int, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    config = ContextParallelConfig(ulysses_degree=2)
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(rank, 2, torch.device("cpu"), mesh=mesh)
    shard = [x.chunk(2, dim=1)[rank].contiguous() for x in _tensors()]
    model = tiny.wan_transformer(heads=2)
    report: dict[str, Any] = {}
    with torch.no_grad(), enable(model, SKIPPING, geometry=TILE) as handle:
        layer = next(iter(handle._layers))
        for step in range(3):
            handle._clock._watched.step = step
            liteattention_diffusers.backend.enter(layer.slot, None)
            out = dispatch_attention_fn(
                *shard, backend="liteattention_rocm", parallel_config=parallel
            )
            liteattention_diffusers.backend.leave()
        report["out"] = out
        report["records"] = handle.statistics.to_records()
        ring = ContextParallelConfig(ring_degree=2)
        liteattention_diffusers.backend.enter(layer.slot, None)
        try:
            dispatch_attention_fn(
                *shard,
                backend="liteattention_rocm",
                parallel_config=ParallelConfig(context_parallel_config=ring),
            )
        except ValueError as error:
            report["ring"] = str(error)
        finally:
            liteattention_diffusers.backend.leave()
    torch.save(report, f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _tensors() -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    k = torch.randn(1, 512, 2, 32, generator=noise)
    return [3 * k, k, torch.randn(1, 512, 2, 32, generator=noise)]


def test_ulysses_keeps_the_lists_of_each_ranks_heads(tmp_path: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    from liteattention_rocm import LiteAttention

    alone = LiteAttention(SKIPPING, geometry=TILE)
    for step in range(3):
        out = alone(*_tensors(), step=step, layer="x")
    assert torch.equal(torch.cat([rank["out"] for rank in ranks], dim=1), out)
    for step in range(3):
        whole = alone.statistics.to_records()[step]
        parts = [rank["records"][step] for rank in ranks]
        assert sum(part["tiles_total"] for part in parts) == whole["tiles_total"]
        assert sum(part["tiles_computed"] for part in parts) == whole["tiles_computed"]
    assert whole["tiles_computed"] < whole["tiles_total"]
    assert all("ulysses_degree instead of ring_degree" in rank["ring"] for rank in ranks)
