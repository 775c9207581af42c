"""The puzzles of notebook 09: what is right, on which inputs, and which mistakes are known by name.

``show(answer)`` draws an answer beside its target and grades it on every input; ``hint(answer, n)`` gives one hint at
a time. What is right comes from ``refimpl`` or is counted out here; ``solutions.py`` holds short answers.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from refimpl.candidate import LIMIT, Broken, Late, call, limited
from refimpl.diagrams import COLOURS, LANE, Drawing, canvas, draw_box, strips
from refimpl.entropy import Triple
from refimpl.layout import Batch, Layout

Answer = Callable[..., Any]
INF = math.inf
LETTERS = "ABCDEFGH"  # of the samples, as in the strips


@dataclass(frozen=True)
class Puzzle:
    """One puzzle: ``right`` for all ``cases`` (argument tuples), the ``shown`` ones in the picture, hints, mistakes."""

    right: Answer
    cases: Sequence[tuple[Any, ...]]
    shown: Sequence[tuple[Any, ...]]
    hints: Sequence[str]
    mistakes: dict[str, Answer] = field(default_factory=dict)
    strip: Callable[..., Any] | None = None  # the strip of an input
    where: Callable[..., str] = lambda entry, *args: ""  # rank and sample of an entry of the answer


def beside(want: Sequence[str], got: Sequence[str], title: str) -> Drawing:
    """A target and an answer to it, entry below entry; what differs is framed in the answer."""
    width = max(2, *(-(-len(text) // 3) for text in (*want, *got)))  # wide enough for the longest entry
    figure, axes = canvas(0, width * max(len(want), len(got), 1), title)
    figure.set_figheight(1.7)
    axes.set_ylim(3.2, -1.2)
    for lane, (name, entries) in enumerate({"target": want, "yours": got}.items()):
        axes.text(-0.3, lane * LANE + 0.5, name, ha="right", va="center", fontsize=8)
        for x, text in enumerate(entries):
            wrong = lane == 1 and (x >= len(want) or text != want[x])
            draw_box(axes, width * x, lane, width, text, "white" if wrong else COLOURS[0], False, wrong)
    lines = [f"{name} {' '.join(entries)}".rstrip() for name, entries in (("target:", want), ("yours: ", got))]
    return Drawing(figure, "\n".join([title, *lines]))


def show(answer: Answer) -> Drawing:
    """The answer beside the target, and the verdict over all cases below."""
    puzzle = PUZZLES[answer.__name__]
    drawn = [[text for args in puzzle.shown for text in _entries(_try(fn, args))] for fn in (puzzle.right, answer)]
    whole = f"{answer.__name__}({', '.join(map(_text, puzzle.shown[0]))})" + " ..." * (len(puzzle.shown) > 1)
    title = whole if len(whole) < 80 else f"{whole[:70]} ..."  # as much as the picture has room for
    drawing = beside(drawn[0], drawn[1], title)
    return Drawing(drawing.figure, f"{drawing.text.replace(title, whole, 1)}\n{verdict(answer)}")


def verdict(answer: Answer) -> str:
    """Right, not answered yet, or the first input on which it is wrong, and the mistake's name if it has one."""
    name, puzzle = answer.__name__, PUZZLES[answer.__name__]
    if all(_try(answer, args) is None for args in puzzle.cases):
        return "not answered yet"
    for args in puzzle.cases:
        want, got = puzzle.right(*args), _try(answer, args)
        if not _same(want, got):
            entry, at = _first_wrong(want, got)
            at = ": ".join(filter(None, (at, "" if entry is None else puzzle.where(entry, *args))))
            kind = f", a {type(got).__name__}" * (_text(want) == _text(got))
            lines = [
                f"wrong: {name}({', '.join(map(_text, args))}) should be {_text(want)}, yours is {_text(got)}{kind}"
            ]
            lines += [f"first at {at}"] if at else []
            for mistake, wrong in puzzle.mistakes.items():
                if all(_text(_try(wrong, other)) == _text(_try(answer, other)) for other in puzzle.cases):
                    lines.append(f"it looks as if {mistake}")
            return "\n".join([*lines, *([str(puzzle.strip(*args))] if puzzle.strip else [])])
    return f"right, in {len(puzzle.cases)} cases"


