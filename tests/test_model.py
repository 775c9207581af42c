"""The real model on real ranks: its loss and every gradient against one fp64 process that knows no layout."""

import math
from functools import cache, partial
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

import rl
from refimpl import history, model, ranks
from refimpl.history import LINE
from refimpl.layout import Batch, Layout
from refimpl.ranks import Rank

BATCH = Batch([6, 3, 9, 2, 5], [2, 1, 5, 1, 0])
GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]
LAYOUTS = [(tp, Layout(BATCH, qkv, split, cp)) for tp, cp in GRIDS for qkv in ("thd", "bshd")
           for split in ("zigzag", "contiguous")]  # fmt: skip


def one_by_one(me: Rank, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Each sample alone, with a plain causal mask and autograd's log_softmax; the loss written out."""
    gpt = model.build(me, dtype)
    loss = torch.zeros((), dtype=dtype)
    for i, (total, response) in enumerate(zip(BATCH.total_lengths, BATCH.response_lengths, strict=True)):
        tokens = torch.tensor([(3 * i + 5 * p + p * p) % 8 for p in range(total)])
        causal = torch.ones(total, total, dtype=torch.bool).tril()
        log_p = torch.log_softmax(gpt(tokens[None], torch.arange(total)[None], causal)[0], 1)
        advantage = [1.0, -1.0, 2.0, -2.0, 3.0][i]
        for p in range(total - response - 1, total - 1):
            ratio = (log_p[p, tokens[p + 1]] + math.log(8)).exp()
            surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            entropy = -(log_p[p].exp() * log_p[p]).sum()
            loss = loss + (surrogate - 0.05 * entropy) / response / 5
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: parameter.grad for name, parameter in gpt.named_parameters()}


@cache
def reference() -> tuple[float, dict[str, Tensor]]:
    return ranks.run(one_by_one, torch.float64)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("tp", "layout"), LAYOUTS, ids=lambda x: f"tp {x}" if isinstance(x, int) else str(x))
def test_loss_and_every_gradient(tp: int, layout: Layout) -> None:
    want_loss, want = reference()
    for loss, gradients in ranks.run(rl.loss_and_gradients, layout, tp=tp, cp=layout.cp_size):
        assert loss == pytest.approx(want_loss, abs=1e-12)
        assert gradients.keys() == want.keys()
        for name, gradient in gradients.items():
            assert gradient.shape == want[name].shape, name
            assert (gradient - want[name]).abs().max() < 1e-12, name


@pytest.mark.parametrize(
    "coefficient_layout", [Layout(BATCH, "thd", "contiguous", 2), Layout(BATCH, "thd", "contiguous", 4)], ids=str
)
def test_the_same_after_a_redistribution(coefficient_layout: Layout) -> None:
    want_loss, want = reference()
    run = partial(rl.loss_and_gradients, redistribute=history.redistribute_now)
    for loss, gradients in ranks.run(run, coefficient_layout, cp=coefficient_layout.cp_size):
        assert loss == pytest.approx(want_loss, abs=1e-12)
        assert all((gradients[name] - want[name]).abs().max() < 1e-12 for name in want)


def test_the_gradients_are_not_all_zero() -> None:
    _, want = reference()
    assert sum(bool(gradient.abs().max() > 1e-4) for gradient in want.values()) > 20


def test_fp32_within_tolerance() -> None:
    """Stated: 1e-5 of the largest entry of each gradient."""
    want_loss, want = reference()
    layout = Layout(BATCH, "thd", "zigzag", 2)
    for loss, gradients in ranks.run(partial(rl.loss_and_gradients, dtype=torch.float32), layout, tp=2, cp=2):
        assert loss == pytest.approx(want_loss, abs=1e-6)
        for name, gradient in gradients.items():
            scale = max(1e-2, float(want[name].abs().max()))
            assert (gradient - want[name]).abs().max() < 1e-5 * scale, name


@pytest.mark.parametrize("layout", [Layout(BATCH, cp_size=2), Layout(BATCH, "bshd", "contiguous", 3)], ids=str)
def test_who_sees_whom(layout: Layout) -> None:
    """By brute force over all pairs of rows: the same sample, and not later."""
    every = [cell for lane in oracle.rows(layout) for cell in lane]
    for rank, lane in enumerate(oracle.rows(layout)):
        mask = model.attention_mask(layout, rank)
        for row, mine in enumerate(lane):
            for column, other in enumerate(every):
                itself = column == rank * layout.rows + row
                sees = mine is not None and other is not None and mine[0] == other[0] and mine[1] >= other[1]
                assert bool(mask[row, column]) == (sees or itself)


def test_megatrons_own_cross_entropy_agrees() -> None:
    """On megatron-core's own TP shards of the logits."""

    def body(me: Rank) -> tuple[Tensor, Tensor]:
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

        from refimpl.entropy import log_prob_and_entropy

        layout = Layout(BATCH)
        tokens = [torch.arange(n) % model.VOCAB for n in BATCH.total_lengths]
        shard = model.logits(model.build(me), tokens, layout, me).detach()
        goals = torch.arange(layout.rows) % model.VOCAB
        ours, _ = log_prob_and_entropy(shard, goals, tp_group=me.tp_group, vocab_start=me.tp_rank * shard.shape[1])
        theirs = vocab_parallel_cross_entropy(shard.clone()[:, None], goals[:, None])
        return ours, -theirs[:, 0]

    for tp in (1, 2):
        for ours, theirs in ranks.run(body, tp=tp):
            assert (ours - theirs).abs().max() < 1e-6


