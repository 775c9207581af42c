"""A tiny megatron-core ``GPTModel`` under TP and CP: logits, pieces, gradients.

megatron-core's own layers do tensor parallelism; its core attention refuses CP without Transformer Engine, so the
layer spec names ours.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from refimpl import slicing
from refimpl._megatron import GPTModel, TransformerConfig, get_gpt_layer_local_spec
from refimpl.collectives import all_gather, all_reduce
from refimpl.entropy import log_prob_and_entropy
from refimpl.layout import Layout
from refimpl.ranks import Rank
from refimpl.recorder import label

VOCAB, MAX_LENGTH = 8, 32


class GatheredAttention(torch.nn.Module):
    """Attention of this rank's rows to the rows of all CP ranks: keys and values are gathered, then masked.

    One code for thd and bshd, zigzag and windows: only the mask knows who is whose past. Every rank's loss depends on
    every key, so the gather's convention is the own-slice loss.
    """

    def __init__(self, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self.group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> Tensor:
        """``[T_local, 1, heads, d]`` each, mask ``[T_local, cp_size * T_local]``, to ``[T_local, 1, heads * d]``."""
        with label("keys and values"):
            both = all_gather(torch.stack([key, value], 1), self.group, loss="own slice")
        q, k, v = (x[:, 0].transpose(0, 1) for x in (query, both[:, 0], both[:, 1]))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return mixed.transpose(0, 1).flatten(1)[:, None]


def build(me: Rank, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The model of this rank, on its device: 2 layers, 32 wide, 4 heads, its shard of a vocabulary of 8.

    The same seed gives the same weights whatever tp and cp: megatron-core draws each whole matrix on the CPU and keeps
    this rank's part.
    """
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    split = {"tensor_model_parallel_size": me.tp_size, "context_parallel_size": me.cp_size}
    exact = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "params_dtype": dtype, "use_cpu_initialization": True}
    torch.manual_seed(seed)
    model = GPTModel(TransformerConfig(**sizes, **split, **exact), spec, VOCAB, MAX_LENGTH)
    return model.to(me.device, dtype)


@cache
def attention_mask(layout: Layout, cp_rank: int) -> Tensor:
    """True where a row of ``cp_rank`` may look at a row of any rank: ``[T_local, cp_size * T_local]``.

    It sees its own sample up to its own position; a padding row sees itself, so that its softmax is of something.
    """
    places = [i * MAX_LENGTH + torch.arange(total) for i, total in enumerate(layout.batch.total_lengths)]
    every = torch.cat([slicing.local_tokens(places, layout, rank, pad_id=-1) for rank in range(layout.cp_size)])
    own = slice(cp_rank * layout.rows, (cp_rank + 1) * layout.rows)
    mine = every[own, None]
    mask = (mine >= every) & (mine // MAX_LENGTH == every // MAX_LENGTH) & (mine >= 0)
    mask[:, own].fill_diagonal_(True)
    return mask


def logits(model: Any, tokens: Sequence[Tensor], layout: Layout, me: Rank) -> Tensor:
    """The logits of this rank's rows and of its shard of the vocabulary, ``[T_local, VOCAB / tp_size]``."""
    positions = [torch.arange(total) for total in layout.batch.total_lengths]
    ids, places = (slicing.local_tokens(x, layout, me.cp_rank)[None].to(me.device) for x in (tokens, positions))
    return model(ids, places, attention_mask(layout, me.cp_rank).to(me.device))[0]  # type: ignore[no-any-return]


def log_probs_and_entropies(
    model: Any,
    tokens: Sequence[Tensor],
    layout: Layout,
    me: Rank,
    *,
    entropy: Literal["off", "value", "grad"] = "grad",
    extract: Callable[..., Any] = slicing.extract,
    redistribute: Callable[..., Any] | None = None,
) -> tuple[Any, Any]:
    """Pieces of every response under ``layout``, or under zigzag with a ``redistribute(keys, layout, rank, group)``."""
    goals = slicing.targets(tokens, layout, me.cp_rank, response_only=True).to(me.device)
    x, start = logits(model, tokens, layout, me), me.tp_rank * VOCAB // me.tp_size
    with label("log-prob and entropy"):
        both = log_prob_and_entropy(x, goals, entropy=entropy, tp_group=me.tp_group, vocab_start=start)
    keys = extract(*both, layout, me.cp_rank)[: 1 if entropy == "off" else 2]
    moved = keys if redistribute is None else redistribute(keys, layout, me.cp_rank, me.cp_group)
    return moved[0], None if entropy == "off" else moved[1]


def reduce_gradients(model: Any, me: Rank) -> None:
    """Sum the gradients over the CP group, in one bucket as Megatron keeps them; an absent one is an error.

    Megatron reduces over DP x CP, and averages unless told otherwise; here there is one DP rank, and shares add up.
    """
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if missing:
        raise RuntimeError(f"rank {me.rank}: no gradient for {', '.join(missing[:3])} and {len(missing)} in all")
    gradients = [parameter.grad for parameter in model.parameters()]
    with torch.no_grad(), label("gradients"):
        bucket = all_reduce(torch.cat([g.flatten() for g in gradients]), me.cp_group, loss="replicated")
        for gradient, part in zip(gradients, torch.split(bucket, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
