"""The None bug on real ranks: each step shows the symptoms that slime's own code showed, on the same batches."""

from typing import Any

import oracle
import pytest
import torch

from refimpl import collectives, history, ranks, slicing
from refimpl.diagrams import describe
from refimpl.layout import Batch, Layout

BATCHES = {
    "all": Layout(Batch([16], [14]), cp_split="contiguous", cp_size=2),
    "one-empty": Layout(Batch([6, 10], [4, 9]), cp_split="contiguous", cp_size=2),
    "each-empty": Layout(Batch([8, 8], [5, 6]), cp_split="contiguous", cp_size=2),
    "other-empty": Layout(Batch([10, 6], [9, 4]), cp_split="contiguous", cp_size=2),
    "rank-empty": Layout(Batch([16], [4]), cp_split="contiguous", cp_size=2),
    "tail": Layout(Batch([4, 4], [2, 2]), cp_split="contiguous", cp_size=2, pad_multiple=8),
    "cp 4 rank-empty": Layout(Batch([8, 8], [2, 2]), cp_split="contiguous", cp_size=4),
}
TYPE_ERROR = "raised: TypeError: expected Tensor as element 0 in argument 0, but got NoneType"
HANG = "unfinished: in all_reduce, called by sum_and_cut"
RIGHT = "returned"
BEFORE_1846 = {name: [RIGHT] * layout.cp_size for name, layout in BATCHES.items()} | {
    "rank-empty": [TYPE_ERROR, HANG],
    "tail": [HANG, TYPE_ERROR],
    "cp 4 rank-empty": [TYPE_ERROR, HANG, TYPE_ERROR, HANG],
}


def expected(layout: Layout, rank: int) -> tuple[list[float], list[float]]:
    """By cutting lists: the entropy (a position) that a rank owns under zigzag, and the gradient of its rows."""
    samples = range(len(layout.batch))
    zigzag = Layout(layout.batch, cp_split="zigzag", cp_size=layout.cp_size)
    owned = [float(position) for i in samples for _, position in oracle.response(zigzag, rank, i)]
    scored = {row for i in samples for row, _ in oracle.response(layout, rank, i)}
    return owned, [float(row in scored) for row in range(len(oracle.rows(layout)[rank]))]


def run(extract: Any, redistribute: Any, layout: Layout) -> list[ranks.Outcome]:
    return ranks.observe(history.step, extract, redistribute, layout, cp=layout.cp_size, timeout=15)


@pytest.mark.parametrize("name", BATCHES)
def test_before_1846(name: str) -> None:
    outcomes = run(history.extract_before_1846, history.redistribute_1822, BATCHES[name])
    assert [outcome.summary for outcome in outcomes] == BEFORE_1846[name]
    if set(BEFORE_1846[name]) == {RIGHT}:  # and then it is right: one None among tensors is healed by the filler
        for rank, outcome in enumerate(outcomes):
            entropies, gradient = outcome.value
            assert (entropies.tolist(), gradient.tolist()) == expected(BATCHES[name], rank)


@pytest.mark.parametrize("name", BATCHES)
def test_after_1846_values_are_right_but_an_empty_rank_has_no_gradient(name: str) -> None:
    for rank, outcome in enumerate(run(history.extract_after_1846, history.redistribute_1822, BATCHES[name])):
        entropies, gradient = outcome.value
        values, ones = expected(BATCHES[name], rank)
        assert entropies.tolist() == values
        assert gradient is None if not any(ones) else gradient.tolist() == ones


@pytest.mark.parametrize("name", BATCHES)
def test_aligned_is_right_and_an_empty_rank_has_a_zero_gradient(name: str) -> None:
    for rank, outcome in enumerate(run(slicing.extract, collectives.redistribute, BATCHES[name])):
        entropies, gradient = outcome.value
        assert (entropies.tolist(), gradient.tolist()) == expected(BATCHES[name], rank)


def test_zeros_outside_the_graph_make_a_difference() -> None:
    """#1846's zeros in a redistribution that pads every piece: the empty rank is cut off again."""
    layout = BATCHES["rank-empty"]
    outcomes = run(history.extract_after_1846, collectives.redistribute, layout)
    assert outcomes[0].summary != RIGHT  # its loss has no gradient at all: "does not require grad"
    assert "does not require grad" in outcomes[0].reason


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


def test_the_unused_parameter_is_unused() -> None:
    layout = BATCHES["all"]
    log_prob, entropy = history.buffers(layout, 0)
    with_tokens = history.extract_before_1846(log_prob, entropy, layout, 0, [torch.arange(16)])
    without = history.extract_before_1846(log_prob, entropy, layout, 0)
    assert [p.tolist() for p in with_tokens[0]] == [p.tolist() for p in without[0]]


def test_the_redistribution_takes_any_number_of_samples() -> None:
    def none(me: ranks.Rank) -> list[torch.Tensor]:
        return collectives.redistribute(
            [], Layout(Batch([], []), cp_split="contiguous", cp_size=2), me.cp_rank, me.cp_group
        )

    assert ranks.run(none, cp=2) == [[], []]


def test_a_piece_that_does_not_fit_is_an_error() -> None:
    def bad(me: ranks.Rank, layout: Layout) -> None:
        collectives.redistribute([torch.ones(3)], layout, me.cp_rank, me.cp_group)

    contiguous = Layout(Batch([16], [4]), cp_split="contiguous", cp_size=2)
    for layout in (contiguous, Layout(Batch([16], [4]), cp_size=2)):
        for outcome in ranks.observe(bad, layout, cp=2):
            assert outcome.reason.startswith("ValueError: sample 0: a piece of shape [3] does not fit rank")
