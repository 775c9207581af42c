"""The bug's history: each step as a small function beside the one that replaced it, with the symptoms it had.

Re-created in our own terms from THUDM/slime (Apache-2.0), slime/backends/megatron_utils/loss.py, at the commits that
``LINE`` names. Only the allgather path, one window per rank: there the bug was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from refimpl import slicing
from refimpl.collectives import all_reduce, redistribute
from refimpl.entropy import log_prob_and_entropy
from refimpl.layout import Layout
from refimpl.ranks import Rank
from refimpl.recorder import label

NAMES = "log-prob", "entropy"  # of the collectives
Keys = Sequence[Sequence[Tensor | None]]  # for log-prob and, if asked for, entropy: a piece of each sample


def extract_before_1788(
    logits: Tensor, tokens: Sequence[Tensor], layout: Layout, cp_rank: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Before #1788: slices of the logits for each sample. Right, but each sends a full ``[T, V]`` gradient back."""
    goals, pieces = slicing.targets(tokens, layout, cp_rank), []
    for spans in layout.response_spans(cp_rank):
        keys = zip(*[log_prob_and_entropy(logits[span.rows], goals[span.rows]) for span in spans], strict=True)
        pieces.append([torch.cat([part for part in parts if part is not None]) for parts in keys])
    return [log_prob for log_prob, _ in pieces], [entropy for _, entropy in pieces]


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


def redistribute_1788(keys: Keys, layout: Layout, cp_rank: int, group: dist.ProcessGroup) -> Keys:
    """#1788: reads the dtype of every entry, so that any ``None`` ends the rank that has it."""
    moved = []
    for pieces, name in zip(keys, NAMES, strict=False):
        fillers = [torch.zeros(0, dtype=p.dtype, requires_grad=True) for p in pieces]  # type: ignore[union-attr]
        filled = [p if p is not None and len(p) else filler for p, filler in zip(pieces, fillers, strict=True)]
        moved.append(sum_and_cut(filled, layout, cp_rank, group, name))
    return moved


def redistribute_1822(keys: Keys, layout: Layout, cp_rank: int, group: dist.ProcessGroup) -> Keys:
    """#1822 to #2153: a list of nothing but ``None`` is handed back as it is, *without the all-reduce*.

    That is where a rank leaves the collective: it decides by the data that it happens to hold. If it holds something,
    what it lacks is filled with zeros that ask for a gradient, whether the values do or not.
    """
    moved: list[Sequence[Tensor | None]] = []
    for pieces, name in zip(keys, NAMES, strict=False):
        present = [piece for piece in pieces if piece is not None]
        if not present:
            moved.append(pieces)
            continue
        filler = torch.zeros(0, dtype=present[0].dtype, device=present[0].device, requires_grad=True)
        filled = [piece if piece is not None and len(piece) else filler for piece in pieces]
        moved.append(sum_and_cut(filled, layout, cp_rank, group, name))
    return moved


def redistribute_2123(keys: Keys, layout: Layout, cp_rank: int, group: dist.ProcessGroup) -> Keys:
    """#2123: the zeros ask for a gradient exactly if the values do. Still one all-reduce for each key."""
    moved = []
    for pieces, name in zip(keys, NAMES, strict=False):
        own = [piece for piece in pieces if piece is not None]
        filler = torch.zeros_like(own[0][:0]).requires_grad_(own[0].requires_grad)
        moved.append(sum_and_cut([p if len(p) else filler for p in own], layout, cp_rank, group, name))
    return moved


def sum_and_cut(
    pieces: Sequence[Tensor], layout: Layout, cp_rank: int, group: dist.ProcessGroup, name: str
) -> list[Tensor]:
    """Pad the pieces to whole responses, sum these over the ranks in one all-reduce, cut out the zigzag pieces."""
    lengths = list(layout.batch.response_lengths)
    held = zip(pieces, layout.response_slices(cp_rank), lengths, strict=True)
    whole = [pad(piece, (part.start, length - part.stop)) for piece, (part,), length in held]
    with label(name):
        summed = all_reduce(torch.cat(whole), group, loss="own slice")
    owned = zip(torch.split(summed, lengths), layout.as_zigzag().response_slices(cp_rank), strict=True)
    return [torch.cat([values[part] for part in parts]) for values, parts in owned]


