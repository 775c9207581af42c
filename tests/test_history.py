"""The bug's line on real ranks: each step shows the symptoms that slime's own code showed, on the same batches."""

from functools import cache
from typing import Any

import oracle
import pytest
import torch

from refimpl import history, ranks, slicing
from refimpl.diagrams import describe
from refimpl.history import LINE, Step, Trained
from refimpl.layout import Batch, Layout
from refimpl.ranks import Outcome, Rank
from refimpl.recorder import first_difference

BATCHES = {
    "all": Layout(Batch([16], [14]), cp_split="contiguous", cp_size=2),
    "one-empty": Layout(Batch([6, 10], [4, 9]), cp_split="contiguous", cp_size=2),
    "each-empty": Layout(Batch([8, 8], [5, 6]), cp_split="contiguous", cp_size=2),
    "other-empty": Layout(Batch([10, 6], [9, 4]), cp_split="contiguous", cp_size=2),
    "rank-empty": Layout(Batch([16], [4]), cp_split="contiguous", cp_size=2),
    "tail": Layout(Batch([4, 4], [2, 2]), cp_split="contiguous", cp_size=2, pad_multiple=8),
    "cp 4 rank-empty": Layout(Batch([8, 8], [2, 2]), cp_split="contiguous", cp_size=4),
}
R, A, T = (
    "right",
    "AttributeError: 'NoneType' object has no attribute 'dtype'",
    "TypeError: expected Tensor as element 0",
)
F, B, W = "hangs in forward", "hangs in backward", "wrong gradient"
RIGHT: dict[str, list[str]] = {name: [R] * layout.cp_size for name, layout in BATCHES.items()}
KEYWORD = "TypeError: extract_after_1846() got an unexpected keyword argument 'with_entropy_grad'"
FIRST = {"one-empty": [F, A], "each-empty": [A, A], "other-empty": [A, F], "rank-empty": [A, F], "tail": [F, A]}
FIRST |= {"cp 4 rank-empty": [A] * 4}
SECOND = {"rank-empty": [T, F], "tail": [F, T], "cp 4 rank-empty": [T, F, T, F]}
UNWEIGHTED = {"one-empty": [W, B], "other-empty": [B, W], "rank-empty": [B, W], "tail": [W, B]}
SYMPTOMS = {  # (step, coefficient) -> batch -> what each rank shows, as measured with slime's own code
    **{("#1788", c): RIGHT | FIRST for c in (0.0, 0.01)},
    **{("#1822", c): RIGHT | SECOND for c in (0.0, 0.01)},
    **{("#1846", c): RIGHT for c in (0.0, 0.01)},
    **{("#2152", c): {name: [KEYWORD] * layout.cp_size for name, layout in BATCHES.items()} for c in (0.0, 0.01)},
    ("#2153", 0.0): RIGHT | UNWEIGHTED,
    ("#2153", 0.01): RIGHT,
    **{(name, c): RIGHT for name in ("#2123", "now") for c in (0.0, 0.01)},
}


@cache
def expected(layout: Layout, rank: int) -> tuple[list[float], list[float]]:
    """By cutting lists: the entropy (a position) that a rank owns under zigzag, and which of its rows are scored."""
    samples = range(len(layout.batch))
    zigzag = Layout(layout.batch, cp_split="zigzag", cp_size=layout.cp_size)
    owned = [float(position) for i in samples for _, position in oracle.response(zigzag, rank, i)]
    scored = {row for i in samples for row, _ in oracle.response(layout, rank, i)}
    return owned, [float(row in scored) for row in range(len(oracle.rows(layout)[rank]))]


def observe(step: Step, layout: Layout, coefficient: float, **options: Any) -> list[Outcome]:
    run = {name: options.pop(name) for name in ("tp", "check") if name in options}
    timeout = options.pop("timeout", 3)
    train = (history.train, step, layout, coefficient, options.get("keep_graph", False))
    return ranks.observe(*train, cp=layout.cp_size, timeout=timeout, **run)


def symptom(outcome: Outcome, layout: Layout, cp_rank: int, coefficient: float) -> str:
    """One word for how a rank fared; right means the values, and every gradient that is there."""
    if outcome.status == "unfinished":
        assert outcome.reason.startswith("in all_"), outcome.reason
        return B if outcome.reason.endswith("in backward") else F
    if outcome.status != "returned":
        return next((known for known in (A, T, KEYWORD) if outcome.reason.startswith(known)), outcome.summary)
    trained: Trained = outcome.value
    owned, scored = expected(layout, cp_rank)
    assert torch.cat(trained.entropies).tolist() == owned
    for gradient, factor in ((trained.of_log_prob, 1), (trained.of_entropy, coefficient)):
        if gradient is not None and gradient.tolist() != [factor * one for one in scored]:
            return W
    return R


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("step", "coefficient"), SYMPTOMS)
def test_each_step_shows_its_symptoms(step: str, coefficient: float, batch: str) -> None:
    layout = BATCHES[batch]
    outcomes = observe(LINE[step], layout, coefficient)
    shown = [symptom(outcome, layout, rank, coefficient) for rank, outcome in enumerate(outcomes)]
    assert shown == SYMPTOMS[step, coefficient][batch]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("step", ["#1846", "#2123", "now"])
