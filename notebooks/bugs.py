"""Code with real mistakes, re-created in our own terms, and what is right in its place.

Each function has a signature of the grader, so that the museum (``museum.py``) can show it on the smallest input and
grade it on all others. What is wrong with it is said there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from refimpl import slicing
from refimpl.collectives import all_reduce
from refimpl.entropy import log_prob_and_entropy
from refimpl.layout import Batch, Layout
from refimpl.loss import token_weights

Pieces = tuple[list[Tensor], list[Tensor] | None]
Pair = tuple[Tensor, Tensor | None]

# ---------------------------------------------------------------- rows, targets, pieces


def rolled_after_the_split(tokens: Sequence[Tensor], layout: Layout, cp_rank: int) -> Tensor:
    """The rank's tokens, each moved up by a row."""
    none = slicing.targets(tokens, layout, cp_rank) == slicing.NO_TARGET  # the last of each sample
    return slicing.local_tokens(tokens, layout, cp_rank).roll(-1).masked_fill(none, slicing.NO_TARGET)


def shifted_after_packing(tokens: Sequence[Tensor], layout: Layout, cp_rank: int) -> Tensor:
    """The packed tokens, each moved up by one, then split."""
    stream = torch.cat(list(tokens)).roll(-1)
    stream[-1] = slicing.NO_TARGET
    shifted = torch.split(stream, [len(sample) for sample in tokens])
    return slicing.local_tokens(shifted, layout, cp_rank, pad_id=slicing.NO_TARGET)


def rows_of_tokens(log_prob: Tensor, entropy: Tensor | None, layout: Layout, cp_rank: int) -> Pieces:
    """The rows of the response's tokens."""

    def cut(buffer: Tensor) -> list[Tensor]:
        spans = layout.response_spans(cp_rank)
        return [torch.cat([buffer[s.row + 1 : s.row + 1 + s.length] for s in own]) for own in spans]

    return cut(log_prob), None if entropy is None else cut(entropy)


