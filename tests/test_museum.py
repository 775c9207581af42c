"""The exhibits: what each side does, by hand; and the mysteries, each of whose wrong answers is refused."""

import math
from typing import Any

import pytest

import museum

HANG, TYPE_ERROR = (
    "unfinished: in all_reduce, called by returns_early",
    "raised: TypeError: expected Tensor as element 0",
)
BY_HAND: dict[str, tuple[Any, Any]] = {
    "rolled after the split": ([1, 6, 7, 0], [1, 2, 7, -100]),
    "shifted after packing": ([1, 2, 0, 1, 0], [1, 2, -100, 1, -100]),
    "token rows for logit rows": ([6, 7], [5, 6]),
    "no prompt": ([[0, 1], [2, 3, 4, 5]], ValueError),
    "the last none": ([1, 2, 3, 4, 5], []),
    "None in the list": ([TYPE_ERROR, "unfinished: in all_reduce"], [[0.0] * 8, [0, 0, 0, 1, 1, 1, 1, 0]]),
    "zeros that ask": (
        [[0, 1, 0, 0, 0, 0, 1, 1], "unfinished: in all_reduce, called by train, in backward"],
        [[0, 1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]],
    ),
    "an early return": ([0.0, HANG], [5.0, 5.0]),
    "0 times infinity, for the graph": (math.nan, 0.0),
    "0 times infinity, in the entropy": (math.nan, [round(math.log(2), 4)]),
    "a gradient at p = 0": ([0.0, math.nan], [0.0, 0.0]),
    # log-sum-exp of 5 times -15 and -12: -12 + log(1 + 5 e^-3); with two zeros more: log(2 + ...)
    "the last tile": (
        round(-12 - math.log(2 + math.exp(-12) + 5 * math.exp(-15)), 4),
        round(-math.log(1 + 5 * math.exp(-3)), 4),
    ),
    "padded columns": ([round(-math.log(6), 4)], [round(-math.log(5), 4)]),
    "every row scaled by row 0": ([0.0, 0.0], [0.0, 1.0]),
    "twice the gradient": ([[2.0, 2.0], [2.0, 2.0]], [[1.0, 1.0], [1.0, 1.0]]),
    "a slice per sample": ("4 times [T, V] for 4 samples", "1 times [T, V] for 4 samples"),
    "an offset of 32 bits": (20_000 * 151_936 - 2**32, 20_000 * 151_936),
    "a mean over nothing": (math.nan, 0.0),
    # 5 tokens padded to 8, chunks of 2: of the scoring positions 0 to 3 rank 0 holds 0 and 1, rank 1 holds 2 and 3
    "the shard's own tokens": ([[0.5, 0.5], [0.5, 0.5]], [[0.25, 0.25], [0.25, 0.25]]),
}


def same(got: Any, want: Any) -> bool:
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, str):
        return bool(got.startswith(want))
    return bool(got == want or (math.isnan(got) and math.isnan(want)))


@pytest.mark.parametrize("name", museum.EXHIBITS)
def test_both_sides_by_hand(name: str) -> None:
    exhibit = museum.EXHIBITS[name]
    for side, want in zip((exhibit.old, exhibit.new), BY_HAND[name], strict=True):
        if isinstance(want, type):
            with pytest.raises(want):
                side()
        else:
            assert same(side(), want), side()
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
    museum.reveal("rolled after the split", [1, 6, 7, 0])
    museum.reveal("rolled after the split", [1, 2, 7, 0])
    assert capsys.readouterr().out.splitlines()[4::5] == ["as you predicted", "not what you predicted"]