def test_a_rank_that_holds_nothing_has_no_gradient_or_zeros(step: str, batch: str) -> None:
    """None as long as the redistribution puts fresh zeros in the place of an empty piece; zeros where it does not."""
    for rank, outcome in enumerate(observe(LINE[step], BATCHES[batch], 0.01)):
        _, scored = expected(BATCHES[batch], rank)
        for gradient in (outcome.value.of_log_prob, outcome.value.of_entropy):
            absent = step != "now" and not any(scored)
            assert gradient is None if absent else gradient is not None


@pytest.mark.parametrize(
    ("step", "asks"), [("#1788", False), ("#1822", True), ("#1846", True), ("#2153", False), ("#2123", False)]
)
def test_whether_the_entropy_asks_for_a_gradient_at_coefficient_0(step: str, asks: bool) -> None:
    for outcome in observe(LINE[step], BATCHES["all"], 0.0):
        assert (outcome.value.of_entropy is not None) == asks
    for outcome in observe(LINE[step], BATCHES["all"], -0.01):
        assert outcome.value.of_entropy is not None


def test_wrong_in_silence_then_hanging() -> None:
    """#2153 on one-empty: rank 0's only backward reduce pairs with one more on rank 1, and it returns, wrong."""
    outcomes = observe(LINE["#2153"], BATCHES["one-empty"], 0.0)
    backward = [[call.label for call in outcome.calls if call.phase == "backward"] for outcome in outcomes]
    assert backward == [["log-prob"], ["entropy", "log-prob"]]
    # by hand: of rank 0's scored rows 1-4, 6, 7 the rows 1, 6, 7 are its own under zigzag, the rest rank 1 counts
    assert outcomes[0].value.of_log_prob.tolist() == [0, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("batch", [name for name in BATCHES if name not in UNWEIGHTED])
def test_2153_is_right_where_all_or_none_lack_something(batch: str) -> None:
    lacks = [any(not oracle.response(BATCHES[batch], rank, i) for i in range(len(BATCHES[batch].batch)))
             for rank in range(BATCHES[batch].cp_size)]  # fmt: skip
    assert len(set(lacks)) == 1


MIX = Step(history.extract_before_1846, history.redistribute_1822, if_weighted=True)
FILLER_ONLY = Step(history.extract_after_1846, history.redistribute_2123, if_weighted=True)
SLICE_ONLY = Step(slicing.extract, history.redistribute_1822, if_weighted=True)


def test_1822_needed_the_gradient_of_the_entropy() -> None:
    """Its way with None, but #1788's entropy without gradient: hangs in backward, as #2153 does."""
    layout = BATCHES["one-empty"]
    outcomes = observe(MIX, layout, 0.0)
    assert [symptom(outcome, layout, rank, 0.0) for rank, outcome in enumerate(outcomes)] == [W, B]


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_2123_needed_both_halves(coefficient: float) -> None:
    layout = BATCHES["rank-empty"]
    outcomes = observe(FILLER_ONLY, layout, coefficient, keep_graph=True)
    assert [symptom(o, layout, r, coefficient) for r, o in enumerate(outcomes)] == [R, B]
    outcomes = observe(SLICE_ONLY, layout, coefficient, keep_graph=True)
    assert [symptom(o, layout, r, coefficient) for r, o in enumerate(outcomes)] == (
        [B, W] if not coefficient else [R, R]
    )


def two_micro_batches(me: Rank, step: Step, layouts: list[Layout]) -> None:
    for number, layout in enumerate(layouts):
        history.train(me, step, layout, 0.0)
        print("done with micro-batch", number)


def test_the_late_reduce_meets_the_next_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same size: it pairs with the peer's next forward, and both ranks get past micro-batch 0."""
    layout = BATCHES["one-empty"]
    outcomes = ranks.observe(two_micro_batches, LINE["#2153"], [layout, layout], cp=2, timeout=3)
    said = capsys.readouterr().out.splitlines()
    assert {"[rank 0] done with micro-batch 0", "[rank 1] done with micro-batch 0"} <= set(said)
    assert "unfinished" in {outcome.status for outcome in outcomes}
    other = BATCHES["rank-empty"]  # 4 response tokens against 13: gloo notices
    outcomes = ranks.observe(two_micro_batches, LINE["#2153"], [layout, other], cp=2, timeout=3)
    assert "returned" not in {outcome.status for outcome in outcomes}
    assert "raised" in {outcome.status for outcome in outcomes} or "died" in {outcome.status for outcome in outcomes}


def test_tp_makes_no_difference() -> None:
    layout = BATCHES["one-empty"]
    outcomes = observe(LINE["#2153"], layout, 0.0, tp=2)
    assert [symptom(outcome, layout, rank // 2, 0.0) for rank, outcome in enumerate(outcomes)] == [W, W, B, B]


@pytest.mark.parametrize("batch", UNWEIGHTED)
def test_the_check_fails_at_once_and_by_name(batch: str) -> None:
    for outcome in observe(LINE["#2153"], BATCHES[batch], 0.0, check=True, timeout=30):
        assert outcome.reason.startswith("DivergenceError")
        assert "backward all_reduce" in outcome.reason


@pytest.mark.parametrize(("step", "calls"), [("#2123", 2), ("now", 1)])
def test_how_many_collectives(step: str, calls: int) -> None:
    for layout in BATCHES.values():
        outcomes = observe(LINE[step], layout, 0.01)
        assert first_difference(ranks.records(outcomes)) is None
        for outcome in outcomes:
            assert [c.phase for c in outcome.calls] == ["forward"] * calls + ["backward"] * calls


# ---------------------------------------------------------------- the extractions, without ranks


@pytest.mark.parametrize(
    ("extract", "with_entropy", "without"),
    [
        (history.extract_before_1846, [["4 rows, grad", "2 rows, grad"], ["None", "7 rows, grad"]], ["None", "None"]),
        (history.extract_after_1846, [["4 rows, grad", "2 rows, grad"], ["0 rows, no grad", "7 rows, grad"]], []),
        (slicing.extract, [["4 rows, grad", "2 rows, grad"], ["0 rows, grad", "7 rows, grad"]], None),
    ],
)
def test_the_entropy_list(extract: Any, with_entropy: list[list[str]], without: list[str] | None) -> None:
    layout = BATCHES["one-empty"]
    for rank in range(2):
        log_prob, entropy = history.buffers(layout, rank)
        assert [describe(piece) for piece in extract(log_prob, entropy, layout, rank)[1]] == with_entropy[rank]
        absent = extract(log_prob, None, layout, rank)[1]
        assert (absent if absent is None else [describe(piece) for piece in absent]) == without


@pytest.mark.parametrize("step", [name for name in LINE if name != "#2152"])
def test_without_entropy_every_step_is_right(step: str) -> None:
    def log_prob_only(me: Rank, layout: Layout) -> tuple[list[float], torch.Tensor | None]:
        log_prob, _ = history.buffers(layout, me.cp_rank)
        keys = LINE[step].extract(log_prob, None, layout, me.cp_rank)[:1]
        moved = torch.cat(LINE[step].redistribute(keys, layout, me.cp_rank, me.cp_group)[0])
        moved.sum().backward()  # type: ignore[no-untyped-call]
        return moved.tolist(), log_prob.grad

    for layout in BATCHES.values():
        for rank, (values, gradient) in enumerate(ranks.run(log_prob_only, layout, cp=layout.cp_size)):
            owned, scored = expected(layout, rank)
            assert values == [-position for position in owned]
            assert gradient is None if gradient is None and not any(scored) else gradient.tolist() == scored


def test_before_1788_the_values_are_the_same_but_each_sample_costs_a_whole_gradient() -> None:
    layout = Layout(Batch([6, 10], [4, 9]), cp_split="contiguous", cp_size=2)
    logits = torch.sin(torch.arange(8.0 * 5)).view(8, 5).double().requires_grad_()
    tokens = [torch.arange(6) * 2 % 5, torch.arange(10) * 3 % 5]
    goals = torch.tensor([2, 4, 1, 3, 0, -1, 3, 1])  # rank 0: A0 to A5 and B0, B1; each row's is the next token
    log_p = torch.log_softmax(logits.detach(), 1)
    rows = [[row for row, _ in oracle.response(layout, 0, i)] for i in range(2)]
    log_probs, entropies = history.extract_before_1788(logits, tokens, layout, 0)
    for i, own in enumerate(rows):
        assert torch.allclose(log_probs[i], log_p[own, goals[own]])
        assert torch.allclose(entropies[i], -(log_p.exp() * log_p).sum(1)[own])
    full: list[int] = []
    for piece in log_probs:  # what each slice sends back: a gradient of all rows, not only its own
        (gradient,) = torch.autograd.grad(piece.sum(), logits, retain_graph=True)
        full.append(gradient.numel())
    assert full == [8 * 5, 8 * 5]


def test_the_unused_parameter_is_unused() -> None:
    layout = BATCHES["all"]
    log_prob, entropy = history.buffers(layout, 0)
    with_tokens = history.extract_before_1846(log_prob, entropy, layout, 0, [torch.arange(16)])
    without = history.extract_before_1846(log_prob, entropy, layout, 0)
    assert [p.tolist() for p in with_tokens[0]] == [p.tolist() for p in without[0]]


def test_zeros_outside_the_graph_make_a_difference() -> None:
    """#1846's zeros in a redistribution without fillers: the empty rank is cut off, and its backward cannot start."""
    outcomes = observe(Step(history.extract_after_1846, history.redistribute_now), BATCHES["rank-empty"], 1.0)
    assert "does not require grad" in outcomes[0].reason
