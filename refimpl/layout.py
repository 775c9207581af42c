"""Which row of which rank holds which position of which sample. Integers only, no torch.

A layout is data: for each sample, the spans that one rank holds. Everything that depends on the batch format (thd or
bshd) or on context parallelism (zigzag or contiguous windows) is decided in this file and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import index
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``[row, row + length)`` of one rank's buffer hold positions ``[position, position + length)``.

    A span may have length zero: slicing with it gives a zero-row view of the buffer.
    """

    row: int
    position: int
    length: int

    @property
    def rows(self) -> slice:
        """The rows, ready to index a buffer with."""
        return slice(self.row, self.row + self.length)

    def clip(self, start: int, stop: int) -> "Span":
        """The part with positions in ``[start, stop)``.

        Where they do not meet, a span of length zero: its row stays within this span's rows and its position within
        ``[start, stop]``, so that code which slices or pads with either needs no special case.
        """
        end = self.position + self.length
        first = min(max(self.position, start), end)
        last = max(first, min(end, stop))
        return Span(self.row + first - self.position, min(max(first, start), stop), last - first)


@dataclass(frozen=True)
class Batch:
    """The lengths of the samples of one micro-batch, in batch order; lists are taken and kept as tuples.

    ``total_lengths[i]`` (L) counts prompt and response tokens, ``response_lengths[i]`` (R) the response tokens alone.

    Raises:
        ValueError: a length is negative or no integer, R > L, R = L > 0 (no prompt token predicts the first response
            token), or the lists differ in length. The message names the sample and the numbers.
    """

    total_lengths: Sequence[int]
    response_lengths: Sequence[int]

    def __post_init__(self) -> None:
        for name in ("total_lengths", "response_lengths"):
            values = tuple(_length(v, f"sample {i}: {name[:-1]}") for i, v in enumerate(getattr(self, name)))
            object.__setattr__(self, name, values)
        totals, responses = self.total_lengths, self.response_lengths
        if len(totals) != len(responses):
            raise ValueError(f"{len(totals)} total_lengths but {len(responses)} response_lengths")
        for i, (total, response) in enumerate(zip(totals, responses, strict=True)):
            if response > total:
                raise ValueError(f"sample {i}: response_length {response} is more than total_length {total}")
            if response == total > 0:
                raise ValueError(
                    f"sample {i}: total_length {total}, response_length {response}: no prompt to predict from"
                )

    def __len__(self) -> int:
        return len(self.total_lengths)

    def first_predicting(self, sample: int) -> int:
        """P-1, the first of the R predicting positions: the logits at p score the token at p+1."""
        return self.total_lengths[sample] - self.response_lengths[sample] - 1


