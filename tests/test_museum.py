"""The exhibits: what each side does, by hand; and the mysteries, each of whose wrong answers is refused."""

import math
import re
from functools import cache
from typing import Any

import pytest
import torch

import bugs
import kinds
import museum
from refimpl import check
from refimpl.candidate import Finding
from refimpl.collectives import all_reduce

HANG, TYPE_ERROR = (
    "unfinished: in all_reduce, called by mean_over_ranks",
    "raised: TypeError: expected Tensor as element 0",
)
BY_HAND: dict[str, tuple[Any, Any]] = {
    "rolled after the split": ([1, 6, 7, -100], [1, 2, 7, -100]),
    "shifted after packing": ([1, 2, 0, 1, -100], [1, 2, -100, 1, -100]),
    "token rows for logit rows": ([[6, 7]], [[5, 6]]),
    "no prompt": ([[0, 1], [2, 3, 4, 5]], "ValueError: sample 1: total_length 4, response_length 4"),
    "the last none": ([[0, 1, 2, 3]], [[]]),
    "None in the list": ([TYPE_ERROR, "unfinished: in all_reduce"], [[0.0] * 8, [0, 0, 0, 1, 1, 1, 1, 0]]),
    "zeros that ask": (
        [[0, 1, 0, 0, 0, 0, 1, 1], "unfinished: in all_reduce, called by train, in backward"],
        [[0, 1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]],
    ),
    "an early return": ([0.0, HANG], [5.0, 5.0]),
    "kept in the graph": ([math.nan], [1.0]),
    "p log p": ([math.nan], [round(math.log(2), 4)]),
    "p log p, masked": ([[math.nan, math.nan]], [[0.0, 0.0]]),
    # log-sum-exp of 5 times -15 and -12: -12 + log(1 + 5 e^-3); with two zeros more: log(2 + ...)
    "the last tile": (
        [round(-12 - math.log(2 + math.exp(-12) + 5 * math.exp(-15)), 4)],
        [round(-math.log(1 + 5 * math.exp(-3)), 4)],
    ),
    "padded columns": ([round(-math.log(6), 4)], [round(-math.log(5), 4)]),
    "rows of different weight": ([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.5, -0.5]]),
    "a sum and its backward": ([[0.5, 0.5], [0.5, 0.5]], [[0.25, 0.25], [0.25, 0.25]]),
    "a slice per sample": (4, 1),
    "an offset of 32 bits": (
        f"RuntimeError: Tensor: invalid storage offset {2**31 - 2**32}",
        [round(-math.log(2), 4)] * 2,
    ),
    # 5 tokens in windows of 3: rank 0 holds the scoring positions 0 to 2, rank 1 position 3
    "a mean of own labels": ([[math.nan] * 3, [1.0]], [[0.0] * 3, [1.0]]),
    # chunks of 1: of the scoring positions 0 to 2 rank 0 holds 0, rank 1 holds 1 and 2
    "the shard's own tokens": ([[1.0], [0.5, 0.5]], [[0.3333], [0.3333, 0.3333]]),
}


def same(got: Any, want: Any) -> bool:
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, str):
        return bool(got.startswith(want))
    return bool(got == want or (math.isnan(got) and math.isnan(want)))


@pytest.mark.parametrize("name", museum.EXHIBITS)
def test_both_sides_by_hand(name: str) -> None:
    for side, want in zip(("old", "new"), BY_HAND[name], strict=True):
        got = museum.outcome(museum.EXHIBITS[name], side)
        assert same(got, want), got
    assert str(BY_HAND[name][0]) != str(BY_HAND[name][1])


def test_there_are_exhibits_of_all_kinds() -> None:
    kinds = " ".join(exhibit.kind for exhibit in museum.EXHIBITS.values())
    assert len(museum.EXHIBITS) >= 12
    assert all(kind in kinds for kind in ("crash", "hang", "silent wrong number", "memory"))
    assert all(exhibit.link.startswith("https://github.com/") for exhibit in museum.EXHIBITS.values())