def _first_wrong(want: Any, got: Any) -> tuple[int | None, str]:
    """The first entry that differs, as number and as text; a single value has no text, an odd answer no number."""
    if isinstance(want, list) and not isinstance(got, list | tuple):
        return None, ""
    if not isinstance(want, list):
        return 0, ""
    pairs = enumerate(zip(want, got, strict=False))
    entry = next((k for k, (a, b) in pairs if not _same(a, b)), min(len(want), len(got)))
    return entry, f"entry {entry}"


def hint(answer: Answer, number: int = 1) -> None:
    """Print one hint; ask for 1 first."""
    hints = PUZZLES[answer.__name__].hints
    print(hints[number - 1] if 1 <= number <= len(hints) else "no more hints; the solution is in solutions.py")


def _try(answer: Answer, args: tuple[Any, ...]) -> Any:
    """What the answer gives for copies of the arguments; an error as text."""
    try:
        with limited():
            return call(answer, *(arg.clone() if arg is X else copy.deepcopy(arg) for arg in args))
    except Late:
        return f"no answer within {LIMIT:g} s"
    except Broken as broken:
        return broken.args[1]


def _same(want: Any, got: Any) -> bool:
    if isinstance(want, torch.Tensor):
        kept = isinstance(got, torch.Tensor) and (got.dtype, got.shape) == (want.dtype, want.shape)
        return bool(kept and got.requires_grad and _leads_back(got))
    if isinstance(want, float):
        if isinstance(got, bool) or not isinstance(got, int | float):
            return False
        return want == got or (abs(got) < 1e300 and math.isclose(want, got, rel_tol=1e-6, abs_tol=1e-9))
    if isinstance(want, list | tuple):
        alike = isinstance(got, list | tuple) and len(want) == len(got)
        return bool(alike and all(_same(a, b) for a, b in zip(want, got, strict=True)))
    return type(want) is type(got) and bool(want == got)


def _leads_back(piece: torch.Tensor) -> bool:
    """To X, the buffer of puzzle 8."""
    return torch.autograd.grad(piece.sum(), X, retain_graph=True, allow_unused=True)[0] is not None


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            return f"a tensor, {value.item():.4g}"
        graph = "leads to x" if value.requires_grad and _leads_back(value) else "does not lead to x"
        return f"{len(value)} rows of {str(value.dtype).removeprefix('torch.')}, {graph}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join("..." if part is value else _text(part) for part in value) + "]"
    try:
        plain = value is None or isinstance(value, int | str)
        text = (repr(value) if isinstance(value, str) else str(value)) if plain else f"{type(value).__name__} {value}"
    except Exception as error:  # an int of too many digits, for one
        return f"{type(value).__name__} that cannot be printed ({type(error).__name__})"
    return text if len(text) < 300 else f"{text[:300]} ..."


def _entries(value: Any) -> list[str]:
    return list(map(_text, value)) if isinstance(value, list | tuple) else ["?" if value is None else _text(value)]


# ---------------------------------------------------------------- what is right, counted out


def _positions(total_lengths: list[int]) -> list[int]:
    return [p for total in total_lengths for p in range(total)]


def _targets(tokens: list[list[int]]) -> list[int]:
    return [sample[p + 1] if p + 1 < len(sample) else -100 for sample in tokens for p in range(len(sample))]


def _flat(tokens: list[list[int]]) -> list[int]:
    return [token for sample in tokens for token in sample]


def _zigzag(length: int, cp_size: int) -> Layout:
    return Layout(Batch([length], [0]), cp_size=cp_size)


def _held(rank: int, length: int, cp_size: int) -> list[int]:
    (spans,) = _zigzag(length, cp_size).spans(rank)
    return [p for span in spans for p in range(span.position, span.position + span.length)]


def _owner(position: int, length: int, cp_size: int) -> int:
    return next(rank for rank in range(cp_size) if position in _held(rank, length, cp_size))


def _packed(total_lengths: list[int], response_lengths: list[int]) -> Layout:
    return Layout(Batch(total_lengths, response_lengths))


def _of_row(row: int, total_lengths: list[int]) -> str:
    """Rank, sample and position of a row of a packed stream."""
    for i, (span,) in enumerate(_packed(total_lengths, [0] * len(total_lengths)).spans(0)):
        if span.row <= row < span.row + span.length:
            return f"rank 0, sample {LETTERS[i]}, position {row - span.row}"
    return "beyond the last sample"