def redistribute_now(
    keys: Sequence[Sequence[Tensor]], layout: Layout, cp_rank: int, group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """This project's: one all-to-all for all keys, and no branch for a piece of no rows."""
    with label("log-prob, entropy"):
        return redistribute(keys, layout, layout.as_zigzag(), cp_rank, group)


def buffers(
    layout: Layout, cp_rank: int, device: torch.device | str = "cpu", entropy_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """A log-prob and an entropy per row, ``[T_local]`` fp64 each; the entropy is the row's position."""
    positions = [torch.arange(total) for total in layout.batch.total_lengths]
    entropy = slicing.local_tokens(positions, layout, cp_rank).to(device, torch.float64)
    return (-entropy).requires_grad_(), entropy.requires_grad_(entropy_grad)


@dataclass(frozen=True)
class Step:
    """One version: how pieces are cut, how exchanged, and whether an entropy of coefficient 0 asks for no gradient."""

    extract: Callable[..., Any]
    redistribute: Callable[..., Any]
    if_weighted: bool = False
    commit: str = ""


extract_2152 = partial(extract_after_1846, with_entropy_grad=True)  # type: ignore[call-arg]  # the next commit saw it
LINE = {
    "#1788": Step(extract_before_1846, redistribute_1788, if_weighted=True, commit="2a89c169c"),
    "#1822": Step(extract_before_1846, redistribute_1822, commit="2928bba9d"),
    "#1846": Step(extract_after_1846, redistribute_1822, commit="5b688aaba"),
    "#2152": Step(extract_2152, redistribute_1822, if_weighted=True, commit="ca7a7eaf4"),
    "#2153": Step(extract_after_1846, redistribute_1822, if_weighted=True, commit="fa3c990af"),
    "#2123": Step(slicing.extract, redistribute_2123, if_weighted=True, commit="6ad61127e"),
    "now": Step(slicing.extract, redistribute_now, if_weighted=True),
}


class Trained(NamedTuple):
    """What one rank has after ``train``: the pieces that it owns, and what backward left of its buffers."""

    log_probs: list[Tensor]
    entropies: list[Tensor]
    of_log_prob: Tensor | None
    of_entropy: Tensor | None


def train(
    me: Rank,
    step: Step,
    layout: Layout,
    coefficient: float = 1.0,
    keep_graph: bool = False,
    weigh: Callable[[Tensor], Tensor] = torch.ones_like,
) -> Trained:
    """One micro-batch on one rank: buffers, pieces, redistribution, the loss and ``backward``.

    The loss is the sum of the log-probs plus ``coefficient`` times the sum of the entropies that this rank owns under
    zigzag, each value times ``weigh`` of it. So without weights a row's gradients are 1 and ``coefficient`` if it
    scores a response token, else 0; ``None`` is what backward never reached. ``keep_graph`` adds 0 times the sum of the
    buffer, as slime does.
    """
    log_prob, entropy = buffers(layout, me.cp_rank, me.device, coefficient != 0 or not step.if_weighted)
    keys = step.extract(log_prob, entropy, layout, me.cp_rank)
    log_probs, entropies = step.redistribute(keys, layout, me.cp_rank, me.cp_group)
    of_log_probs, of_entropies = ((weigh(key.detach()) * key).sum() for key in map(torch.cat, (log_probs, entropies)))
    loss = of_log_probs + coefficient * of_entropies + (0 * log_prob.sum() if keep_graph else 0)
    loss.backward()  # type: ignore[no-untyped-call]
    owned = [piece.detach() for piece in log_probs], [piece.detach() for piece in entropies]
    return Trained(*owned, log_prob.grad, entropy.grad)