def packed_slices(total_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[list[int]]:
    """The rows of each sample of a packed stream, from one before its response on."""
    stream, found, end = list(range(sum(total_lengths))), [], 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        end += total
        found.append(stream[end - response - 1 : end - 1])
    return found


def last_n(total_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[list[int]]:
    """The last n rows of each sample that have a next token."""
    batch, start, found = Batch(total_lengths, response_lengths), 0, []
    for total, response in zip(batch.total_lengths, batch.response_lengths, strict=True):
        found.append(list(range(start, start + total - 1))[-response:])
        start += total
    return found


def right_rows(total_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[list[int]]:
    """The rows of the spans."""
    spans = Layout(Batch(total_lengths, response_lengths)).response_spans(0)
    return [list(range(span.row, span.row + span.length)) for (span,) in spans]


def kept_by_zero(log_prob: Tensor, entropy: Tensor | None, layout: Layout, cp_rank: int) -> Pieces:
    """The pieces, each made to depend on the whole buffer."""

    def kept(buffer: Tensor) -> list[Tensor]:
        return [piece + 0 * buffer.sum() for piece in slicing.response_pieces(buffer, layout, cp_rank)]

    return kept(log_prob), None if entropy is None else kept(entropy)


def all_at_once(logits: Tensor, tokens: Sequence[Tensor], layout: Layout, cp_rank: int) -> Pieces:
    """Log-prob and entropy of all rows, then sliced."""
    return slicing.extract(*log_prob_and_entropy(logits, slicing.targets(tokens, layout, cp_rank)), layout, cp_rank)


# ---------------------------------------------------------------- rows of logits


def masked_where_p_is_0(logits: Tensor, targets: Tensor) -> Pair:
    """-sum p log p, in which p = 0 counts as 0."""
    p = torch.softmax(logits.float(), 1)
    log_prob, _ = log_prob_and_entropy(logits, targets)
    return log_prob, -torch.where(p == 0, 0, p * p.log()).sum(1)


def in_tiles(logits: Tensor, targets: Tensor, tile: int = 4) -> Pair:
    """The log-sum-exp of whole tiles of columns, put together."""
    x = logits.float()
    tiles = torch.split(pad(x, (0, -x.shape[1] % tile)), tile, 1)
    lse = torch.stack([part.logsumexp(1) for part in tiles]).logsumexp(0)
    return x.gather(1, targets[:, None])[:, 0] - lse, log_prob_and_entropy(logits, targets)[1]


def by_row_0(logits: Tensor, targets: Tensor) -> Pair:
    """The incoming gradient of a row stands for all."""
    pair = [value.clone() for value in log_prob_and_entropy(logits, targets) if value is not None]
    for value in pair:
        value.register_hook(lambda g: g[:1].expand_as(g))  # type: ignore[no-untyped-call]
    return pair[0], pair[1]


def offsets_of_32_bits(logits: Tensor, targets: Tensor) -> Pair:
    """Each row found by its offset in memory."""
    (rows, columns), (stride, step) = logits.shape, logits.stride()
    offsets = (torch.arange(rows, dtype=torch.int32) * stride).tolist()
    found = [logits.as_strided((columns,), (step,), offset) for offset in offsets]
    return log_prob_and_entropy(torch.stack(found) if found else logits, targets)


def over_the_padding(x: Tensor, targets: Tensor, vocab_start: int, vocab_size: int, group: Any) -> Pair:
    """Over all the columns that the ranks hold."""
    return log_prob_and_entropy(x, targets, tp_group=group, vocab_start=vocab_start)


def unpadded(x: Tensor, targets: Tensor, vocab_start: int, vocab_size: int, group: Any) -> Pair:
    """Over the columns of the vocabulary."""
    return log_prob_and_entropy(x, targets, tp_group=group, vocab_start=vocab_start, vocab_size=vocab_size)


# ---------------------------------------------------------------- means


def mean_over_ranks(
    values: Tensor, mask: Tensor, group: dist.ProcessGroup, loss: Literal["own slice", "replicated"] = "replicated"
) -> Tensor:
    """Sum and number over all ranks; ``loss`` is the gradient convention of that sum."""
    total, count = all_reduce(torch.stack([(values * mask).sum(), mask.sum()]), group, loss=loss)
    mean: Tensor = total / count.clamp_min(1)
    return mean


def returns_early(values: Tensor, mask: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A rank without an unmasked token sees no reason to take part."""
    if mask.sum() == 0:
        return (values * mask).sum()
    return mean_over_ranks(values, mask, group)


def weights_per_token(masks: Sequence[Tensor], layout: Layout, cp_rank: int) -> list[Tensor]:
    """Each token weighs the same: right."""
    return token_weights(masks, layout, cp_rank, per="token", dtype=torch.float64)


def weights_per_sample(masks: Sequence[Tensor], layout: Layout, cp_rank: int) -> list[Tensor]:
    """Each sample weighs the same: right."""
    return token_weights(masks, layout, cp_rank, per="sample", dtype=torch.float64)


def held(masks: Sequence[Tensor], layout: Layout, cp_rank: int) -> list[Tensor]:
    """What a rank holds of each mask."""
    return [(weight > 0).double() for weight in weights_per_token(masks, layout, cp_rank)]


def over_own_labels(masks: Sequence[Tensor], layout: Layout, cp_rank: int) -> list[Tensor]:
    """Divided by the number of tokens that count on this rank, whatever that is."""
    pieces = held(masks, layout, cp_rank)
    return [piece / torch.cat(pieces).sum() for piece in pieces]


def over_own_shard(
    masks: Sequence[Tensor], layout: Layout, cp_rank: int, per: Literal["sample", "token"]
) -> list[Tensor]:
    """Megatron-LM #673: divided by the tokens that count on this rank, of the sample or of all."""
    pieces = held(masks, layout, cp_rank)
    if per == "token":
        return [piece / torch.cat(pieces).sum().clamp_min(1) for piece in pieces]
    return [piece / piece.sum().clamp_min(1) / len(pieces) for piece in pieces]


# ---------------------------------------------------------------- what each rank calls backward on


def own_share(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Backward starts from this rank's share: right, the ranks' gradients then add up."""
    return share


def summed_for_a_replicated_loss(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The shares are summed, and the convention fits the replicated loss that follows: right too."""
    return all_reduce(share, group, loss="replicated")


def summed_for_an_own_slice_loss(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The kind of slime #1748: the sum's backward sums again, though each rank holds the whole loss: cp_size times."""
    return all_reduce(share, group, loss="own slice")


def averaged(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Shares treated as if each rank had the mean of a replica of its own: 1 / cp_size."""
    return share / dist.get_world_size(group)


def multiplied_then_averaged(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Right where a framework averages over all ranks: the share times their number first."""
    return averaged(share * dist.get_world_size(group), group)


@dataclass(frozen=True)
class Normalisation:
    """How tokens are weighed, and what each rank calls backward on."""

    weights: Callable[[Sequence[Tensor], Layout, int], list[Tensor]]
    loss: Callable[[Tensor, dist.ProcessGroup], Tensor]


NORMALISATIONS = {
    "share": Normalisation(weights_per_sample, own_share),
    "sum, then a replicated loss": Normalisation(weights_per_sample, summed_for_a_replicated_loss),
    "times cp_size, then averaged": Normalisation(weights_per_sample, multiplied_then_averaged),
    "divided by the shard's own tokens": Normalisation(partial(over_own_shard, per="sample"), own_share),
    "sum with the other convention": Normalisation(weights_per_sample, summed_for_an_own_slice_loss),
    "averaged over CP": Normalisation(weights_per_sample, averaged),
}
