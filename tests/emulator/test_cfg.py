"""Control flow of assembled snippets: blocks, dominators, loops."""

from liteattention_emulator import cfg, listing

from .toolchain import assemble, function


def graph_of(body: str) -> cfg.Graph:
    listed = listing.load(assemble(function("k", body)))
    return cfg.Graph(listed.instructions, 0)


NESTED = """
  s_mov_b32 s0, 0
outer:
  s_mov_b32 s1, 0
inner:
  v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
  s_add_u32 s1, s1, 1
  s_cmp_lt_u32 s1, 4
  s_cbranch_scc1 inner
  s_cmp_eq_u32 s1, 9
  s_cbranch_scc1 skip
  v_add_f32 v0, v0, v0
skip:
  s_add_u32 s0, s0, 1
  s_cmp_lt_u32 s0, 4
  s_cbranch_scc1 outer
  s_endpgm
dead:
  s_branch dead
"""


def names(graph: cfg.Graph, loop: cfg.Loop) -> list[str]:
    return [inst.name for inst in graph.body(loop)]


def test_nested_loops() -> None:
    graph = graph_of(NESTED)
    outer, inner = graph.loops
    assert (outer.depth, inner.depth) == (1, 2)
    assert (outer.parent, inner.parent) == (None, 0)
    assert inner.blocks < outer.blocks
    assert names(graph, inner)[0].startswith("v_mfma") and len(names(graph, inner)) == 4
    assert len(names(graph, outer)) == 11
    assert graph.mix(outer) == {"salu": 6, "mfma": 1, "branch": 3, "valu": 1}
    assert graph.hot_loop() == inner


def test_code_behind_the_end_is_not_reached() -> None:
    graph = graph_of(NESTED)
    assert max(graph.next) == 12
    assert graph.instructions[12].name == "s_endpgm"
    assert graph.instructions[13].name == "s_branch"


def test_dominators() -> None:
    graph = graph_of(NESTED)
    entry, skipped = graph.block_of[0], graph.block_of[8]
    behind = graph.block_of[9]
    assert graph.dominates(entry, behind)
    assert graph.dominates(behind, behind)
    assert not graph.dominates(skipped, behind)  # the branch passes it by


def test_two_back_edges_to_one_head_are_one_loop() -> None:
    graph = graph_of(
        "head:\n s_add_u32 s0, s0, 1\n s_cbranch_scc1 head\n s_cbranch_vccz head\n s_endpgm"
    )
    assert len(graph.loops) == 1
    assert len(graph.body(graph.loops[0])) == 3


def test_hot_loop_without_matrix_instructions() -> None:
    graph = graph_of(
        "a:\n s_nop 0\n s_cbranch_scc1 a\nb:\n v_add_f32 v0, v0, v0\n s_nop 0\n s_cbranch_scc1 b\n"
        "s_endpgm"
    )
    hot = graph.hot_loop()
    assert hot is not None and len(graph.body(hot)) == 3
    assert graph_of("s_endpgm").hot_loop() is None


def test_long_jump_is_followed() -> None:
    graph = graph_of(
        "s_getpc_b64 s[4:5]\nfrom:\n s_add_u32 s4, s4, far-from\n s_addc_u32 s5, s5, 0\n"
        "s_setpc_b64 s[4:5]\n s_nop 7\nfar:\n s_endpgm"
    )
    reached = [graph.instructions[i].name for i in sorted(graph.next)]
    assert reached == ["s_getpc_b64", "s_add_u32", "s_addc_u32", "s_setpc_b64", "s_endpgm"]
