"""Means and the policy loss: by hand, the same under every layout, and each mistake of normalisation caught."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bugs import NORMALISATIONS
from refimpl import ranks, slicing
from refimpl.entropy import log_prob_and_entropy
from refimpl.layout import Batch, Layout
from refimpl.loss import group_advantages, policy_loss, token_weights, weighted_sum
from refimpl.ranks import Rank

BATCH = Batch([5, 2, 7, 4], [3, 1, 4, 2])
MASKS = [torch.tensor(m) for m in ([1, 0, 1], [1], [1, 1, 1, 0], [0, 0])]  # 2, 1, 3 and no token count
LAYOUTS = [
    Layout(BATCH),
    Layout(BATCH, "bshd"),
    *(Layout(BATCH, qkv, split, cp) for qkv in ("thd", "bshd") for split in ("zigzag", "contiguous") for cp in (2, 4)),
]
"""The ten layouts of one batch."""


ONE = torch.ones(1)


def test_weights_by_hand() -> None:
    layout = Layout(BATCH)
    per_sample = token_weights(MASKS, layout, 0, per="sample", dtype=torch.float64)
    assert [w.tolist() for w in per_sample] == [
        pytest.approx([1 / 8, 0, 1 / 8]),
        [1 / 4],
        pytest.approx([1 / 12, 1 / 12, 1 / 12, 0]),
        [0, 0],
    ]
    per_token = token_weights(MASKS, layout, 0, per="token", dtype=torch.float64)
    assert [w.tolist() for w in per_token] == [
        pytest.approx(x) for x in ([1 / 6, 0, 1 / 6], [1 / 6], [1 / 6, 1 / 6, 1 / 6, 0], [0, 0])
    ]
    of_ten = token_weights(MASKS, layout, 0, per="token", count=10, dtype=torch.float64)
    assert sum(float(w.sum()) for w in of_ten) == pytest.approx(6 / 10)
    samples = token_weights(MASKS, layout, 0, per="sample", count=8, dtype=torch.float64)
    assert samples[1].tolist() == [1 / 8]


def test_weights_of_a_long_response_in_half_precision() -> None:
    layout = Layout(Batch([70_001], [70_000]))
    (weights,) = token_weights([torch.ones(70_000)], layout, 0, per="token", dtype=torch.float16)
    assert weights.dtype == torch.float16
    assert float(weights[0]) == pytest.approx(1 / 70_000, rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("per", ["sample", "token"])
def test_the_mean_does_not_depend_on_the_layout(layout: Layout, per: Any) -> None:
    """The value of a response token is 100 * sample + position of its row; the shares of all ranks sum to the mean."""
    values = {(i, p): 100.0 * i + p for i, n in enumerate(BATCH.total_lengths) for p in range(n)}
    counted = {  # (sample, predicting position) of the tokens that count, by hand from MASKS
        0: [1, 3],
        1: [0],
        2: [2, 3, 4],
        3: [],
    }
    means = [sum(values[i, p] for p in ps) / max(1, len(ps)) for i, ps in counted.items()]
    want = sum(means) / 4 if per == "sample" else sum(values[i, p] for i, ps in counted.items() for p in ps) / 6
    positions = [100 * i + torch.arange(n) for i, n in enumerate(BATCH.total_lengths)]
    total = 0.0
    for rank in range(layout.cp_size):
        buffer = slicing.local_tokens(positions, layout, rank).double()
        weights = token_weights(MASKS, layout, rank, per=per, dtype=torch.float64)
        total += float(weighted_sum(slicing.response_pieces(buffer, layout, rank), weights))
    assert total == pytest.approx(want, abs=1e-12)


def test_micro_batches_add_up() -> None:
    """With the global count the shares of two micro-batches sum to the mean of both; with their own count not."""
    halves = [(Batch([5, 2], [3, 1]), MASKS[:2]), (Batch([7, 4], [4, 2]), MASKS[2:])]
    shares = []
    for batch, masks in halves:
        layout = Layout(batch)
        pieces = slicing.response_pieces(torch.arange(float(layout.rows)), layout, 0)
        shares.append(weighted_sum(pieces, token_weights(masks, layout, 0, per="token", count=6)))
    # rows: sample 0 at 0-4 (scored 1, 2, 3), 1 at 5-6 (5); then 2 at 0-6 (2-5), 3 at 7-10; counting: 1 3 5 and 2 3 4
    assert float(sum(shares)) == pytest.approx((1 + 3 + 5 + 2 + 3 + 4) / 6)


def test_all_masked_is_zero_and_attached() -> None:
    for layout in LAYOUTS:
        for rank in range(layout.cp_size):
            buffer = torch.full((layout.rows,), torch.nan, requires_grad=True)
            masks = [torch.zeros(n) for n in BATCH.response_lengths]
            weights = token_weights(masks, layout, rank, per="token")
            share = weighted_sum(slicing.response_pieces(buffer, layout, rank), weights)
            share.backward()  # type: ignore[no-untyped-call]
            assert share.item() == 0
            assert buffer.grad is not None
            assert buffer.grad.tolist() == [0] * layout.rows


def test_a_masked_token_does_no_harm_whatever_its_value() -> None:
    new = torch.tensor([0.5, torch.inf, -torch.inf, torch.nan, 200.0], requires_grad=True)
    old = torch.tensor([0.5, 0.0, -torch.inf, 0.0, -200.0])
    entropies = torch.tensor([1.0, torch.nan, torch.inf, 0.0, 0.0], requires_grad=True)
    weights = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    loss = policy_loss([new], [old], [2.0], [weights], entropies=[entropies], entropy_coefficient=0.1)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(-2 - 0.1)
    assert new.grad is not None
    assert entropies.grad is not None
    assert new.grad.tolist() == [-2, 0, 0, 0, 0]
    assert entropies.grad.tolist() == [pytest.approx(-0.1), 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [  # by hand: -min(r A, clamp(r, 0.8, 1.2) A); where the clamp wins the gradient is 0, else -r A
        (1.0, 3.0, -3.0, -3.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_ppo_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    one = [torch.ones(1, dtype=torch.float64)]
    got = policy_loss([new], [torch.zeros(1, dtype=torch.float64)], [advantage], one)
    got.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert (got.item(), new.grad.item()) == (pytest.approx(loss), pytest.approx(gradient))


def test_the_clip_is_the_callers() -> None:
    new = torch.tensor([math.log(1.5)])
    assert policy_loss([new], [torch.zeros(1)], [1.0], [ONE], clip=0.4).item() == pytest.approx(-1.4)


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_no_ratio_is_infinite(advantage: float) -> None:
    new = torch.tensor([100.0], requires_grad=True)
    loss = policy_loss([new], [torch.zeros(1)], [advantage], [ONE])
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx({1.0: -1.2, 0.0: 0.0, -1.0: math.exp(20)}[advantage])
    assert new.grad is not None
    assert new.grad.tolist() == [0.0]


@pytest.mark.parametrize(("count", "reward"), [(3, 1000.1), (7, 0.7), (1, 5.0)])
def test_equal_rewards_are_no_advantage(count: int, reward: float) -> None:
    assert group_advantages(torch.full((1, count), reward)).tolist() == [[0.0] * count]


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 4.0]], dtype=torch.float64)
    root3 = 3**0.5  # mean 1, squares 1 1 1 9, deviation sqrt(3)
    want = [[1, -1, -1, 1], [0, 0, 0, 0], [-1 / root3, -1 / root3, -1 / root3, 3 / root3]]
    assert group_advantages(rewards).tolist() == [pytest.approx(row, abs=1e-5) for row in want]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_weights(MASKS[:2], Layout(BATCH), 0, per="token"), r"masks of shapes \[\[3\], \[1\]\] for resp"),
        (lambda: token_weights([*MASKS[:3], torch.ones(3)], Layout(BATCH), 0, per="token"), "masks of shapes"),
        (lambda: token_weights(MASKS, Layout(BATCH), 0, per="rank"), "per 'rank'"),  # type: ignore[arg-type]
        (lambda: token_weights(MASKS, Layout(BATCH), 0, per="token", count=0), "count 0"),
        (lambda: policy_loss([], [], [], [], entropy_coefficient=0.1), "entropy_coefficient 0.1 without entropies"),
        (lambda: token_weights(MASKS, Layout(BATCH), 0, per="token", count=-3), "count -3"),
        (lambda: policy_loss([], [], [], []), "a loss of no sample"),
        (lambda: policy_loss([ONE, ONE], [ONE], [1.0, 1.0], [ONE, ONE]), "sample 1: old_log_probs no piece, weights"),
        (lambda: policy_loss([ONE], [ONE], [1.0], [torch.ones(3)]), r"sample 0: log_probs \[1\], weights \[3\]"),
        (lambda: weighted_sum([torch.ones(2), ONE], [ONE, torch.ones(2)]), r"sample 0: pieces \[2\], weights \[1\]"),
        (
            lambda: policy_loss([ONE], [ONE], [1.0], [ONE], entropies=[torch.ones(2)], entropy_coefficient=1.0),
            r"sample 0: pieces \[2\], weights \[1\]",
        ),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------- one loss by hand, on ranks

VOCAB = 4
"""All logits are 0: a log-prob is -log 4, an entropy log 4, and the entropy's gradient 0."""
HAND = Batch([5, 3], [3, 1])
ADVANTAGES = [1.0, -1.0]
COEFFICIENT = 0.5


