"""A small RL step, end to end on real ranks: sample, reward, advantages, policy loss, backward, reduction, Adam."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from refimpl.collectives import all_gather, all_reduce
from refimpl.diagrams import COLOURS, Drawing
from refimpl.layout import Batch, Layout
from refimpl.loss import group_advantages, policy_loss, token_weights, weighted_sum
from refimpl.model import VOCAB, build, log_probs_and_entropies, logits, reduce_gradients
from refimpl.ranks import Rank
from refimpl.recorder import label


@dataclass(frozen=True)
class Task:
    """Count on: a prompt counts up by one, modulo the vocabulary, and so shall the response.

    The reward is the share of right tokens. The first of the ``micro_batches`` (numbers of samples) is small enough to
    leave a rank without a response row.
    """

    prompt_lengths: Sequence[int] = (8, 2, 3, 5, 2, 4, 3, 6)
    response_lengths: Sequence[int] = (2, 1, 2, 1, 3, 1, 2, 1)
    responses: int = 8
    micro_batches: Sequence[int] = (1, 31, 32)

    @property
    def batch(self) -> Batch:
        """Of all responses, those of a prompt next to each other."""
        pairs = list(zip(self.prompt_lengths, self.response_lengths, strict=True))
        return Batch(*zip(*[(p + r, r) for p, r in pairs for _ in range(self.responses)], strict=True))

    def right(self, step: int) -> list[Tensor]:
        """Prompts of this step, each with the response that would be right, ``[L]`` for each sample."""
        starts = torch.randint(VOCAB, (len(self.prompt_lengths),), generator=torch.Generator().manual_seed(step))
        starts = starts.repeat_interleave(self.responses)
        return [(start + torch.arange(n)) % VOCAB for start, n in zip(starts, self.batch.total_lengths, strict=True)]


@torch.no_grad()
def sample(model: Any, task: Task, step: int, layout_of: Callable[[Batch], Layout], me: Rank) -> list[Tensor]:
    """Prompts and sampled responses, ``[L]`` each, the same on every rank and for every layout.

    Token by token with the training model: all samples at once, each cut to what is there. The ranks share the
    Gumbel noise (arXiv 1411.0030), and put their shards of each last row together.
    """
    batch, tokens, noise = task.batch, task.right(step), torch.Generator().manual_seed(1_000_003 * step + 1)
    prompts = [total - response for total, response in zip(batch.total_lengths, batch.response_lengths, strict=True)]
    for new in range(max(batch.response_lengths)):
        open_ = [i for i, response in enumerate(batch.response_lengths) if response > new]
        lengths = [prompts[i] + new for i in open_]
        layout = layout_of(Batch(lengths, [1 if n > 1 else 0 for n in lengths]))
        mine = logits(model, [tokens[i][:n] for i, n in zip(open_, lengths, strict=True)], layout, me)
        last = torch.zeros(len(open_), VOCAB, dtype=mine.dtype, device=me.device)
        columns = slice(me.tp_rank * mine.shape[1], (me.tp_rank + 1) * mine.shape[1])
        for row, (spans, n) in enumerate(zip(layout.spans(me.cp_rank), lengths, strict=True)):
            for span in (span.clip(n - 1, n) for span in spans):
                last[row, columns] += mine[span.rows].sum(0)
        with label("last rows"):
            last = all_reduce(all_reduce(last, me.tp_group, loss="replicated"), me.cp_group, loss="replicated")
        gumbel = -torch.rand(last.shape, generator=noise, dtype=torch.float64).log().neg().log()
        for i, token in zip(open_, (last.double().cpu() + gumbel).argmax(1), strict=True):
            tokens[i][prompts[i] + new] = token
    return tokens


def rl_step(
    model: Any,
    optimiser: torch.optim.Optimizer,
    task: Task,
    step: int,
    layout_of: Callable[[Batch], Layout],
    me: Rank,
    *,
    entropy_coefficient: float = 0.05,
    **extraction: Any,
) -> dict[str, float]:
    """Sample, reward, advantages, old log-probs, policy loss with entropy bonus, backward, reduction, Adam.

    ``layout_of`` lays a batch out; ``extraction`` goes to ``log_probs_and_entropies``. Returns the step's mean reward
    and, of its last update, loss and mean entropy, over all ranks.
    """
    tokens, batch = sample(model, task, step, layout_of, me), task.batch
    answers = zip(tokens, task.right(step), batch.response_lengths, strict=True)
    rewards = torch.stack([(got[-r:] == want[-r:]).double().mean() for got, want, r in answers])
    advantages = group_advantages(rewards.view(-1, task.responses)).flatten().tolist()
    micro_batches = []
    for stop, size in zip(accumulate(task.micro_batches), task.micro_batches, strict=True):
        own = slice(stop - size, stop)
        layout = layout_of(Batch(batch.total_lengths[own], batch.response_lengths[own]))
        masks = [torch.ones(r, device=me.device) for r in layout.batch.response_lengths]
        after = layout.as_zigzag() if extraction.get("redistribute") else layout
        weights = token_weights(masks, after, me.cp_rank, per="sample", count=len(batch))
        with torch.no_grad():
            old, _ = log_probs_and_entropies(model, tokens[own], layout, me, entropy="off", **extraction)
        micro_batches.append((tokens[own], layout, advantages[own], weights, old))
    for _ in range(2):  # two updates from the same samples, so that the ratio leaves 1
        optimiser.zero_grad()
        shares = torch.zeros(2, device=me.device)  # of the loss and of the mean entropy
        for some, layout, advantage, weights, old in micro_batches:
            new, entropies = log_probs_and_entropies(model, some, layout, me, **extraction)
            bonus = {"entropies": entropies, "entropy_coefficient": entropy_coefficient}
            share = policy_loss(new, old, advantage, weights, **bonus)
            share.backward()  # type: ignore[no-untyped-call]
            shares += torch.stack([share.detach(), weighted_sum(entropies, weights).detach()])
        reduce_gradients(model, me)
        optimiser.step()
    loss, entropy = all_reduce(shares, me.cp_group, loss="replicated").tolist()
    return {"reward": rewards.mean().item(), "loss": loss, "entropy": entropy}


def train(
    me: Rank, task: Task, steps: int, layout_of: Callable[[Batch], Layout], **options: Any
) -> list[dict[str, float]]:
    """``rl_step`` as often as wanted, from a fresh model; what each step measured."""
    model = build(me, options.pop("dtype", torch.float32))
    optimiser = torch.optim.Adam(model.parameters(), lr=options.pop("lr", 3e-3))
    return [rl_step(model, optimiser, task, step, layout_of, me, **options) for step in range(steps)]


def loss_and_gradients(
    me: Rank, layout: Layout, dtype: torch.dtype = torch.float64, **extraction: Any
) -> tuple[float, dict[str, Tensor]]:
    """One policy loss on fixed tokens: the whole loss, and each parameter's whole gradient, the same on every rank.

    Token p of sample i is 3i + 5p + p^2 modulo the vocabulary, its advantage 1, -1, 2, -2, ... sample by sample, the
    old log-prob log 1/8, the entropy coefficient 0.05.
    """
    model = build(me, dtype)
    places = map(torch.arange, layout.batch.total_lengths)
    tokens = [(3 * i + 5 * p + p * p) % VOCAB for i, p in enumerate(places)]
    new, entropies = log_probs_and_entropies(model, tokens, layout, me, **extraction)
    after = layout.as_zigzag() if extraction.get("redistribute") else layout
    masks = [torch.ones(r, device=me.device) for r in layout.batch.response_lengths]
    weights = token_weights(masks, after, me.cp_rank, per="sample", dtype=dtype)
    old = [torch.full_like(piece, -math.log(VOCAB)) for piece in new]
    advantages = [(1.0 + i // 2) * (-1) ** i for i in range(len(tokens))]
    share = policy_loss(new, old, advantages, weights, entropies=entropies, entropy_coefficient=0.05)
    share.backward()  # type: ignore[no-untyped-call]
    reduce_gradients(model, me)
    gradients = {}
    for name, parameter in model.named_parameters():
        whole, split = parameter.grad, getattr(parameter, "partition_dim", -1)
        if me.tp_size > 1 and split >= 0:
            parts = all_gather(whole.transpose(0, split), me.tp_group, loss="replicated")
            whole = parts.transpose(0, split)
        gradients[name] = whole.cpu()
    return all_reduce(share.detach(), me.cp_group, loss="replicated").item(), gradients


def curves(panels: dict[str, dict[str, Sequence[float]]]) -> Drawing:
    """Values step by step, a panel for each key of ``panels`` and a line for each name in it; later lines are dashed.

    The text twin gives each line's mean over its first and its last five steps.
    """
    from matplotlib.figure import Figure  # here, since ranks import this file too

    figure, lines = Figure((4.2 * len(panels), 2.6)), []
    for number, (title, named) in enumerate(panels.items()):
        axes = figure.add_axes(((number + 0.11) / len(panels), 0.17, 0.83 / len(panels), 0.71))
        for order, (name, values) in enumerate(named.items()):
            axes.plot(
                values, color=("black", COLOURS[1])[order % 2], lw=1.6 + order, ls=("-", ":")[order % 2], label=name
            )
            first, last = (sum(part) / len(part) for part in (values[:5], values[-5:]))
            lines.append(f"{title:10} {name:10} first five steps {first:6.2f}   last five {last:6.2f}")
        axes.set_title(title, fontsize=9, weight="bold", loc="left")
        axes.set_xlabel("step", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return Drawing(figure, "\n".join(lines))