def _split_of(held: list[int], owned: list[int]) -> tuple[int, int, int]:
    """The length of the sample, who sends and who receives, of a case of ``sends``."""
    return next((n, a, b) for n in (8, 1) for a in (0, 1) for b in (0, 1) if _exchange(n, a, b) == (held, owned))


def _exchange(length: int, sender: int, receiver: int) -> tuple[list[int], list[int]]:
    """What the sender holds in its window, and what the receiver owns under zigzag, on two ranks."""
    (span,) = _windows(length, 2).spans(sender)[0]
    return list(range(span.position, span.position + span.length)), _held(receiver, length, 2)


def _windows(length: int, cp_size: int) -> Layout:
    """One sample under allgather CP."""
    return Layout(Batch([length], [0]), cp_split="contiguous", cp_size=cp_size)


def _scored(first: int, last: int) -> Layout:
    """One sample in three windows of four rows, whose positions ``[first, last)`` score its response."""
    return Layout(Batch([last + 1], [last - first]), cp_split="contiguous", cp_size=3, pad_multiple=4)


def _response_rows(total_lengths: list[int], response_lengths: list[int]) -> list[list[int]]:
    spans = _packed(total_lengths, response_lengths).response_spans(0)
    return [list(range(span.row, span.row + span.length)) for (span,) in spans]


