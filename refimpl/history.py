"""The bug's history: each step as a small function beside the one that replaced it, with the symptoms it had.

Re-created in our own terms from THUDM/slime (Apache-2.0), slime/backends/megatron_utils/loss.py, before pull request
#1846 (commit 2928bba9d) and after it (5b688aaba). Only the allgather path, one window per rank: there the bug was.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from refimpl.collectives import sum_and_cut
from refimpl.layout import Layout
from refimpl.ranks import Rank
from refimpl.slicing import local_tokens


def extract_before_1846(
    log_prob: Tensor, entropy: Tensor | None, layout: Layout, cp_rank: int, tokens: Sequence[Tensor] = ()
) -> tuple[list[Tensor], list[Tensor | None]]:
    """#1788 to #1846: the entropy of a response of which this rank holds nothing is ``None``. ``tokens`` is unread."""
    log_probs: list[Tensor] = []
    entropies: list[Tensor | None] = []

    def add(piece: Tensor) -> None:
        log_probs.append(piece)
        entropies.append(None)

    def add_with_entropy(rows: slice) -> None:
        log_probs.append(log_prob[rows])
        entropies.append(None if entropy is None else entropy[rows])

    for (span,) in layout.response_spans(cp_rank):
        if span.length == 0:
            add(log_prob[:0])
        else:
            add_with_entropy(span.rows)
    return log_probs, entropies


def extract_after_1846(
    log_prob: Tensor, entropy: Tensor | None, layout: Layout, cp_rank: int
) -> tuple[list[Tensor], list[Tensor | None]]:
    """#1846: a fresh tensor of no rows, outside the graph; without entropy an empty list. The type stayed as it was."""
    log_probs: list[Tensor] = []
    entropies: list[Tensor | None] = []
    for (span,) in layout.response_spans(cp_rank):
        if span.length == 0:
            log_probs.append(torch.zeros((0,), dtype=log_prob.dtype, device=log_prob.device))
            if entropy is not None:
                entropies.append(torch.zeros((0,), dtype=entropy.dtype, device=entropy.device))
        else:
            log_probs.append(log_prob[span.rows])
            if entropy is not None:
                entropies.append(entropy[span.rows])
    return log_probs, entropies


def redistribute_1822(
    pieces: Sequence[Tensor | None], layout: Layout, cp_rank: int, group: dist.ProcessGroup
) -> Sequence[Tensor | None]:
    """#1822 to #2153: a list of nothing but ``None`` is handed back as it is, *without the all-reduce*.

    That is where a rank leaves the collective: it decides by the data that it happens to hold.
    """
    present = [piece for piece in pieces if piece is not None]
    if not present:
        return pieces
    whole = []
    for i, (piece, (span,)) in enumerate(zip(pieces, layout.response_spans(cp_rank), strict=True)):
        response, before = layout.batch.response_lengths[i], span.position - layout.batch.first_predicting(i)
        if piece is None or span.length == 0:
            whole.append(torch.zeros(response, dtype=present[0].dtype, device=present[0].device, requires_grad=True))
        else:
            whole.append(pad(piece, (before, response - before - span.length)))
    return sum_and_cut(whole, layout, cp_rank, group)


def buffers(layout: Layout, cp_rank: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """A log-prob and an entropy per row, ``[T_local]`` fp64 each, with gradient; the entropy is the row's position."""
    positions = [torch.arange(total) for total in layout.batch.total_lengths]
    entropy = local_tokens(positions, layout, cp_rank).to(device, torch.float64)
    return (-entropy).requires_grad_(), entropy.requires_grad_()


def step(
    me: Rank, extract: Callable[..., Any], redistribute: Callable[..., Any], layout: Layout
) -> tuple[Tensor, Tensor | None]:
    """One loss on one rank, the plain sum, from ``buffers`` to ``backward``.

    Returns the entropy values that this rank owns after the redistribution, and the gradient of its entropy buffer: one
    where a row counts in the loss, zero where not, ``None`` if backward never reached the buffer.
    """
    log_prob, entropy = buffers(layout, me.cp_rank, me.device)
    lists = extract(log_prob, entropy, layout, me.cp_rank)
    moved = [redistribute(pieces, layout, me.cp_rank, me.cp_group) for pieces in lists]
    log_probs, entropies = torch.cat(moved[0]), torch.cat(moved[1])
    (log_probs.sum() + entropies.sum()).backward()  # type: ignore[no-untyped-call]
    return entropies.detach(), entropy.grad