SMALL = rl.Task(prompt_lengths=(8, 2, 3, 4), response_lengths=(2, 1, 2, 3), responses=4, micro_batches=(1, 7, 8))


def test_the_same_weights_and_samples_whatever_the_grid() -> None:
    def weights_and_samples(me: Rank, split: Any) -> tuple[float, list[list[int]]]:
        gpt = model.build(me, torch.float64)
        own = [p for p in gpt.parameters() if not getattr(p, "tensor_model_parallel", False) or me.tp_size == 1]
        tokens = rl.sample(gpt, SMALL, 3, lambda batch: Layout(batch, cp_split=split, cp_size=me.cp_size), me)
        return sum(float(p.sum()) for p in own) if me.tp_size == 1 else 0.0, [t.tolist() for t in tokens]

    total, want = ranks.run(weights_and_samples, "zigzag")[0]
    right = [t.tolist() for t in SMALL.right(3)]
    prompts = [p for p in SMALL.prompt_lengths for _ in range(4)]
    assert all(got[:p] == r[:p] for got, r, p in zip(want, right, prompts, strict=True))
    assert want != right
    for tp, cp, split in ((2, 1, "zigzag"), (1, 2, "zigzag"), (2, 2, "contiguous"), (1, 4, "contiguous")):
        for other, samples in ranks.run(weights_and_samples, split, tp=tp, cp=cp):
            assert samples == want
            assert other in (0.0, total)


def test_sampling_follows_the_models_distribution() -> None:
    """2,000 first tokens of one prompt: their frequencies, against the softmax of the row that scores them."""

    def body(me: Rank) -> tuple[list[float], list[float]]:
        gpt = model.build(me, torch.float64)
        task = rl.Task(prompt_lengths=(2,), response_lengths=(1,), responses=2000, micro_batches=(2000,))
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in gpt.output_layer.parameters():
                parameter.mul_(30)  # a distribution that is far from uniform
        tokens = rl.sample(gpt, task, 0, lambda batch: Layout(batch), me)
        one = Layout(Batch([2], [1]))
        p = model.logits(gpt, [tokens[0][:2]], one, me)[1].softmax(0)
        counts = torch.bincount(torch.stack(tokens)[:, 2], minlength=model.VOCAB) / 2000
        return p.tolist(), counts.tolist()

    ((p, counts),) = ranks.run(body, timeout=120)
    assert max(p) > 0.2
    assert counts == pytest.approx(p, abs=0.03)


@pytest.mark.parametrize("redistribute", [None, history.redistribute_now])
def test_training_curves_coincide(redistribute: Any) -> None:
    """cp 1 and cp 2, step by step: reward equal, loss and entropy within 1e-6 (fp64)."""

    def layout_of(cp: int) -> Any:
        return lambda batch: Layout(batch, "thd", "contiguous", cp)

    train = partial(rl.train, dtype=torch.float64)
    alone = ranks.run(train, SMALL, 4, layout_of(1))[0]
    options = {} if redistribute is None else {"redistribute": redistribute}
    for curve in ranks.run(partial(train, **options), SMALL, 4, layout_of(2), cp=2):
        for one, two in zip(alone, curve, strict=True):
            assert one["reward"] == two["reward"]
            assert two["loss"] == pytest.approx(one["loss"], abs=1e-6)
            assert two["entropy"] == pytest.approx(one["entropy"], abs=1e-6)
    assert alone[0]["entropy"] == pytest.approx(math.log(8), abs=0.1)


@pytest.mark.nightly  # notebook 07 shows the same
def test_the_reward_rises() -> None:
    curve = ranks.run(rl.train, rl.Task(), 40, lambda batch: Layout(batch), timeout=300)[0]
    first, last = (sum(step["reward"] for step in part) / 5 for part in (curve[:5], curve[-5:]))
    assert first < 0.3
    assert last > 2 * first


def two_windows(batch: Batch) -> Layout:
    return Layout(batch, cp_split="contiguous", cp_size=2)


def with_the_old(step: str) -> Any:
    old = LINE[step]
    return partial(rl.train, extract=old.extract, redistribute=old.redistribute)


def test_the_old_bug_inside() -> None:
    """The first micro-batch leaves rank 0 without a response row: before #1846 its entropies are None."""
    outcomes = ranks.observe(with_the_old("#1822"), SMALL, 1, two_windows, cp=2, timeout=20)
    assert outcomes[0].summary == "raised: ValueError: sample 0: pieces None, weights [0]"
    assert outcomes[1].summary == "unfinished: in all_reduce, called by sum_and_cut"


def test_zeros_outside_the_graph_keep_a_rank_away_from_the_models_own_collectives() -> None:
    """#1846: rank 0's loss has no way to its logits, so its backward skips the keys' and values' exchange."""
    outcomes = ranks.observe(with_the_old("#1846"), SMALL, 1, two_windows, cp=2, timeout=20, check=True)
    first, second = sorted(outcome.calls[-1].phase for outcome in outcomes)
    assert (first, second) == ("backward", "forward")
    for outcome in outcomes:
        assert outcome.reason.startswith("DivergenceError")
        assert outcome.calls[-1].label == "keys and values"


def test_the_same_training_with_ours() -> None:
    outcomes = ranks.observe(with_the_old("now"), SMALL, 1, two_windows, cp=2, timeout=60, check=True)
    assert [outcome.summary for outcome in outcomes] == ["returned", "returned"]


def test_an_absent_gradient_is_named() -> None:
    def body(me: Rank) -> None:
        model.reduce_gradients(model.build(me), me)

    outcome = ranks.observe(body)[0]
    assert outcome.reason.startswith("RuntimeError: rank 0: no gradient for embedding.word_embeddings.weight")
