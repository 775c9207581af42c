"""The puzzles: every solution is right, every known mistake is rejected by name, and an empty stub is not wrong yet."""

import math
import sys
from typing import Any

import numpy
import pytest
import torch

import puzzles
import solutions
from refimpl import candidate


def named(name: str, fn: Any) -> Any:
    def answer(*args: Any) -> Any:
        return fn(*args)

    answer.__name__ = name
    return answer


@pytest.mark.parametrize("name", puzzles.PUZZLES)
def test_the_solution_is_right_and_short(name: str) -> None:
    import inspect

    assert puzzles.verdict(getattr(solutions, name)).startswith("right, in ")
    body = inspect.getsource(getattr(solutions, name)).strip().splitlines()[2:]
    assert len(body) <= 8


@pytest.mark.parametrize(("name", "mistake"), [(n, m) for n, p in puzzles.PUZZLES.items() for m in p.mistakes])
def test_a_known_mistake_is_named(name: str, mistake: str) -> None:
    verdict = puzzles.verdict(named(name, puzzles.PUZZLES[name].mistakes[mistake]))
    assert verdict.startswith(f"wrong: {name}(")
    assert f"it looks as if {mistake}" in verdict.splitlines()
    if name not in ("nothing", "triple", "merge", "entropy"):  # one tensor, or three numbers of one row
        assert "rank 0 |" in verdict  # the strip
        assert "first at " in verdict
        where = next(line for line in verdict.splitlines() if line.startswith("first at "))
        assert "rank " in where
        assert "sample " in where or name == "first_difference"


@pytest.mark.parametrize("name", puzzles.PUZZLES)
def test_a_stub_an_error_and_nonsense(name: str) -> None:
    assert puzzles.verdict(named(name, lambda *_: None)) == "not answered yet"
    assert "ZeroDivisionError" in puzzles.verdict(named(name, lambda *_: 1 // 0))
    assert puzzles.verdict(named(name, lambda *_: "nonsense")).startswith("wrong: ")
    drawing = puzzles.show(named(name, lambda *_: None))
    assert "not answered yet" in str(drawing)
    assert drawing.bytes("png")[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("nothing", lambda x: torch.zeros(0, dtype=x.dtype, requires_grad=True) * 2, "does not lead to x"),
        ("nothing", lambda x: x.sum(), "yours is a tensor, 6"),
        ("entropy", lambda *_: torch.tensor(0.8324), "yours is a tensor, 0.8324"),
        (
            "positions",
            lambda lengths: numpy.concatenate([numpy.arange(n) for n in lengths] or [[]]),
            "yours is ndarray",
        ),
        ("owner", lambda p, n, cp: bool(solutions.owner(p, n, cp)), "yours is "),
        ("owner", lambda p, n, cp: float(solutions.owner(p, n, cp)), "yours is 0"),
        ("merge", lambda a, b: solutions.merge(a, b) if a[1] else [math.nan] * 3, "merge([-inf, 0, 0], [2, 1, 0])"),
    ],
)
def test_answers_of_other_types_and_near_misses(name: str, answer: Any, said: str) -> None:
    verdict = puzzles.verdict(named(name, answer))
    assert verdict.startswith("wrong: ")
    assert said in verdict


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError


def itself() -> list[Any]:
    own: list[Any] = []
    own.append(own)
    return own


@pytest.mark.parametrize(
    "answer",
    [
        lambda *_: 10**5000,
        lambda *_: [10**400, 0.0, 0.0],
        lambda *_: Unprintable(),
        lambda *_: itself(),
        lambda *_: sys.exit(),
        lambda *_: {},
        lambda *_: (i for i in ()),
        lambda *_: numpy.zeros(3),
    ],
)
@pytest.mark.parametrize("name", puzzles.PUZZLES)
def test_an_odd_answer_is_wrong_and_no_crash(name: str, answer: Any) -> None:
    verdict = puzzles.verdict(named(name, answer))
    assert verdict.startswith("wrong: ")
    assert len(verdict) < 3000
    puzzles.show(named(name, answer))


def test_the_buffer_of_puzzle_8_cannot_be_spoilt() -> None:
    assert puzzles.verdict(named("nothing", lambda x: x.detach_()[:0])).startswith("wrong: ")
    assert puzzles.verdict(solutions.nothing).startswith("right")


def test_other_numbers_are_numbers() -> None:
    def entropy(m: float, s: float, w: float) -> Any:
        return numpy.log(s) - w / s

    assert puzzles.verdict(entropy).startswith("right")


def test_a_tuple_is_a_list() -> None:
    verdict = puzzles.verdict(named("positions", lambda lengths: tuple(range(sum(lengths)))))
    assert "first at entry 2: rank 0, sample B, position 0" in verdict.splitlines()


def test_an_answer_that_empties_its_arguments() -> None:
    def emptied(lanes: list[Any]) -> Any:
        lanes.clear()
        return 2

    assert puzzles.verdict(named("first_difference", emptied)).startswith("wrong: ")
    assert puzzles.verdict(solutions.first_difference).startswith("right, in ")


@pytest.mark.parametrize("name", puzzles.PUZZLES)
def test_hints_come_one_at_a_time(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    hints = puzzles.PUZZLES[name].hints
    for number, text in enumerate(hints, 1):
        puzzles.hint(named(name, None), number)
        assert capsys.readouterr().out == text + "\n"
    puzzles.hint(named(name, None), len(hints) + 1)
    assert "solutions.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "args", "want"),
    [  # by hand
        ("positions", ([2, 3],), [0, 1, 0, 1, 2]),
        ("targets", ([[1, 2], [3, 4]],), [2, -100, 4, -100]),
        ("response_rows", ([3, 4], [1, 3]), [[1], [3, 4, 5]]),
        ("owner", (5, 8, 2), 1),
        ("owner", (6, 8, 2), 0),
        ("held", (0, 8, 2), [0, 1, 6, 7]),
        ("window", (1, 7, 2), [4, 8]),
        ("clip", (2, 6, 4, 8), [0, 1]),
        ("clip", (1, 3, 4, 8), []),
        ("triple", ([0.0, 0.0, -math.inf],), [0.0, 2.0, 0.0]),
        ("merge", ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]), [0.0, 2.0, 0.0]),
        ("entropy", (7.0, 2.0, 0.0), math.log(2)),
        ("sends", ([4, 5, 6, 7], [0, 1, 6, 7]), [6, 7]),
        ("first_difference", ([["a"], ["a", "b"]],), 1),
    ],
)
def test_what_is_right(name: str, args: tuple[Any, ...], want: Any) -> None:
    assert puzzles._same(want, puzzles.PUZZLES[name].right(*args))
    assert puzzles._same(want, getattr(solutions, name)(*args))