def _window(rank: int, total: int, cp_size: int) -> list[int]:
    rows = -(-total // cp_size)
    return [rank * rows, (rank + 1) * rows]


def _clip(first: int, last: int, start: int, stop: int) -> list[int]:
    return [row - start for row in range(start, stop) if first <= row < last]


def _merge(one: list[float], other: list[float]) -> list[float]:
    columns = [torch.tensor(triple, dtype=torch.float64)[:, None] for triple in (one, other)]
    a, b = (Triple(m, s, w) for m, s, w in columns)
    return [v.item() for v in a.merge(b)[:3]]


def _triple(row: list[float]) -> list[float]:
    return [v.item() for v in Triple.of(torch.tensor([row], dtype=torch.float64))[:3]]


def _sends(held: list[int], owned: list[int]) -> list[int]:
    return [p for p in held if p in owned]


def _first_difference(lanes: list[list[str]]) -> int | None:
    for step in range(max(map(len, lanes))):
        if len({lane[step] if step < len(lane) else "" for lane in lanes}) > 1:
            return step
    return None


def _calls(step: int, lanes: list[list[str]]) -> str:
    """What each rank calls there."""
    return ", ".join(f"rank {r}: {lane[step] if step < len(lane) else 'nothing'}" for r, lane in enumerate(lanes))


X = torch.ones(3, dtype=torch.float16, requires_grad=True) * 2
LANES = [["log-prob", "entropy", "d log-prob"], ["log-prob", "entropy", "d entropy", "d log-prob"]]
SAMPLES = [([2, 3],), ([1],), ([3, 1, 2],), ([],), ([4, 0, 1],)]
LENGTHS = [([5], [2]), ([3, 4], [1, 3]), ([2, 2], [0, 1]), ([1], [0]), ([5, 2, 7], [3, 1, 4])]
ZIGZAG = [(length, cp) for cp in (1, 2, 3, 4) for length in (2 * cp, 4 * cp, 6 * cp)]

PUZZLES = {
    "positions": Puzzle(
        _positions,
        SAMPLES,
        [([2, 3, 1],)],
        ["Each sample counts from 0.", "Two loops: over the lengths, and over range(length)."],
        {"positions go on counting across samples": lambda lengths: list(range(sum(lengths)))},
        lambda lengths: strips(_packed(lengths, [0] * len(lengths))),
        _of_row,
    ),
    "targets": Puzzle(
        _targets,
        [([[1, 2, 3]],), ([[1, 2], [3, 4]],), ([[5]],), ([[1], [2, 3, 4]],)],
        [([[1, 2, 3], [4, 5]],)],
        ["The row at p scores the token at p + 1.", "The last position of each sample has no target: -100."],
        {
            "the row after the last of a sample belongs to the next one": lambda tokens: [*_flat(tokens)[1:], -100],
            "the row at p scores the token at p": _flat,
        },
        lambda tokens: strips(_packed(list(map(len, tokens)), [0] * len(tokens))),
        lambda entry, tokens: _of_row(entry, list(map(len, tokens))),
    ),
    "response_rows": Puzzle(
        _response_rows,
        LENGTHS,
        [([5], [2])],
        ["R rows for each sample, P - 1 to L - 2.", "Add where the sample starts: the lengths of those before it."],
        {
            "these are the rows of the response's own tokens": lambda ls, rs: [
                [sum(ls[:i]) + p for p in range(n - r, n)] for i, (n, r) in enumerate(zip(ls, rs, strict=True))
            ],
            "the samples before are not counted": lambda ls, rs: [
                list(range(n - r - 1, n - 1)) for n, r in zip(ls, rs, strict=True)
            ],
        },
        lambda *lengths: strips(_packed(*lengths)),
        lambda entry, totals, _: f"rank 0, sample {LETTERS[entry]}" if entry < len(totals) else "one sample too many",
    ),
    "owner": Puzzle(
        _owner,
        [(p, length, cp) for length, cp in ZIGZAG for p in range(length)],
        [(p, 8, 2) for p in range(8)],
        ["There are 2 * cp_size chunks; which one is it in?", "Chunks c and 2 * cp_size - 1 - c go together."],
        {
            "the chunks are dealt out in turn": lambda p, n, cp: p // (n // (2 * cp)) % cp,
            "these are windows, one per rank": lambda p, n, cp: p // (n // cp),
        },
        lambda p, n, cp: strips(_zigzag(n, cp)),
        lambda entry, p, n, cp: f"sample A, position {p}, on rank {_owner(p, n, cp)}",
    ),
    "held": Puzzle(
        _held,
        [(rank, length, cp) for length, cp in ZIGZAG for rank in range(cp)],
        [(0, 8, 2), (1, 8, 2)],
        ["Two chunks: rank and 2 * cp_size - 1 - rank.", "Chunk c begins at c * size; size = length // (2 * cp_size)."],
        {
            "the second chunk is missing": lambda r, n, cp: list(range(r * n // (2 * cp), (r + 1) * n // (2 * cp))),
            "this is one window": lambda r, n, cp: list(range(r * n // cp, (r + 1) * n // cp)),
        },
        lambda rank, n, cp: strips(_zigzag(n, cp)),
        lambda entry, rank, n, cp: f"rank {rank}, sample A",
    ),
    "window": Puzzle(
        _window,
        [(rank, total, cp) for cp in (1, 2, 3) for total in (1, 4, 7) for rank in range(cp)],
        [(0, 7, 2), (1, 7, 2)],
        ["All windows are as long as each other; the stream is padded first.", "Round up: -(-total // cp_size)."],
        {"the rows that do not divide are lost": lambda r, n, cp: [r * (n // cp), (r + 1) * (n // cp)]},
        lambda rank, n, cp: strips(_windows(n, cp)),
        lambda entry, rank, n, cp: f"rank {rank}, sample A",
    ),
    "clip": Puzzle(
        _clip,
        [(first, last, s, s + 4) for s in (0, 4, 8) for first, last in ((1, 3), (2, 6), (0, 11), (5, 5), (9, 11))],
        [(2, 6, 4, 8)],
        ["The larger of the starts, the smaller of the ends.", "Subtract the window's start last. Nothing: []."],
        {
            "rows count from the stream's start": lambda a, b, s, e: [*range(max(a, s), min(b, e))],
            "a window that meets nothing still gives rows": lambda a, b, s, e: [
                *range(max(0, a - s), max(1, min(b, e) - s))
            ],
        },
        lambda first, last, start, stop: strips(_scored(first, last)),
        lambda entry, first, last, start, stop: f"rank {start // 4}, sample A",
    ),
    "nothing": Puzzle(
        lambda x: x[:0],
        [(X,)],
        [(X,)],
        ["Which operation gives no rows, keeps the dtype and leads back to x?", "A slice."],
        {
            "these zeros are new, and lead nowhere": lambda x: torch.zeros(0, dtype=x.dtype),
            "these zeros are new, of another dtype, and lead nowhere": lambda x: torch.zeros(0),
            "it was cut off by detach": lambda x: x[:0].detach(),
        },
    ),
    "triple": Puzzle(
        _triple,
        [([1.0, 2.0, 3.0],), ([0.0, 0.0],), ([0.0, 0.0, -INF],), ([-200.0, 0.0],), ([5.0],), ([1e4, 1e4 + 1],)],
        [([1.0, 2.0, -INF],)],
        ["m = max x, s = sum e^(x-m), w = sum e^(x-m) (x-m).", "Where x is -inf both terms are 0: leave it out."],
        {
            "0 times -inf came in": lambda x: [
                *_triple(x)[:2],
                sum(math.exp(v - max(x)) * (v - max(x)) for v in x),
            ],
            "w weighs x, not x - m": lambda x: [
                *_triple(x)[:2],
                sum(math.exp(v - max(x)) * v for v in x if v > -INF),
            ],
        },
    ),
    "merge": Puzzle(
        _merge,
        [
            ([1.0, 2.0, -0.5], [1.0, 1.0, 0.0]),
            ([0.0, 1.0, 0.0], [3.0, 1.5, -0.2]),
            ([3.0, 1.5, -0.2], [0.0, 1.0, 0.0]),
            ([2.0, 1.0, 0.0], [-INF, 0.0, 0.0]),
            ([-INF, 0.0, 0.0], [2.0, 1.0, 0.0]),
            ([-INF, 0.0, 0.0], [-INF, 0.0, 0.0]),
        ],
        [([0.0, 1.0, 0.0], [3.0, 1.5, -0.2])],
        [
            "Move both to the larger m: d = m_old - m.",
            "s becomes e^d s, w becomes e^d (w + d s); then add.",
            "If s is 0, leave it at 0.",
        ],
        {
            "w was scaled, but not shifted": lambda a, b: [
                max(a[0], b[0]),
                *(sum(math.exp(t[0] - max(a[0], b[0])) * t[k] for t in (a, b)) for k in (1, 2)),
            ],
            "nothing was moved to the larger maximum": lambda a, b: [max(a[0], b[0]), a[1] + b[1], a[2] + b[2]],
        },
    ),
    "entropy": Puzzle(
        lambda m, s, w: math.log(s) - w / s,
        [(3.0, 1.5032, -0.6385), (0.0, 1.0, 0.0), (7.0, 2.0, 0.0), (1e4, 4.0, 0.0)],
        [(3.0, 1.5032, -0.6385)],
        ["-log p = log s - (x - m); take its mean under p.", "The mean of x - m under p is w / s."],
        {
            "this is log-sum-exp": lambda m, s, w: m + math.log(s),
            "w was not divided by s": lambda m, s, w: math.log(s) - w,
        },
    ),
    "sends": Puzzle(
        _sends,
        [_exchange(8, 0, 0), _exchange(8, 1, 0), _exchange(8, 1, 1), _exchange(1, 1, 0), _exchange(1, 0, 1)],
        [([4, 5, 6, 7], [0, 1, 6, 7])],
        ["What I hold and the other rank owns."],
        {"what both hold together": lambda held, owned: sorted({*held, *owned})},
        lambda *lists: "\n".join(str(strips(of(_split_of(*lists)[0], 2))) for of in (_windows, _zigzag)),
        lambda entry, *lists: "sample A, from rank {1} to rank {2}".format(*_split_of(*lists)),
    ),
    "first_difference": Puzzle(
        _first_difference,
        [(lanes,) for lanes in (LANES, ["ab", "ab"], ["a", "ab"], ["ba", "ab"], ["abc", "a", "ab"], ["abc", "abd"])],
        [(LANES,)],
        ["The n-th calls of all ranks meet.", "A rank without an n-th call differs, too. None if they never differ."],
        {
            "a call that is missing at the end was overlooked": lambda lanes: next(
                (n for n, calls in enumerate(zip(*lanes, strict=False)) if len(set(calls)) > 1), None
            ),
            "this is where a rank stands still, not where they differ": lambda lanes: max(map(len, lanes)) - 1,
        },
        lambda lanes: "\n".join(f"rank {rank} | {'  '.join(lane)}" for rank, lane in enumerate(lanes)),
        lambda entry, lanes: "no step" if (n := _first_difference(lanes)) is None else f"step {n}, " + _calls(n, lanes),
    ),
}  # fmt: skip
