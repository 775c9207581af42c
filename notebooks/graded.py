"""The exhibits of ``museum.py`` once more, each behind a signature of the grader, and the clause that it breaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import kinds
from museum import packed_slices, wrapped_offset
from refimpl import check, history, slicing
from refimpl.candidate import Kind
from refimpl.collectives import all_reduce
from refimpl.entropy import log_prob_and_entropy
from refimpl.layout import Batch, Layout
from refimpl.loss import token_weights

Pieces = tuple[list[Tensor], list[Tensor] | None]


@dataclass(frozen=True)
class Graded:
    """What kind of function it is, the old code, the right code, and the clauses that the old one breaks."""

    kind: str | Kind
    old: Any
    new: Any
    breaks: str


def first_finding(name: str) -> str:
    """The smallest case in which the grader rejects the exhibit, and the clause; quick, since it stops there."""
    exhibit = GRADED[name]
    for case in check.cases(exhibit.kind):
        for finding, _ in case.findings(exhibit.old):
            return f"{finding.clause:7}{name}: {case}"
    return f"nothing found: {name}"


# ---------------------------------------------------------------- rows, tokens, pieces


def rolled_after_the_split(tokens: Sequence[Tensor], layout: Layout, rank: int) -> Tensor:
    """The next row of the rank's own buffer, except where a sample ends."""
    none = slicing.targets(tokens, layout, rank) == slicing.NO_TARGET
    return slicing.local_tokens(tokens, layout, rank).roll(-1).masked_fill(none, slicing.NO_TARGET)


def shifted_after_packing(tokens: Sequence[Tensor], layout: Layout, rank: int) -> Tensor:
    """The next token of the packed stream, before it is split: right within a sample, and one too many at its end."""
    stream = torch.cat(list(tokens)).roll(-1)
    stream[-1] = slicing.NO_TARGET
    shifted = torch.split(stream, [len(sample) for sample in tokens])
    return slicing.local_tokens(shifted, layout, rank, pad_id=slicing.NO_TARGET)


def rows_of_tokens(log_prob: Tensor, entropy: Tensor | None, layout: Layout, rank: int) -> Pieces:
    """The rows of the response's own tokens, one after those that score them."""

    def cut(buffer: Tensor) -> list[Tensor]:
        spans = layout.response_spans(rank)
        return [torch.cat([buffer[s.row + 1 : s.row + 1 + s.length] for s in own]) for own in spans]

    return cut(log_prob), None if entropy is None else cut(entropy)