@pytest.mark.parametrize(
    ("name", "answer", "where"),
    [  # by hand
        ("positions", lambda lengths: list(range(sum(lengths))), "entry 2: rank 0, sample B, position 0"),
        ("targets", lambda tokens: [t for sample in tokens for t in sample], "entry 0: rank 0, sample A, position 0"),
        ("response_rows", lambda ls, rs: [[n - r - 1 + k for k in range(r)] for n, r in zip(ls, rs, strict=True)],
         "entry 1: rank 0, sample B"),
        ("owner", lambda p, n, cp: 0, "sample A, position 1, on rank 1"),
        ("held", lambda rank, n, cp: solutions.held(0, n, cp), "entry 0: rank 1, sample A"),
        ("window", lambda rank, n, cp: [rank * (n // cp), (rank + 1) * (n // cp)], "entry 1: rank 0, sample A"),
        ("clip", lambda a, b, s, e: [0] if a >= e else solutions.clip(a, b, s, e), "entry 0: rank 0, sample A"),
        ("sends", lambda held, owned: held, "entry 2: sample A, from rank 0 to rank 0"),
        ("first_difference", lambda lanes: 0, "step 2, rank 0: d log-prob, rank 1: d entropy"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_told_where(name: str, answer: Any, where: str) -> None:
    verdict = puzzles.verdict(named(name, answer))
    assert f"first at {where}" in verdict.splitlines(), verdict


def test_an_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "LIMIT", 0.2)  # the text keeps the 2 s

    def endless(*_: Any) -> None:
        while True:
            pass

    assert "yours is 'no answer within 2 s'" in puzzles.verdict(named("owner", endless))
