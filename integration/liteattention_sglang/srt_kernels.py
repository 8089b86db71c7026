"""What a step's layers read of SGLang's tables, gathered by one Triton kernel on a GPU."""

import triton
import triton.language as tl

#: Pages that a program copies at a time.
BLOCK = 1024
#: Programs of a request, at most: a request of 131,072 pages takes each of them four rounds.
MOST_PARTS = 32


@triton.jit(do_not_specialize=["token_stride", "table_stride", "tokens", "near"])
def fill_step(
    req_to_token, token_stride, requests, seq_lens, kv_len, table, table_stride,
    window_of, window_table, slots, window_slots, tokens, near,
    PAGE: tl.constexpr, WINDOWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, part) of [R, parts]: every ``parts``-th BLOCK of the request's pages.

    Reads lengths and rows of ``req_to_token`` on the device, and no further than a request is long,
    so that a graph which holds the launch serves every step. Arguments as :func:`.srt_step.fill`.
    """
    request = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    length = tl.load(seq_lens + request).to(tl.int32)
    pages = tl.cdiv(length, PAGE)
    first_near = tl.maximum(length - near, 0) // PAGE
    tokens_of = req_to_token + tl.load(requests + request).to(tl.int64) * token_stride
    row = request.to(tl.int64) * table_stride
    for first in range(part * BLOCK, pages, parts * BLOCK):
        page = first + tl.arange(0, BLOCK)
        inside = page < pages
        slot = tl.load(tokens_of + page * PAGE, mask=inside, other=0)
        tl.store(table + row + page, slot // PAGE, mask=inside)
        if WINDOWS:
            seen = inside & (page >= first_near)
            moved = tl.load(window_of + slot, mask=seen, other=0) // PAGE
            tl.store(window_table + row + page, moved.to(tl.int32), mask=seen)
    if part == 0:
        tl.store(kv_len + request, length)
    if WINDOWS:
        program = request * parts + part
        for first in range(program * BLOCK, tokens, tl.num_programs(0) * parts * BLOCK):
            token = first + tl.arange(0, BLOCK)
            inside = token < tokens
            slot = tl.load(slots + token, mask=inside, other=0)
            moved = tl.load(window_of + slot, mask=inside, other=0)
            tl.store(window_slots + token, moved, mask=inside)
