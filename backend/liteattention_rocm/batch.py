"""The requests of one step against a paged cache, and what its calls share."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from . import validation
from .arguments import Reasons, plain_length, readable
from .memory import extent_bytes, has_address
from .remembered import Calls

#: Kinds of calls that a batch remembers. A step of a model makes one to three.
_MOST_CALLS = 32

#: What a compiler that must not break its graph says of a batch without bounds (PyTorch 2.8).
_GIVE_BOUNDS = (
    "a PagedBatch without bounds reads the lengths: pass max_q_len and max_kv_len, or make the "
    "batch outside of the compiled function"
)
_BREAKS_HAVE_REASONS = torch.__version__ >= "2.8"


class PagedBatch:
    """The requests of one step against a paged cache; made once per step, used by every layer.

    Args:
        q_start: int32 [R + 1]; rows q_start[r] to q_start[r + 1] of q are request r's. Rows before
            the first and past the last are padding: neither read nor written.
        kv_len: int32 [R]; keys of each request, those of this step's rows included.
        page_table: int32 [R, width], any row stride; the pages of each request in order, so that
            key j is token j % page_size of page page_table[r, j // page_size]. Entries past the
            last key, and rows of requests without query rows, may hold anything; those before the
            first row's window may name any page.
        max_q_len, max_kv_len: bounds of the lengths; None reads them from the tensors, which waits
            for a GPU to finish what it is doing, and breaks a compiler's graph.

    The tensors may be refilled between calls, through PyTorch, NumPy or anything else, or replaced
    by others. On the CPU each call compares the lengths with those that it planned for and checks
    the page ids: new lengths are checked and planned, a page outside the cache is an error. On a
    GPU nothing is read on the host when both bounds are given. Lengths must then stay within the
    bounds and the width of the table, and page ids within the cache: kernels do not check them,
    and a wrong page id reads other memory of the process or faults.

    A batch holds the plans of the last 32 kinds of calls (shapes and options). They own no memory
    of the device: workspaces belong to threads and streams, see
    :meth:`~liteattention_rocm.contract.Engine.bind`. On a GPU plans rest on shapes and bounds, and
    batches of the same ones share them: round bounds up, and later steps find what earlier ones
    planned. Whoever captures calls in a graph keeps the batch, whose tensors the graph reads, for
    as long as the graph is replayed.

    Copies and pickles hold the tensors and bounds and plan again. A shallow copy shares tensors.

    Raises:
        TypeError, ValueError: lists every reason.
    """

    def __init__(
        self,
        q_start: torch.Tensor,
        kv_len: torch.Tensor,
        page_table: torch.Tensor,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> None:
        self.q_start = q_start
        self.kv_len = kv_len
        self.page_table = page_table
        self._bounds = (max_q_len, max_kv_len)
        #: Bound calls of this batch's values.
        self.calls = Calls(_MOST_CALLS)
        self.read()

    def __getstate__(self) -> dict[str, Any]:
        max_q_len, max_kv_len = self._bounds
        return {
            "q_start": self.q_start,
            "kv_len": self.kv_len,
            "page_table": self.page_table,
            "max_q_len": max_q_len,
            "max_kv_len": max_kv_len,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        PagedBatch.__init__(self, **state)

    def read(self) -> None:
        """Check the tensors, find the bounds, and forget what rested on earlier values."""
        max_q_len, max_kv_len = self._bounds
        tensors = q_start, kv_len, table = self.q_start, self.kv_len, self.page_table
        traced = torch.compiler.is_dynamo_compiling()
        if traced and (max_q_len is None or max_kv_len is None) and _BREAKS_HAVE_REASONS:
            # Reading values ends a graph: where that is an error, it shall say what to do.
            torch._dynamo.graph_break(msg=_GIVE_BOUNDS)
        plain = not traced and _plainly_right(*tensors, max_q_len, max_kv_len)
        if not plain:
            validation.paged_batch(*tensors, max_q_len, max_kv_len).raise_for("batch")
        real = plain or all([has_address(t) for t in tensors])
        at: tuple[int, ...] = ()
        if traced:
            at = (0, 0, 0)  # of no tensors: a call that nobody traces reads them
        elif real:
            at = (q_start.data_ptr(), kv_len.data_ptr(), table.data_ptr())
        #: Lengths that were checked, to be compared with those of each call. None on a GPU, which
        #: plans from bounds.
        values = None
        if real and not traced and q_start.device.type == "cpu":
            values = _native().CpuSeenBatch(
                at[0], at[1], kv_len.shape[0], table.shape[1], table.stride(0)
            )
        #: Addresses of the tensors whose values were checked, these values, and the table itself:
        #: a view of other strides may lie at its address.
        self.seen = at, values, table
        #: Bytes from the first to past the last element of each tensor.
        self.spans = tuple([extent_bytes(t) for t in tensors]) if real else ()
        #: What a plan from bounds knows of the tensors: alignments, shape and steps of the table.
        self.layout = (tuple([place & 15 for place in at]), table.shape, table.stride())
        if max_q_len is None:
            max_q_len = validation.longest(self.q_start)
        if max_kv_len is None:
            max_kv_len = int(self.kv_len.max()) if self.kv_len.numel() else 0
        self.max_q_len: int = plain_length(max_q_len)
        self.max_kv_len: int = plain_length(max_kv_len)
        self.calls.clear()

    def __repr__(self) -> str:
        """Name the sizes; the values may be on a GPU."""
        return (
            f"PagedBatch(requests={self.requests}, max_q_len={self.max_q_len}, "
            f"max_kv_len={self.max_kv_len}, device={self.q_start.device})"
        )

    def with_pages(self, page_table: torch.Tensor) -> PagedBatch:
        """Return a batch of the same requests in other pages, int32 [R, width]: another cache's.

        Plans are shared on a GPU, if the tables have one layout.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        # What was measured is no bound of later values; on a GPU measuring again would wait.
        bounds = self._bounds
        if not readable(self.q_start):
            bounds = (self.max_q_len, self.max_kv_len)
        return PagedBatch(
            self.q_start, self.kv_len, page_table, max_q_len=bounds[0], max_kv_len=bounds[1]
        )

    @property
    def requests(self) -> int:
        """Number of requests R, those without rows included."""
        return int(self.kv_len.shape[0])

    def check_cache(self, rows: int, pages: int, page_size: int) -> None:
        """Raise if query rows, table entries or pages are missing (CPU values only)."""
        table = self.page_table
        if not readable(table) or _native().pages_hold(
            self.q_start.data_ptr(),
            self.kv_len.data_ptr(),
            table.data_ptr(),
            self.requests,
            table.shape[1],
            table.stride(0),
            rows,
            pages,
            page_size,
        ):
            return
        found = Reasons()
        validation.rows_named(found, "q_start", self.q_start, "q", rows)
        found.values += self._page_reasons(pages, page_size)
        found.raise_for("attention call")

    def _page_reasons(self, pages: int, page_size: int) -> list[str]:
        """Each kind of wrong entry: the first one, and how many more there are."""
        named, starts = self.page_table.numpy(), self.q_start.numpy()
        lengths, width = self.kv_len.numpy(), named.shape[1]
        used = np.where(starts[1:] > starts[:-1], -(-lengths // page_size), 0)
        looked_at = np.arange(width) < used[:, None]
        reasons = []
        if (short := np.flatnonzero(used > width)).size:
            reasons.append(
                f"page_table is {width} pages of {page_size} tokens wide, too few for "
                f"kv_len[{short[0]}] = {lengths[short[0]]}" + _more(short)
            )
        if (negative := np.argwhere(looked_at & (named < 0))).size:
            row, column = negative[0]
            reasons.append(
                f"page_table[{row}, {column}] is {named[row, column]}, not a page" + _more(negative)
            )
        if (beyond := np.argwhere(looked_at & (named >= pages))).size:
            row, column = beyond[0]
            reasons.append(
                f"page_table names page {named[row, column]} of a cache of {pages} pages at "
                f"[{row}, {column}]" + _more(beyond)
            )
        return reasons


def _more(found: Any) -> str:
    """How many there are beside the first."""
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


@functools.cache
def _native() -> Any:
    """Return the compiled module, which only CPU tensors need: a GPU's engine may do without."""
    from . import _core

    return _core


def _plainly_right(
    q_start: Any, kv_len: Any, page_table: Any, max_q_len: Any, max_kv_len: Any
) -> bool:
    """Whether there is nothing to say of a batch, for batches of the usual kind.

    False is no verdict. A step of a small model is a millisecond or two, and looking for reasons
    one by one takes a hundredth of it.
    """
    try:
        return (
            type(q_start) is type(kv_len) is type(page_table) is torch.Tensor
            and q_start.dtype is kv_len.dtype is page_table.dtype is torch.int32
            and q_start.is_contiguous()
            and kv_len.is_contiguous()
            and q_start.dim() == kv_len.dim() == 1
            and page_table.dim() == 2
            and not any([t._is_zerotensor() or t.is_neg() for t in (q_start, kv_len, page_table)])
            and (page_table.stride(1) == 1 or page_table.shape[1] < 2)
            and q_start.shape[0] - 1 == kv_len.shape[0] == page_table.shape[0]
            and (max_q_len is None or (type(max_q_len) is int and max_q_len >= 0))
            and (max_kv_len is None or (type(max_kv_len) is int and max_kv_len >= 0))
            and page_table.device == kv_len.device == q_start.device
            and (
                # Values on a GPU are not looked at, and with both bounds need not be.
                (q_start.is_cuda and max_q_len is not None and max_kv_len is not None)
                or (
                    readable(q_start)
                    and _native().lengths_hold(
                        q_start.data_ptr(),
                        kv_len.data_ptr(),
                        kv_len.shape[0],
                        -1 if max_q_len is None else max_q_len,
                        -1 if max_kv_len is None else max_kv_len,
                    )
                )
            )
        )
    except (AttributeError, TypeError, RuntimeError):
        return False