def by_hand(layout: Layout, rank: int, tokens: list[list[int]]) -> list[list[float]]:
    """The gradient of each row: weight * A * (1/4 - onehot) at a predicting row, else 0."""
    import oracle

    rows = []
    for cell in oracle.rows(layout)[rank]:
        gradient = [0.0] * VOCAB
        if cell is not None:
            sample, position = cell
            total, response = HAND.total_lengths[sample], HAND.response_lengths[sample]
            if total - response - 1 <= position < total - 1:
                weight = 1 / response / 2
                for column in range(VOCAB):
                    onehot = float(column == tokens[sample][position + 1])
                    gradient[column] = weight * ADVANTAGES[sample] * (0.25 - onehot)
        rows.append(gradient)
    return rows


def share(me: Rank, layout: Layout, tokens: list[Tensor], name: str) -> tuple[float, Tensor]:
    """One rank's part of the loss, and the gradient of its logits."""
    width = VOCAB // me.tp_size
    logits = torch.zeros(layout.rows, width, dtype=torch.float64, requires_grad=True)
    goals = slicing.targets(tokens, layout, me.cp_rank)
    start = width * me.tp_rank
    log_prob, entropy = log_prob_and_entropy(logits, goals, tp_group=me.tp_group, vocab_start=start)
    log_probs, entropies = slicing.extract(log_prob, entropy, layout, me.cp_rank)
    masks = [torch.ones(n) for n in HAND.response_lengths]
    rule = NORMALISATIONS[name]
    weights = rule.weights(masks, layout, me.cp_rank)
    old = [piece.detach() for piece in log_probs]
    mine = policy_loss(log_probs, old, ADVANTAGES, weights, entropies=entropies, entropy_coefficient=COEFFICIENT)
    rule.loss(mine, me.cp_group).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return mine.item(), logits.grad


