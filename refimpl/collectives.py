"""Autograd collectives with the gradient convention named, and the exchange of pieces between two layouts.

What is the gradient of a collective? It depends on the loss that follows (contract C8). *Own-slice loss*: each rank's
loss counts its own part and the real loss is their sum, so backward sums over the ranks. *Replicated loss*: every rank
computes the same, whole loss, so backward keeps this rank's gradient alone. One for the other is a factor of the
group's size, in silence. No second derivatives. An exchange has no such choice: what came from a rank goes back to it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from refimpl.layout import Layout
from refimpl.recorder import current_label, label

Loss = Literal["own slice", "replicated"]


def all_reduce(x: Tensor, group: dist.ProcessGroup, *, loss: Loss) -> Tensor:
    """The sum of the ranks' ``x``, of the same shape on each.

    Backward: ``loss="own slice"`` sums the ranks' gradients in a second all-reduce; ``"replicated"`` issues nothing.

    Raises:
        ValueError: another ``loss``.
    """

    def summed(values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)  # a gradient may be expanded, or someone else's
        dist.all_reduce(total, group=group)
        return total

    return _Collective.apply(x, summed, summed if _sums(loss) else torch.clone)  # type: ignore[no-untyped-call, no-any-return]


def all_gather(x: Tensor, group: dist.ProcessGroup, *, loss: Loss) -> Tensor:
    """The ranks' ``x``, ``[n, ...]`` of the same shape on each, one after another: ``[n * group size, ...]``.

    Backward: ``loss="own slice"`` sums what all ranks' losses say of this rank's ``x``, in an all-to-all;
    ``"replicated"`` takes this rank's own slice of the gradient and issues nothing.

    Raises:
        ValueError: another ``loss``, or a scalar ``x``.
    """
    if x.dim() == 0:
        raise ValueError("a scalar has no rows to gather; pass x[None]")
    sums, rows, size = _sums(loss), len(x), dist.get_world_size(group)

    def gathered(values: Tensor) -> Tensor:
        every = values.new_empty(size, *values.shape)
        dist.all_gather(list(every.unbind(0)), values.contiguous(), group=group)
        return every.flatten(0, 1)

    def own(gradient: Tensor) -> Tensor:
        parts = gradient.reshape(size, rows, *gradient.shape[1:])
        return _exchange([1] * size, [1] * size, group, parts).sum(0) if sums else parts[dist.get_rank(group)]

    return _Collective.apply(x, gathered, own)  # type: ignore[no-untyped-call, no-any-return]


def redistribute(
    keys: Sequence[Sequence[Tensor]], layout: Layout, target: Layout, cp_rank: int, group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Pieces of ``layout`` in, pieces of ``target`` out, for all keys together: one all-to-all, one more in backward.

    Every value is sent once, to the rank that owns its position in ``target``. Who sends how much to whom is known from
    the layouts alone, and every rank takes part, whatever it holds.

    Args:
        keys: for each key (log-probs, entropies) the pieces of each sample, ``[R_local]``, as ``slicing.extract``
            gives them for ``layout``, all of one dtype.
        layout: where the values are. target: where they shall be; another layout of the same batch and cp_size.
        cp_rank: this rank's number in ``group``, the CP group.

    Returns:
        for each key the pieces under ``target``; with gradient if the key's pieces came with it.

    Raises:
        ValueError: a piece does not fit the layout, dtypes differ, the two layouts differ in batch or cp_size, or this
            rank of ``group`` is not ``cp_rank``.
    """
    lists = [list(pieces) for pieces in keys]
    _fit(lists, layout, target, cp_rank)
    if not lists or not len(layout.batch):
        return [[] for _ in lists]
    if (dist.get_world_size(group), dist.get_rank(group)) != (layout.cp_size, cp_rank):
        here = f"rank {dist.get_rank(group)} of a group of {dist.get_world_size(group)}"
        raise ValueError(f"cp_rank {cp_rank} of {layout.cp_size} in the layout, but {here}")
    held = [_indices(layout, rank) for rank in range(layout.cp_size)]
    owner = torch.empty(sum(layout.batch.response_lengths), dtype=torch.int64)
    for rank in range(target.cp_size):
        owner[_indices(target, rank)] = rank
    goes = owner[held[cp_rank]]
    comes = [indices[owner[indices] == cp_rank] for indices in held]
    send, receive = torch.bincount(goes, minlength=layout.cp_size).tolist(), [len(indices) for indices in comes]
    device = lists[0][0].device
    flat = torch.stack([torch.cat(pieces) for pieces in lists], 1)[goes.argsort(stable=True).to(device)]
    there, back = partial(_exchange, send, receive, group), partial(_exchange, receive, send, group)
    moved = _Collective.apply(flat, there, back)  # type: ignore[no-untyped-call]
    lengths = [sum(span.length for span in spans) for spans in target.response_spans(cp_rank)]
    columns = moved[torch.cat(comes).argsort().to(device)].unbind(1)
    wanted = [any(piece.requires_grad for piece in pieces) for pieces in lists]
    return [list((c if g else c.detach()).split(lengths)) for c, g in zip(columns, wanted, strict=True)]


def _indices(layout: Layout, rank: int) -> Tensor:
    """The numbers, in the list of all response tokens of the batch, of those that a rank holds; they rise."""
    lengths = layout.batch.response_lengths
    numbers = torch.split(torch.arange(sum(lengths)), list(lengths))
    held = zip(numbers, layout.response_slices(rank), strict=True)
    return torch.cat([n[part] for n, parts in held for part in parts])


def _fit(keys: Sequence[Sequence[Tensor]], layout: Layout, target: Layout, cp_rank: int) -> None:
    if (target.batch, target.cp_size) != (layout.batch, layout.cp_size):
        raise ValueError(f"{target} is not a layout of the same batch and cp_size as {layout}")
    for number, pieces in enumerate(keys):
        if len(pieces) != len(layout.batch):
            raise ValueError(f"key {number}: {len(pieces)} pieces for {len(layout.batch)} samples")
        for i, (piece, spans) in enumerate(zip(pieces, layout.response_spans(cp_rank), strict=True)):
            rows = sum(span.length for span in spans)
            if not isinstance(piece, Tensor) or piece.shape != (rows,) or piece.dtype != keys[0][0].dtype:
                what = f"{list(piece.shape)} {piece.dtype}" if isinstance(piece, Tensor) else repr(piece)
                wanted = f"rank {cp_rank} of {layout} holds [{rows}] {keys[0][0].dtype}"
                raise ValueError(f"sample {i}: a piece is {what}; {wanted}")


def _sums(loss: str) -> bool:
    if loss not in ("own slice", "replicated"):
        raise ValueError(f"loss {loss!r} is neither 'own slice' nor 'replicated'")
    return loss == "own slice"


def _exchange(send: list[int], receive: list[int], group: dist.ProcessGroup, x: Tensor) -> Tensor:
    received = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), receive, send, group=group)
    return received


class _Collective(torch.autograd.Function):
    """``there`` in forward, ``back`` in backward, both under the label of now."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back, ctx.label = back, current_label()
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None, None]:
        with label(ctx.label):
            return ctx.back(incoming[0]), None, None
