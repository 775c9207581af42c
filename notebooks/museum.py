"""Real bugs of other projects, each as a small function that makes its mistake, beside the function that does not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.collectives import all_reduce
from refimpl.layout import Layout
from refimpl.loss import token_weights


def weights_per_sample(masks: Sequence[Tensor], layout: Layout, cp_rank: int) -> list[Tensor]:
    """Each sample weighs the same: right."""
    return token_weights(masks, layout, cp_rank, per="sample", dtype=torch.float64)


def weights_of_own_shard(masks: Sequence[Tensor], layout: Layout, cp_rank: int) -> list[Tensor]:
    """Megatron-LM #673: each rank divides by the tokens that it holds itself."""
    pieces = [(weight > 0).double() for weight in weights_per_sample(masks, layout, cp_rank)]
    return [piece / piece.sum().clamp_min(1) / len(pieces) for piece in pieces]


def own_share(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Backward starts from this rank's share: right, the ranks' gradients then add up."""
    return share


def summed_for_a_replicated_loss(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The shares are summed, and the convention fits the replicated loss that follows: right too."""
    return all_reduce(share, group, loss="replicated")


def summed_for_an_own_slice_loss(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """slime #1748: the sum's backward sums again, though each rank already holds the whole loss: cp_size times."""
    return all_reduce(share, group, loss="own slice")


def averaged(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Shares treated as if each rank had the mean of a replica of its own: 1 / cp_size."""
    return share / dist.get_world_size(group)


@dataclass(frozen=True)
class Normalisation:
    """How tokens are weighed, and what each rank calls backward on."""

    weights: Callable[[Sequence[Tensor], Layout, int], list[Tensor]]
    loss: Callable[[Tensor, dist.ProcessGroup], Tensor]


NORMALISATIONS = {
    "share": Normalisation(weights_per_sample, own_share),
    "sum, then a replicated loss": Normalisation(weights_per_sample, summed_for_a_replicated_loss),
    "divided by the shard's own tokens": Normalisation(weights_of_own_shard, own_share),
    "sum with the other convention": Normalisation(weights_per_sample, summed_for_an_own_slice_loss),
    "averaged over CP": Normalisation(weights_per_sample, averaged),
}
