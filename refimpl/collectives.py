"""Autograd collectives over the CP group, with the gradient convention named."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor
from torch.nn.functional import pad

from refimpl.layout import Layout


def redistribute(pieces: Sequence[Tensor], layout: Layout, cp_rank: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Pieces of a contiguous layout in, pieces of the zigzag layout of the same batch out, by one all-reduce.

    Every rank takes part with the same shape, whatever it holds: a piece of no rows is padded like any other, and keeps
    its path to the buffer it came from. Convention *own-slice loss*: backward sums the gradient over the ranks, right
    for a loss in which each rank counts its own pieces only.

    ``pieces`` are ``[R_local]`` for each sample, from ``slicing.response_pieces`` with the same ``layout``; what comes
    back is ``[R_zigzag]`` for each. ``group`` is the CP group. A ``ValueError`` if a piece does not fit the layout.
    """
    whole = []
    for i, (piece, (span, *more)) in enumerate(zip(pieces, layout.response_spans(cp_rank), strict=True)):
        if piece.shape != (span.length,) or more:
            raise ValueError(
                f"sample {i}: a piece of shape {list(piece.shape)} does not fit rank {cp_rank} of {layout}"
            )
        before = span.position - layout.batch.first_predicting(i)
        whole.append(pad(piece, (before, layout.batch.response_lengths[i] - before - span.length)))
    return sum_and_cut(whole, layout, cp_rank, group)


def sum_and_cut(whole: Sequence[Tensor], layout: Layout, cp_rank: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Sum whole responses, ``[R]`` each, over the ranks in one all-reduce, and cut out this rank's zigzag pieces."""
    if not whole:
        return []
    summed = torch.distributed.nn.all_reduce(torch.cat(list(whole)), group=group)  # type: ignore[no-untyped-call]
    zigzag = replace(layout, cp_split="zigzag", pad_multiple=1).response_spans(cp_rank)
    whole = summed.split(layout.batch.response_lengths)
    firsts = map(layout.batch.first_predicting, range(len(whole)))
    return [
        torch.cat([values.narrow(0, span.position - first, span.length) for span in spans])
        for values, spans, first in zip(whole, zigzag, firsts, strict=True)
    ]
