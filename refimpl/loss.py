"""Means over response tokens, and a small policy loss, that do not depend on how the batch is laid out.

A mean is a weighted sum, and the weight of a token is known from its *whole* sample and the *whole* batch, never from
the part that a rank happens to hold:

    per="sample"    mask / (tokens of its sample that count) / samples     each sample weighs the same
    per="token"     mask / (tokens of the batch that count)                each token weighs the same

Each rank sums over its own pieces, its *share*. Who divides by what, and what is summed over which group:

    TP ranks        hold the same log-probs, so the same share: never summed
    CP ranks        hold different pieces: the loss is the *sum* of their shares, and so are a parameter's gradients
    micro-batches   ``count`` is that of the global batch, over micro-batches and DP ranks: shares and gradients are
    and DP ranks    summed. Where a framework averages gradients over n ranks, multiply the share by n before backward
    a metric        is summed where it is a share, taken from any one rank where it is replicated
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from refimpl.layout import Layout


def token_weights(
    masks: Sequence[Tensor],
    layout: Layout,
    cp_rank: int,
    *,
    per: Literal["sample", "token"],
    count: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """The weight of each response token that ``cp_rank`` holds in the mean: pieces, aligned with those of log-probs.

    Args:
        masks: for each sample ``[R]``, true or 1 where a token counts; the same on every rank.
        layout: how the pieces are laid out; after a redistribution that of its target.
        count: samples (or tokens that count) in the global batch; by default those of this batch.

    Returns:
        ``[R_local]`` each, on the device of the masks. With the default count they sum to 1 over all ranks if each
        sample has a token that counts. Per sample, one without such a token takes its share of the sum with it.

    Raises:
        ValueError: a mask is not as long as its response, ``per`` is another word, or ``count`` is not positive.
    """
    lengths = list(layout.batch.response_lengths)
    if [list(mask.shape) for mask in masks] != [[length] for length in lengths]:
        raise ValueError(f"masks of shapes {[list(mask.shape) for mask in masks]} for responses of lengths {lengths}")
    if per not in ("sample", "token") or (count is not None and count < 1):
        raise ValueError(f"per {per!r}, count {count!r}: sample or token, and at least 1")
    counting = [mask.double() for mask in masks]
    tokens = [mask.sum().clamp_min(1) for mask in counting]  # a sample of which nothing counts gives 0, not 0 / 0
    if per == "sample":
        whole = [mask / n / (count or len(masks)) for mask, n in zip(counting, tokens, strict=True)]
    else:
        every = count or sum(mask.sum() for mask in counting)
        whole = [mask / max(every, 1) for mask in counting]
    held = zip(whole, layout.response_slices(cp_rank), strict=True)
    return [torch.cat([mask[part] for part in parts]).to(dtype) for mask, parts in held]


def weighted_sum(pieces: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """This rank's share of the mean, a scalar attached to the graph of every piece, whatever it holds.

    A token of weight 0 adds exactly 0, and its gradient is 0, even where its value is infinite or NaN.

    Raises:
        ValueError: the lists are not aligned sample by sample, or there is no sample.
    """
    _aligned(weights, pieces=pieces)
    values, weight = torch.cat(list(pieces)), torch.cat(list(weights))
    return (values.masked_fill(weight == 0, 0) * weight).sum()


def policy_loss(
    log_probs: Sequence[Tensor],
    old_log_probs: Sequence[Tensor],
    advantages: Tensor | Sequence[float],
    weights: Sequence[Tensor],
    *,
    clip: float = 0.2,
    entropies: Sequence[Tensor] | None = None,
    entropy_coefficient: float = 0.0,
) -> Tensor:
    """This rank's share of PPO's clipped loss (arXiv 1707.06347) minus the entropy bonus; a scalar to call backward on.

    Per token ``-min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A) - entropy_coefficient * entropy``, where ratio is
    e^(log-prob - old log-prob) and A the advantage of the token's sample. The difference is held within 20 either way,
    so that no ratio is infinite.

    Args:
        log_probs: pieces ``[R_local]`` of each sample. ``old_log_probs``, ``weights`` and ``entropies`` are aligned
            with them.
        advantages: one per sample.
        entropy_coefficient: 0 needs no ``entropies``.

    Raises:
        ValueError: a coefficient without entropies, lists that are not aligned, or no sample.
    """
    if entropy_coefficient and entropies is None:
        raise ValueError(f"entropy_coefficient {entropy_coefficient} without entropies")
    _aligned(weights, log_probs=log_probs, old_log_probs=old_log_probs)
    surrogates = []
    for new, old, advantage, weight in zip(log_probs, old_log_probs, advantages, weights, strict=True):
        ratio = (new - old).masked_fill(weight == 0, 0).clamp(-20, 20).exp()  # before the exp: it may be infinite
        surrogates.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage))
    loss = weighted_sum(surrogates, weights)
    if entropies is None or not entropy_coefficient:
        return loss
    return loss - entropy_coefficient * weighted_sum(entropies, weights)


def group_advantages(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO's advantage (arXiv 2402.03300): a response's reward against the others of its prompt, in deviations.

    ``rewards`` ``[prompts, responses]`` floating in, the same shape out: (r - mean) / (std + eps) along the responses,
    0 where all rewards are equal. The deviation divides by n; some frameworks divide by n - 1.
    """
    above = rewards - rewards.mean(1, keepdim=True)
    alike = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)  # rounding of the mean is no advantage
    return (above / (above.square().mean(1, keepdim=True).sqrt() + eps)).masked_fill(alike, 0)


def _aligned(weights: Sequence[Tensor], **lists: Sequence[Tensor]) -> None:
    if not weights:
        raise ValueError("a loss of no sample")
    for name, pieces in lists.items():
        shapes = [[list(p.shape) if isinstance(p, Tensor) else p for p in some] for some in (weights, pieces)]
        if shapes[0] != shapes[1]:
            i = next((i for i, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b), min(map(len, shapes)))
            found = [some[i] if i < len(some) else "no piece" for some in shapes]
            raise ValueError(f"sample {i}: {name} {found[1]}, weights {found[0]}")
