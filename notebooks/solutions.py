"""Short answers to the puzzles of notebook 09."""

import math
from typing import Any


def positions(total_lengths: list[int]) -> list[int]:
    """Position of each row of a packed stream."""
    return [p for total in total_lengths for p in range(total)]


def targets(tokens: list[list[int]]) -> list[int]:
    """Target of each row of a packed stream."""
    return [target for sample in tokens for target in [*sample[1:], -100]]


def response_rows(total_lengths: list[int], response_lengths: list[int]) -> list[list[int]]:
    """Rows that score the response of each sample."""
    rows, start = [], 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        rows.append(list(range(start + total - response - 1, start + total - 1)))
        start += total
    return rows


def owner(position: int, length: int, cp_size: int) -> int:
    """The rank that holds a position under zigzag."""
    chunk = position // (length // (2 * cp_size))
    return min(chunk, 2 * cp_size - 1 - chunk)


def held(rank: int, length: int, cp_size: int) -> list[int]:
    """The positions that a rank holds under zigzag."""
    size = length // (2 * cp_size)
    chunks = [rank, 2 * cp_size - 1 - rank]
    return [p for chunk in chunks for p in range(chunk * size, (chunk + 1) * size)]


def window(rank: int, total: int, cp_size: int) -> list[int]:
    """Start and stop of an allgather rank's rows in the padded stream."""
    rows = -(-total // cp_size)
    return [rank * rows, (rank + 1) * rows]


def clip(first: int, last: int, start: int, stop: int) -> list[int]:
    """The rows of a window that lie in [first, last), counted from the window's start."""
    return list(range(max(first, start) - start, max(min(last, stop), start) - start))


def nothing(x: Any) -> Any:
    """A piece of no rows that is still part of x."""
    return x[:0]


def triple(row: list[float]) -> list[float]:
    """(m, s, w) of a row of logits."""
    m = max(row)
    d = [x - m for x in row if x > -math.inf]
    return [m, sum(math.exp(v) for v in d), sum(math.exp(v) * v for v in d)]


def merge(one: list[float], other: list[float]) -> list[float]:
    """The triple of the columns of both."""
    m, moved = max(one[0], other[0]), []
    for m_old, s, w in (one, other):
        d = m_old - m if s else 0.0  # -inf - -inf is no number
        moved.append((math.exp(d) * s, math.exp(d) * (w + d * s)))
    return [m, moved[0][0] + moved[1][0], moved[0][1] + moved[1][1]]


def entropy(m: float, s: float, w: float) -> float:
    """The entropy, from a triple."""
    return math.log(s) - w / s


def sends(held: list[int], owned: list[int]) -> list[int]:
    """What a rank sends to another one in a redistribution."""
    return [p for p in held if p in owned]


def first_difference(lanes: list[list[str]]) -> int | None:
    """The first step at which the ranks do not issue the same."""
    for step in range(max(map(len, lanes))):
        if len({lane[step] if step < len(lane) else None for lane in lanes}) > 1:
            return step
    return None