def last_n(total_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[list[int]]:
    """The last n scoring rows of each sample; of a batch that can be."""
    batch, start, found = Batch(total_lengths, response_lengths), 0, []
    for total, response in zip(batch.total_lengths, batch.response_lengths, strict=True):
        found.append(list(range(start, start + total - 1))[-response:])
        start += total
    return found


def right_rows(total_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[list[int]]:
    """The rows of the spans."""
    spans = Layout(Batch(total_lengths, response_lengths)).response_spans(0)
    return [list(range(span.row, span.row + span.length)) for (span,) in spans]


def kept_by_zero(log_prob: Tensor, entropy: Tensor | None, layout: Layout, rank: int) -> Pieces:
    """Each piece with 0 times the whole buffer added, so that none leaves the graph."""

    def kept(buffer: Tensor) -> list[Tensor]:
        return [piece + 0 * buffer.sum() for piece in slicing.response_pieces(buffer, layout, rank)]

    return kept(log_prob), None if entropy is None else kept(entropy)


def all_at_once(logits: Tensor, tokens: Sequence[Tensor], layout: Layout, rank: int) -> Pieces:
    """Log-prob and entropy of all rows, then sliced."""
    return slicing.extract(*log_prob_and_entropy(logits, slicing.targets(tokens, layout, rank)), layout, rank)


# ---------------------------------------------------------------- rows of logits


def plain(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-sum p log p, as everybody writes it."""
    log_p = torch.log_softmax(logits.float(), 1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def log_of_p(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Masked where p is 0, but in forward only: backward takes the logarithm's slope there."""
    p = torch.softmax(logits.float(), 1)
    log_prob, _ = log_prob_and_entropy(logits, targets)
    return log_prob, -torch.where(p == 0, 0, p * p.log()).sum(1)


def in_tiles(logits: Tensor, targets: Tensor, tile: int = 4) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over tiles, the last one filled up with zeros."""
    x = logits.float()
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % tile))
    lse = torch.stack([part.logsumexp(1) for part in torch.split(padded, tile, 1)]).logsumexp(0)
    entropy = log_prob_and_entropy(logits, targets)[1]
    assert entropy is not None
    return x.gather(1, targets[:, None])[:, 0] - lse, entropy


class ScaledByRow0(torch.autograd.Function):
    """Nothing in forward; in backward every row gets row 0's incoming gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Tensor:
        """Row 0's, for all."""
        return incoming[0][:1].expand_as(incoming[0]).clone()


def by_row_0(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Each row's gradient, scaled by row 0's."""
    return tuple(ScaledByRow0.apply(v) for v in log_prob_and_entropy(logits, targets))  # type: ignore[no-untyped-call]


def offsets_of_32_bits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Each row found by its offset, row * stride in 32 bits."""
    (rows, columns), (stride, step) = logits.shape, logits.stride()
    found = [logits.as_strided((columns,), (step,), wrapped_offset(row, stride, 32)) for row in range(rows)]
    return log_prob_and_entropy(torch.stack(found) if found else logits, targets)


# ---------------------------------------------------------------- means, and real ranks


def mean_over_all(values: Tensor, mask: Tensor, group: dist.ProcessGroup, loss: Any = "replicated") -> Tensor:
    """Sum and number over all ranks; ``loss`` is the convention of the sum's backward."""
    total, count = all_reduce(torch.stack([(values * mask).sum(), mask.sum()]), group, loss=loss)
    mean: Tensor = total / count.clamp_min(1)
    return mean


def returns_early(values: Tensor, mask: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A rank without an unmasked token sees no reason to take part."""
    return mean_over_all(values, mask, group) if mask.sum() > 0 else (values * mask).sum()


def weights_per_token(masks: Sequence[Tensor], layout: Layout, rank: int) -> list[Tensor]:
    """Ours."""
    return token_weights(masks, layout, rank, per="token")


def over_nothing(masks: Sequence[Tensor], layout: Layout, rank: int) -> list[Tensor]:
    """Divided by the number of tokens that count, whatever that is."""
    count = torch.stack([mask.sum() for mask in masks]).sum()
    return [weight * count.clamp_min(1) / count for weight in weights_per_token(masks, layout, rank)]


def over_own_shard(masks: Sequence[Tensor], layout: Layout, rank: int) -> list[Tensor]:
    """Divided by the number of tokens that count on this rank."""
    counts = [(weight > 0).double() for weight in weights_per_token(masks, layout, rank)]
    return [count / torch.cat(counts).sum().clamp_min(1) for count in counts]


def unpadded(x: Tensor, targets: Tensor, start: int, size: int, group: Any, padding: bool = False) -> Any:
    """Over the vocabulary, and with ``padding`` over the columns that pad it as well."""
    whole = None if padding else size
    return log_prob_and_entropy(x, targets, tp_group=group, vocab_start=start, vocab_size=whole)


GRADED = {
    "rolled after the split": Graded("targets", rolled_after_the_split, slicing.targets, "C2"),
    "shifted after packing": Graded("targets", shifted_after_packing, slicing.targets, "C2"),
    "token rows for logit rows": Graded("extraction", rows_of_tokens, slicing.extract, "C2"),
    "no prompt": Graded(kinds.ROWS, packed_slices, right_rows, "input"),
    "the last none": Graded(kinds.ROWS, last_n, right_rows, "C2"),
    "None in the list": Graded("step", history.LINE["#1822"], history.LINE["now"], "C6"),
    "zeros that ask": Graded("step", history.LINE["#2153"], history.LINE["now"], "C4 C6"),
    "an early return": Graded(kinds.MEAN, returns_early, mean_over_all, "C6"),
    "0 times infinity, for the graph": Graded("extraction", kept_by_zero, slicing.extract, "C2"),
    "0 times infinity, in the entropy": Graded("log_prob_entropy", plain, log_prob_and_entropy, "C7"),
    "a gradient at p = 0": Graded("log_prob_entropy", log_of_p, log_prob_and_entropy, "C7"),
    "the last tile": Graded("log_prob_entropy", in_tiles, log_prob_and_entropy, "C7"),
    "padded columns": Graded(kinds.SHARDS, partial(unpadded, padding=True), unpadded, "C7"),
    "every row scaled by row 0": Graded("log_prob_entropy", by_row_0, log_prob_and_entropy, "C7"),
    "twice the gradient": Graded(kinds.MEAN, partial(mean_over_all, loss="own slice"), mean_over_all, "C8"),
    "a slice per sample": Graded(kinds.FROM_LOGITS, history.extract_before_1788, all_at_once, "memory"),
    "an offset of 32 bits": Graded("log_prob_entropy", offsets_of_32_bits, log_prob_and_entropy, "C1"),
    "a mean over nothing": Graded("weights", over_nothing, weights_per_token, "C7"),
    "the shard's own tokens": Graded("weights", over_own_shard, weights_per_token, "C7"),
}
