"""The Triton kernels of ``entropy.py`` and their launchers. ``kernels.c`` is the same loops for the CPU.

``target`` is int64: a column of this shard, -1 (the target lies in another shard) or -2 (the row is skipped).
fp64 logits are accumulated in fp64, all others in fp32. Row offsets are 64-bit, for T * V passes 2^31 soon.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def forward_kernel(x, target, out, rows, columns, row_stride, scale, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """One row: the triple (m, s, w) and the target's logit, in one read."""
    row = tl.program_id(0).to(tl.int64)
    goal = tl.load(target + row)
    if goal != -2:
        mine = x + row * row_stride
        m = tl.full((), float("-inf"), ACC)
        s = tl.zeros((), ACC)
        w = tl.zeros((), ACC)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = tl.load(mine + column, mask=column < columns, other=float("-inf")).to(ACC)
            top = tl.maximum(m, tl.max(z, 0))
            move = tl.where(s == 0, 0.0, (m - top) * scale)  # what we have, moved to the new maximum
            w = tl.exp(move) * (w + move * s)
            s = tl.exp(move) * s
            counts = z != float("-inf")
            d = tl.where(counts, (z - top) * scale, 0.0)
            e = tl.where(counts, tl.exp(d), 0.0)
            s += tl.sum(e, 0)
            w += tl.sum(tl.where(e == 0, 0.0, e * d), 0)
            m = top
        logit = tl.load(mine + goal, mask=goal >= 0, other=0.0).to(ACC)
        tl.store(out + row, m)
        tl.store(out + rows + row, s)
        tl.store(out + 2 * rows + row, w)
        tl.store(out + 3 * rows + row, logit)


@triton.jit
def backward_kernel(
    x, target, gradient, constants, rows, columns, row_stride, out_stride, scale, BLOCK: tl.constexpr, ACC: tl.constexpr
):
    """One tile of one row: one read and one write. ``gradient`` may be ``x``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    goal = tl.load(target + row)
    theirs = gradient + row * out_stride + column
    if goal == -2:
        tl.store(theirs, tl.zeros((BLOCK,), ACC), mask=inside)
    else:
        m = tl.load(constants + row)
        log_s = tl.load(constants + rows + row)
        entropy = tl.load(constants + 2 * rows + row)
        of_log_prob = tl.load(constants + 3 * rows + row) * scale
        of_entropy = tl.load(constants + 4 * rows + row) * scale
        z = tl.load(x + row * row_stride + column, mask=inside, other=float("-inf")).to(ACC)
        log_p = (z - m) * scale - log_s
        p = tl.exp(log_p)
        log_p = tl.where(p == 0, 0.0, log_p)  # p log p is 0 at p = 0, also where log p is -inf
        value = -p * (of_log_prob + of_entropy * (log_p + entropy))
        tl.store(theirs, tl.where(column == goal, of_log_prob + value, value), mask=inside)


def _meta(numbers: Tensor, columns: int) -> dict[str, Any]:
    """The type that the kernels count in; a tile of a row: 16 bytes a thread and load, not much more than it has."""
    tile = min(4096, max(128, 1 << (columns - 1).bit_length()))
    return {"ACC": tl.float64 if numbers.dtype == torch.float64 else tl.float32, "BLOCK": tile}


def forward(x: Tensor, target: Tensor, out: Tensor, scale: float) -> None:
    """Write m, s, w and the target's logit of each row that has a target into ``out``, ``[4, T]``."""
    rows, columns = x.shape
    if rows:
        meta = _meta(out, columns)
        forward_kernel[(rows,)](x, target, out, rows, columns, x.stride(0), scale, num_warps=8, **meta)


def backward(x: Tensor, target: Tensor, gradient: Tensor, constants: Tensor, scale: float) -> None:
    """Write the gradient, in the dtype of ``x``; ``constants`` ``[5, T]``: m, log s, entropy, incoming gradients."""
    rows, columns = x.shape
    if rows and columns:
        meta = _meta(constants, columns)
        grid, strides = (rows, triton.cdiv(columns, meta["BLOCK"])), (x.stride(0), gradient.stride(0))
        backward_kernel[grid](x, target, gradient, constants, rows, columns, *strides, scale, **meta)