@dataclass(frozen=True)
class Layout:
    """How a batch is laid out in rows and split over context-parallel (CP) ranks.

    Args:
        batch: the lengths.
        qkv_format: ``"thd"``: samples end to end. ``"bshd"``: each one takes ``max_seq_len`` rows.
        cp_split: ``"zigzag"``: each sample, padded, is cut in ``2 * cp_size`` equal chunks; rank r holds chunks r and
            ``2 * cp_size - 1 - r``, which balances ring attention. ``"contiguous"``: one window per rank, of each
            padded sample (bshd) or of the whole stream, padded once (thd): that is allgather CP.
        cp_size: number of CP ranks, any number from 1 up; 1 is no CP, and both splits are then the same.
        max_seq_len: bshd only, rows per sample before rounding up to whole chunks; by default the longest sample.
        pad_multiple: thd only, each rank's number of rows is rounded up to a multiple of it, with padding at the end.

    Raises:
        ValueError: an argument is out of range or not for this format, or a sample is longer than ``max_seq_len``.
    """

    batch: Batch
    qkv_format: Literal["thd", "bshd"] = "thd"
    cp_split: Literal["zigzag", "contiguous"] = "zigzag"
    cp_size: int = 1
    max_seq_len: int | None = None
    pad_multiple: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("qkv_format", ("thd", "bshd")), ("cp_split", ("zigzag", "contiguous"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not one of {allowed}")
        for name, least in (("cp_size", 1), ("pad_multiple", 1), ("max_seq_len", 0)):
            if getattr(self, name) is not None or name != "max_seq_len":
                object.__setattr__(self, name, _length(getattr(self, name), name, least))
        if self.qkv_format == "thd" and self.max_seq_len is not None:
            raise ValueError(f"max_seq_len {self.max_seq_len} is for bshd; thd has no padding between samples")
        if self.qkv_format == "bshd" and self.pad_multiple != 1:
            raise ValueError(f"pad_multiple {self.pad_multiple} is for thd; bshd pads to max_seq_len")
        for i, total in enumerate(self.batch.total_lengths):
            if self.max_seq_len is not None and total > self.max_seq_len:
                raise ValueError(f"sample {i}: total_length {total} is more than max_seq_len {self.max_seq_len}")

    def __str__(self) -> str:
        split = "allgather" if (self.qkv_format, self.cp_split) == ("thd", "contiguous") else self.cp_split
        return f"{self.qkv_format}, {'no CP' if self.cp_size == 1 else f'{split} CP, cp_size {self.cp_size}'}"

    @property
    def rows(self) -> int:
        """T_local: rows of each rank's flat buffer, padding included; the same on every rank."""
        return _round_up(sum(length for length, _ in self._lines) // self.cp_size, self.pad_multiple)

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Where each sample starts in the stream before the CP split, and where the last one ends.

        A sample counts with its own padding (zigzag, bshd); padding at the end of the stream counts nowhere.
        """
        own = self.qkv_format == "bshd" or self._chunks > self.cp_size
        padded = [length for length, _ in self._lines] if own else self.batch.total_lengths
        return tuple(accumulate(padded, initial=0))

    def spans(self, cp_rank: int) -> list[tuple[Span, ...]]:
        """For each sample, in batch order, the spans that ``cp_rank`` holds, in rising position.

        One span for each window that the sample could lie in; some may be of length zero.

        Raises:
            ValueError: ``cp_rank`` is not in ``[0, cp_size)``.
        """
        cp_rank = _length(cp_rank, "cp_rank")
        if cp_rank >= self.cp_size:
            raise ValueError(f"cp_rank {cp_rank} is not in [0, {self.cp_size})")
        held: list[tuple[Span, ...]] = []
        row = 0
        for length, samples in self._lines:
            size = length // self._chunks
            windows = []
            for chunk in [cp_rank, self._chunks - 1 - cp_rank][: self._chunks // self.cp_size]:
                windows.append(Span(row, chunk * size, size))
                row += size
            offset = 0
            for total in samples:
                clipped = [window.clip(offset, offset + total) for window in windows]
                held.append(tuple(replace(span, position=span.position - offset) for span in clipped))
                offset += total
        return held

    def response_spans(self, cp_rank: int) -> list[tuple[Span, ...]]:
        """``spans`` clipped to the predicting positions: the rows whose logits score a response token."""
        first, totals = self.batch.first_predicting, self.batch.total_lengths
        return [tuple(s.clip(first(i), totals[i] - 1) for s in spans) for i, spans in enumerate(self.spans(cp_rank))]

    def response_slices(self, cp_rank: int) -> list[tuple[slice, ...]]:
        """``response_spans`` as slices of each sample's R response tokens: those that ``cp_rank`` scores."""
        first, held = self.batch.first_predicting, enumerate(self.response_spans(cp_rank))
        starts = [[(s.position - first(i), s.length) for s in spans] for i, spans in held]
        return [tuple(slice(start, start + length) for start, length in own) for own in starts]

    def as_zigzag(self) -> "Layout":
        """The zigzag layout of the same batch, format and ranks: where a redistribution brings the pieces."""
        return replace(self, cp_split="zigzag", pad_multiple=1)

    @property
    def _chunks(self) -> int:
        """In how many equal chunks a line is cut."""
        return 2 * self.cp_size if self.cp_split == "zigzag" and self.cp_size > 1 else self.cp_size

    @cached_property
    def _lines(self) -> list[tuple[int, tuple[int, ...]]]:
        """What is cut in chunks, a sample or the stream: (padded length, lengths of the samples in it, end to end)."""
        totals = tuple(self.batch.total_lengths)
        if self.qkv_format == "thd" and self._chunks == self.cp_size:
            return [(_round_up(sum(totals), self.cp_size * self.pad_multiple), totals)]
        width = max(totals, default=0) if self.max_seq_len is None else self.max_seq_len
        lengths = totals if self.qkv_format == "thd" else [width] * len(totals)
        return [(_round_up(length, self._chunks), (total,)) for length, total in zip(lengths, totals, strict=True)]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _length(value: Any, name: str, least: int = 0) -> int:
    """``value`` as an int of at least ``least``, or an error that names it. Floats and truth values are no lengths."""
    try:
        number = index(str(value) if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is {value!r}, which is not an integer") from None
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    return number