@pytest.mark.parametrize("name", museum.MYSTERIES)
def test_the_mysteries(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    museum.report(name)
    assert capsys.readouterr().out.count("\n") > 3
    for cause in (None, 1, 2, 3):
        museum.solve(name, cause)
    said = capsys.readouterr().out
    assert said.startswith("not answered yet\n")
    assert said.count("no: with that the report would look different") == 2
    assert said.count("right: ") == 1
    assert "caught by:" in said


def test_a_prediction_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    museum.reveal("rolled after the split", [1, 6, 7, -100])
    assert capsys.readouterr().out.splitlines()[2] == "as you predicted"


@pytest.mark.parametrize(
    ("prediction", "seen", "same"),
    [
        ([1, 2], [[1], [2]], True),
        (-12.7, [-12.6932], True),
        (math.nan, [math.nan], True),
        (["nan", 0], [math.nan, 0.0], True),
        ((1, 2), [1, 3], False),
        ([1], [1, 1], False),
        (0, [math.nan], False),
        (4, 4, True),
        ("rank 0 crashes", ["raised: TypeError"], None),
        (-(2**31), "RuntimeError: invalid storage offset -2147483648", None),
        ([[0, 1], 0], [[0, 1], "unfinished: in all_reduce"], None),
    ],
)
def test_numbers_are_compared_and_words_are_not(prediction: Any, seen: Any, same: bool | None) -> None:
    verdicts = {True: "as you predicted", False: "not what you predicted", None: "compare it with what you predicted"}
    assert museum.compare(prediction, seen) == verdicts[same]


# ---------------------------------------------------------------- behind the grader


@cache
def report(kind: Any, fn: Any) -> check.Report:
    return check.grade(kind, fn)


def broken(of: check.Report) -> dict[str, Finding]:
    return {clause: finding for clause, finding in of.clauses.items() if finding}


@pytest.mark.parametrize("name", museum.EXHIBITS)
def test_the_grader_rejects_the_old_code_for_the_right_clause(name: str) -> None:
    exhibit = museum.EXHIBITS[name]
    found = broken(report(exhibit.graded_as, exhibit.old))
    assert " ".join(found) == exhibit.breaks, found
    right = report(exhibit.graded_as, exhibit.new)
    assert right.ok, str(right)
    assert set(right.seen) == set(right.clauses)


def test_the_smallest_case_is_named() -> None:
    assert museum.first_finding("no prompt") == "input  no prompt: lengths [2] [2]"
    assert museum.first_finding("p log p, masked") == "C7     p log p, masked: a logit of -inf"
    rolled, shifted = museum.first_finding("rolled after the split"), museum.first_finding("shifted after packing")
    assert re.match(r"C2 +rolled after the split: .* CP, cp_size [23]", rolled)  # not without a split
    assert shifted == "C2     shifted after packing: thd, no CP, 2 rows, lengths [1, 1] [0, 0]"  # not with one sample


def twice(values: Any, mask: Any, group: Any) -> Any:
    mean = bugs.mean_over_ranks(values, mask, group)
    return 2 * mean - mean.detach()


def one_row_more(values: Any, mask: Any, group: Any) -> Any:
    more = values[:1].sum() / 10
    return bugs.mean_over_ranks(values, mask, group) + more - more.detach()


def no_gradient(values: Any, mask: Any, group: Any) -> Any:
    return bugs.mean_over_ranks(values.detach(), mask, group).requires_grad_()


def slope_twice(*args: Any) -> Any:
    return tuple(2 * value - value.detach() for value in bugs.unpadded(*args))


def refuses(*_: Any) -> Any:
    raise ValueError("bad")


def late_error(totals: Any, responses: Any) -> Any:
    return [] if max(responses) > max(totals) else bugs.right_rows(totals, responses)


def scaled(value: Any) -> Any:
    value.register_hook(lambda g: g[:1].expand_as(g))
    return value


def no_maximum(x: Any, targets: Any, start: int, size: int, group: Any) -> Any:
    """Exponentials as they are."""
    x = x[:, : max(0, size - start)]
    own = [(t - start, start <= t < start + x.shape[1]) for t in targets.tolist()]
    logit = torch.stack([x[row, t] if here else x[row].sum() * 0 for row, (t, here) in enumerate(own)])
    plogp = torch.where(x.exp() > 0, x.exp() * x, 0)
    sums = all_reduce(torch.stack([x.exp().sum(1), plogp.sum(1), logit]), group, loss="replicated")
    return sums[2] - sums[0].log(), sums[0].log() - sums[1] / sums[0]


def entropy_detached(*args: Any) -> Any:
    pieces, entropies = bugs.all_at_once(*args)
    return pieces, [entropy.detach() for entropy in entropies or []]


@pytest.mark.parametrize(
    ("kind", "wrong", "clauses"),
    [
        (kinds.MEAN, twice, "C8"),
        (kinds.MEAN, one_row_more, "C7"),
        (kinds.MEAN, no_gradient, "C4"),
        (kinds.SHARDS, slope_twice, "C8"),
        (kinds.MEAN, refuses, "C1"),
        (kinds.ROWS, refuses, "C1 input"),
        (kinds.ROWS, late_error, "input"),
        (kinds.FROM_LOGITS, entropy_detached, "C7"),
        (kinds.FROM_LOGITS, lambda *args: [part[:-1] for part in bugs.all_at_once(*args)], "C1"),
        (kinds.FROM_LOGITS, lambda *args: [part[::-1] for part in bugs.all_at_once(*args)], "C7"),
        (kinds.FROM_LOGITS, lambda x, *rest: bugs.all_at_once(x.detach().requires_grad_(), *rest), "C4"),
        (kinds.FROM_LOGITS, lambda x, *rest: bugs.all_at_once(x.detach(), *rest), "C4"),
        (kinds.FROM_LOGITS, lambda *a: [list(map(scaled, part)) for part in bugs.all_at_once(*a)], "C7"),
        (kinds.SHARDS, lambda *args: list(map(scaled, bugs.unpadded(*args))), "C7"),
        (kinds.SHARDS, no_maximum, "C7"),
        (kinds.ROWS, lambda a, b: [torch.tensor(rows) for rows in bugs.right_rows(a, b)], ""),
        (kinds.ROWS, lambda a, b: 3, "C1"),
    ],
)
def test_wrong_answers_of_each_kind(kind: Any, wrong: Any, clauses: str) -> None:
    assert " ".join(broken(report(kind, wrong))) == clauses, str(report(kind, wrong))