GRID = [(tp, layout) for tp in (1, 2) for layout in (Layout(HAND, q, s, c) for q in ("thd", "bshd")
        for s in ("zigzag", "contiguous") for c in (1, 2, 4))]  # fmt: skip


@pytest.mark.parametrize(("tp", "layout"), GRID, ids=lambda x: f"tp {x}" if isinstance(x, int) else str(x))
def test_one_loss_by_hand_on_every_layout(tp: int, layout: Layout) -> None:
    tokens = [[0, 1, 2, 3, 1], [2, 0, 3]]
    outcomes = ranks.run(share, layout, [torch.tensor(t) for t in tokens], "share", tp=tp, cp=layout.cp_size)
    # ratio is 1, so the surrogate is -A: -(1 - 1) / 2 = 0 in all; the entropy is log 4 everywhere
    loss = sum(value for value, _ in outcomes) / tp
    assert loss == pytest.approx(-COEFFICIENT * math.log(4), abs=1e-12)
    for rank, (_, gradient) in enumerate(outcomes):
        start = VOCAB // tp * (rank % tp)
        want = [row[start : start + VOCAB // tp] for row in by_hand(layout, rank // tp, tokens)]
        assert torch.allclose(gradient, torch.tensor(want, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("share", True),
        ("sum, then a replicated loss", True),
        ("times cp_size, then averaged", True),
        ("divided by the shard's own tokens", False),
        ("sum with the other convention", False),
        ("averaged over CP", False),
    ],
)
def test_each_mistake_of_normalisation_shows(name: str, right: bool) -> None:
    layout, tokens = Layout(HAND, cp_size=2), [[0, 1, 2, 3, 1], [2, 0, 3]]
    outcomes = ranks.run(share, layout, [torch.tensor(t) for t in tokens], name, cp=2)
    want = [torch.tensor(by_hand(layout, rank, tokens), dtype=torch.float64) for rank in range(2)]
    same = all(torch.allclose(gradient, w) for (_, gradient), w in zip(outcomes, want, strict=True))
    assert same == right
    if name == "sum with the other convention":
        assert all(torch.allclose(gradient, 2 * w) for (_, gradient), w in zip(outcomes, want, strict=True))
