"""Layouts and slicing against an oracle that cuts lists, and against numbers worked out by hand."""

import re
import sys
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from hypothesis import example, given
from sweeps import CASES, layouts

from refimpl import slicing
from refimpl.layout import Batch, Layout, Span
from refimpl.slicing import NO_TARGET, extract, local_tokens, response_pieces, targets


def token_ids(layout: Layout) -> list[torch.Tensor]:
    """Token id = 1000 * (sample + 1) + position: a wrong slice shows at once."""
    return [1000 * (i + 1) + torch.arange(n) for i, n in enumerate(layout.batch.total_lengths)]


def check(layout: Layout) -> None:
    """Everything that the contract says of slicing: C1 to C4, tokens and targets, on every rank."""
    tokens, lanes = token_ids(layout), oracle.rows(layout)
    scored: Counter[tuple[int, int]] = Counter()
    for rank, lane in enumerate(lanes):
        assert layout.rows == len(lane)
        want = [-1 if cell is None else 1000 * (cell[0] + 1) + cell[1] for cell in lane]
        assert local_tokens(tokens, layout, rank, pad_id=-1).tolist() == want
        last = [n - 1 for n in layout.batch.total_lengths]
        want = [NO_TARGET if c is None or c[1] == last[c[0]] else 1000 * (c[0] + 1) + c[1] + 1 for c in lane]
        assert targets(tokens, layout, rank).tolist() == want
        scoring = {row: i for i in range(len(tokens)) for row, _ in oracle.response(layout, rank, i)}
        want = [target if row in scoring else NO_TARGET for row, target in enumerate(want)]
        assert targets(tokens, layout, rank, response_only=True).tolist() == want

        buffer = torch.arange(len(lane), dtype=torch.float16, requires_grad=True)
        pieces = response_pieces(buffer, layout, rank)
        assert len(pieces) == len(tokens)
        for i, piece in enumerate(pieces):
            assert isinstance(piece, torch.Tensor)
            assert piece.dtype == buffer.dtype
            assert piece.device == buffer.device
            assert piece.requires_grad
            assert piece.tolist() == [row for row, _ in oracle.response(layout, rank, i)]
            scored.update((i, position) for _, position in oracle.response(layout, rank, i))
        for i, piece in enumerate(pieces):
            (gradient,) = torch.autograd.grad(piece.sum(), buffer, retain_graph=True)
            mine = [row for row, _ in oracle.response(layout, rank, i)]
            assert gradient.tolist() == [float(row in mine) for row in range(len(lane))]
    everything = [
        (i, p)
        for i, (total, count) in enumerate(zip(layout.batch.total_lengths, layout.batch.response_lengths, strict=True))
        for p in range(total - count - 1, total - 1)
    ]
    assert scored == Counter(everything)


EXAMPLES = [
    Layout(Batch(totals, responses), qkv_format, cp_split, cp_size)
    for totals, responses in (([5, 2, 7], [3, 1, 4]), ([1, 3, 8], [0, 2, 2]), ([16], [4]), ([0, 2], [0, 1]), ([], []))
    for qkv_format in ("thd", "bshd")
    for cp_split in ("zigzag", "contiguous")
    for cp_size in (1, 2, 3, 4)
]


@pytest.mark.sweep
@given(layouts())
@example(Layout(Batch([7], [6]), cp_size=2))
@example(Layout(Batch([3], [2]), cp_size=4))
def test_every_layout_is_what_cutting_lists_gives(layout: Layout) -> None:
    CASES["slicing"] += 1
    check(layout)


@pytest.mark.parametrize("layout", EXAMPLES, ids=str)
def test_examples(layout: Layout) -> None:
    check(layout)


# ---------------------------------------------------------------- broken on purpose: the check must see each of these


true_spans, true_pieces, true_targets = Layout.spans, response_pieces, targets


def first_row_late(batch: Batch, sample: int) -> int:
    return batch.total_lengths[sample] - batch.response_lengths[sample]


def first_row_early(batch: Batch, sample: int) -> int:
    return batch.total_lengths[sample] - batch.response_lengths[sample] - 2


def padding_included(self: Layout, rank: int) -> list[tuple[Span, ...]]:
    grown = [
        [replace(s, length=min(s.length + 1, self.rows - s.row)) for s in spans] for spans in true_spans(self, rank)
    ]
    return [tuple(spans) for spans in grown]


def other_split(self: Layout, rank: int) -> list[tuple[Span, ...]]:
    return true_spans(replace(self, cp_split="zigzag" if self.cp_split == "contiguous" else "contiguous"), rank)


def second_chunk_of_the_neighbour(self: Layout, rank: int) -> list[tuple[Span, ...]]:
    both = zip(true_spans(self, rank), true_spans(self, (rank + 1) % self.cp_size), strict=True)
    return [(*mine[:-1], theirs[-1]) for mine, theirs in both]


def last_sample_forgotten(self: Layout, rank: int) -> list[tuple[Span, ...]]:
    return true_spans(self, rank)[:-1]


def none_for_empty(*args: Any) -> list[Any]:
    return [piece if len(piece) else None for piece in true_pieces(*args)]


def zeros_for_empty(*args: Any) -> list[Any]:
    return [piece if len(piece) else torch.zeros((0,), dtype=piece.dtype) for piece in true_pieces(*args)]


def other_dtype_for_empty(*args: Any) -> list[Any]:
    return [piece if len(piece) else piece.float() for piece in true_pieces(*args)]


def detached(*args: Any) -> list[Any]:
    return [piece.detach() for piece in true_pieces(*args)]


def falling_position(*args: Any) -> list[Any]:
    return [piece.flip(0) for piece in true_pieces(*args)]


def local_roll(tokens: list[torch.Tensor], layout: Layout, rank: int, *, response_only: bool = False) -> torch.Tensor:
    right = true_targets(tokens, layout, rank, response_only=response_only)
    return torch.where(right == NO_TARGET, NO_TARGET, local_tokens(tokens, layout, rank).roll(-1))


MUTANTS = [
        (Batch, "first_predicting", first_row_late),
        (Batch, "first_predicting", first_row_early),
        (Layout, "spans", padding_included),
        (Layout, "spans", other_split),
        (Layout, "spans", second_chunk_of_the_neighbour),
        (Layout, "spans", last_sample_forgotten),
        (sys.modules[__name__], "response_pieces", none_for_empty),
        (sys.modules[__name__], "response_pieces", zeros_for_empty),
        (sys.modules[__name__], "response_pieces", other_dtype_for_empty),
        (sys.modules[__name__], "response_pieces", detached),
        (sys.modules[__name__], "response_pieces", falling_position),
        (sys.modules[__name__], "targets", local_roll),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "mutant"), MUTANTS)
def test_a_mutant_is_caught(owner: object, name: str, mutant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        deque(map(check, EXAMPLES), maxlen=0)


# ---------------------------------------------------------------- by hand


def test_a_span_of_no_rows_stays_in_range() -> None:
    span = Span(row=4, position=10, length=3)
    assert span.clip(11, 12) == Span(5, 11, 1)
    assert span.clip(0, 10) == Span(4, 10, 0)
    assert span.clip(0, 5) == Span(4, 5, 0)
    assert span.clip(20, 30) == Span(7, 20, 0)


@pytest.mark.parametrize(
    ("layout", "per_rank"),
    [
        (Layout(Batch([5, 2, 7], [3, 1, 4])), [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 5, 6]]),
        (Layout(Batch([2, 3], [1, 1]), "bshd", max_seq_len=4), [[0, 1, -1, -1, 0, 1, 2, -1]]),
        (Layout(Batch([8], [2]), cp_size=2), [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (Layout(Batch([7], [2]), cp_size=2), [[0, 1, 6, -1], [2, 3, 4, 5]]),
        (Layout(Batch([3], [2]), cp_size=4), [[0, -1], [1, -1], [2, -1], [-1, -1]]),
        (Layout(Batch([6, 10], [4, 9]), "thd", "contiguous", 2), [[0, 1, 2, 3, 4, 5, 0, 1], [2, 3, 4, 5, 6, 7, 8, 9]]),
        (Layout(Batch([5], [1]), cp_split="contiguous", cp_size=3), [[0, 1], [2, 3], [4, -1]]),
        (Layout(Batch([3, 1], [1, 0]), "bshd", "contiguous", 2), [[0, 1, 0, -1], [2, -1, -1, -1]]),
    ],
    ids=str,
)  # fmt: skip
def test_positions_by_hand(layout: Layout, per_rank: list[list[int]]) -> None:
    positions = [torch.arange(n) for n in layout.batch.total_lengths]
    assert [local_tokens(positions, layout, r, -1).tolist() for r in range(layout.cp_size)] == per_rank


def test_cu_seqlens() -> None:
    batch = Batch([5, 2, 7], [3, 1, 4])
    assert Layout(batch).cu_seqlens == (0, 5, 7, 14)
    assert Layout(batch, cp_split="contiguous", cp_size=4).cu_seqlens == (0, 5, 7, 14)
    assert Layout(batch, cp_size=2).cu_seqlens == (0, 8, 12, 20)
    assert Layout(Batch([7], [2]), cp_size=2).cu_seqlens == (0, 8)
    assert Layout(batch, cp_size=1).cu_seqlens == (0, 5, 7, 14)
    assert Layout(Batch([], []), cp_size=2).cu_seqlens == (0,)
    assert Layout(batch, "bshd").cu_seqlens == (0, 7, 14, 21)
    assert Layout(batch, "bshd", cp_size=2).cu_seqlens == (0, 8, 16, 24)


def test_entropy_is_absent_or_aligned() -> None:
    layout = Layout(Batch([8, 8], [2, 2]), cp_split="contiguous", cp_size=4)
    log_prob, entropy = torch.arange(4.0), torch.arange(4.0, dtype=torch.float64)
    for rank, lengths in enumerate(([0, 0], [2, 0], [0, 0], [0, 2])):
        log_probs, nothing = extract(log_prob, None, layout, rank)
        assert nothing is None
        assert [len(piece) for piece in log_probs] == lengths
        _, entropies = extract(log_prob, entropy, layout, rank)
        assert entropies is not None
        assert [(len(piece), piece.dtype) for piece in entropies] == [(n, torch.float64) for n in lengths]


def test_pieces_of_vectors_and_views() -> None:
    layout = Layout(Batch([8], [2]), cp_size=2)
    wide = torch.arange(12.0).view(3, 4).T  # not contiguous, [4, 3]
    assert response_pieces(wide, layout, 0)[0].tolist() == [wide[2].tolist()]
    assert response_pieces(wide, layout, 1)[0].tolist() == [wide[3].tolist()]
    assert response_pieces(torch.zeros(1).expand(4), layout, 1)[0].tolist() == [0.0]
    flat = torch.arange(8.0)
    (piece,) = response_pieces(flat, Layout(Batch([8], [2])), 0)
    assert piece.data_ptr() == flat[5:].data_ptr()  # one span: a view, not a copy


# ---------------------------------------------------------------- cases from the field: slices, boundaries, padding


def scored_positions(layout: Layout, rank: int) -> list[list[int]]:
    positions = local_tokens([torch.arange(n) for n in layout.batch.total_lengths], layout, rank, -1)
    return [piece.tolist() for piece in response_pieces(positions, layout, rank)]


def test_verl_4250_target_at_the_end_of_a_chunk() -> None:
    layout = Layout(Batch([8], [4]), cp_size=2)
    assert targets([torch.arange(8)], layout, 0).tolist() == [1, 2, 7, NO_TARGET]  # not 6 after 1
    assert targets([torch.arange(8)], layout, 1).tolist() == [3, 4, 5, 6]


def test_slime_e8d3f58f3_token_offsets_are_not_logit_offsets() -> None:
    layout = Layout(Batch([8], [2]), cp_size=2)
    assert [scored_positions(layout, rank) for rank in (0, 1)] == [[[6]], [[5]]]


@pytest.mark.parametrize("cp_split", ["zigzag", "contiguous"])
def test_verl_6001_a_sample_shorter_than_the_alignment(cp_split: str) -> None:
    layout = Layout(Batch([1], [0]), cp_split=cp_split, cp_size=2)  # type: ignore[arg-type]
    assert all(span.length == 0 for (*spans,) in layout.spans(1) for span in spans)
    assert scored_positions(layout, 1) == [[]]


def test_verl_4656_a_sample_shorter_than_the_chunks() -> None:
    layout = Layout(Batch([3], [2]), cp_size=4)
    assert [scored_positions(layout, rank) for rank in range(4)] == [[[0]], [[1]], [[]], [[]]]


def test_nemo_rl_3182_padding_belongs_to_no_sample() -> None:
    layout = Layout(Batch([5, 3], [2, 2]), pad_multiple=10)
    assert layout.cu_seqlens[-1] == 8
    assert layout.rows == 10
    assert scored_positions(layout, 0) == [[2, 3], [0, 1]]
    assert local_tokens([torch.arange(5), torch.arange(3)], layout, 0, -7).tolist()[8:] == [-7, -7]


def test_slime_2255_the_last_zero_is_nothing() -> None:
    assert scored_positions(Layout(Batch([4, 3], [0, 1])), 0) == [[], [1]]


def test_trl_3711_prompt_length_zero() -> None:
    with pytest.raises(ValueError, match=r"sample 1: total_length 4, response_length 4: no prompt to predict from"):
        Batch([3, 4], [2, 4])


def test_torchtitan_3347_no_target_over_the_end_of_a_document() -> None:
    assert targets([torch.arange(3), 10 + torch.arange(2)], Layout(Batch([3, 2], [1, 1])), 0).tolist() == [
        1,
        2,
        -100,
        11,
        -100,
    ]


def test_easycontext_47_length_not_divisible() -> None:
    assert [scored_positions(Layout(Batch([7], [6]), cp_size=2), r) for r in (0, 1)] == [[[0, 1]], [[2, 3, 4, 5]]]


# ---------------------------------------------------------------- bad input: an error with the sample and the numbers


@pytest.mark.parametrize(
    ("totals", "responses", "message"),
    [
        ([3, 4], [2, 5], "sample 1: response_length 5 is more than total_length 4"),
        ([3, -4], [2, 0], "sample 1: total_length is -4; it must be at least 0"),
        ([3, 4], [2, -1], "sample 1: response_length is -1; it must be at least 0"),
        ([3, 4.0], [2, 1], "sample 1: total_length is 4.0, which is not an integer"),
        ([3, "4"], [2, 1], "sample 1: total_length is '4', which is not an integer"),
        ([True], [0], "sample 0: total_length is True, which is not an integer"),
        ([torch.tensor(3.0)], [0], "sample 0: total_length is tensor(3.), which is not an integer"),
        ([None], [0], "sample 0: total_length is None, which is not an integer"),
        ([3, 4], [2], "2 total_lengths but 1 response_lengths"),
        ([4], [4], "sample 0: total_length 4, response_length 4: no prompt"),
    ],
)
def test_bad_batches(totals: list[int], responses: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Batch(totals, responses)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qkv_format": "sbhd"}, "qkv_format is 'sbhd'"),
        ({"cp_split": "ring"}, "cp_split is 'ring'"),
        ({"cp_size": 0}, "cp_size is 0; it must be at least 1"),
        ({"cp_size": 1.5}, "cp_size is 1.5, which is not an integer"),
        ({"cp_size": -1}, "cp_size is -1"),
        ({"pad_multiple": 0}, "pad_multiple is 0"),
        ({"max_seq_len": 8}, "max_seq_len 8 is for bshd"),
        ({"qkv_format": "bshd", "pad_multiple": 4}, "pad_multiple 4 is for thd"),
        ({"qkv_format": "bshd", "max_seq_len": 4}, "sample 1: total_length 5 is more than max_seq_len 4"),
        ({"qkv_format": "bshd", "max_seq_len": 7.5}, "max_seq_len is 7.5, which is not an integer"),
    ],
)
def test_bad_layouts(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(Batch([3, 5], [1, 1]), **options)  # type: ignore[arg-type]


def test_a_bad_max_seq_len_is_found_without_samples() -> None:
    with pytest.raises(ValueError, match="max_seq_len is -1"):
        Layout(Batch([], []), "bshd", max_seq_len=-1)


def test_bad_ranks_buffers_and_tokens() -> None:
    layout = Layout(Batch([3, 5], [1, 1]), cp_size=2)
    for rank in (2, -1, 0.5):
        with pytest.raises(ValueError, match="cp_rank"):
            layout.spans(rank)  # type: ignore[arg-type]
    for wrong in (torch.zeros(5), torch.zeros(7), torch.zeros(())):
        with pytest.raises(
            ValueError, match=rf"cp rank 1 of 2: the buffer has shape \{list(wrong.shape)}, the layout says 6 rows"
        ):
            response_pieces(wrong, layout, 1)
    with pytest.raises(ValueError, match="tokens of 1 samples, the layout has 2"):
        local_tokens([torch.arange(3)], layout, 0)
    with pytest.raises(ValueError, match=r"sample 1: tokens of shape \[4\], total_length is 5"):
        targets([torch.arange(3), torch.arange(4)], layout, 0)
    for first, second in ((torch.ones(3), torch.ones(5)), (torch.arange(3, dtype=torch.uint8), torch.arange(5))):
        with pytest.raises(ValueError, match="not integers of one dtype"):
            local_tokens([first, second], layout, 0)


def test_lengths_and_sizes_may_be_any_integer_type() -> None:
    batch = Batch(torch.tensor([3, 5]), torch.tensor([1, 1]))  # type: ignore[arg-type]
    assert batch == Batch([3, 5], [1, 1])
    assert all(type(n) is int for n in (*batch.total_lengths, *batch.response_lengths))
    layout = Layout(batch, cp_size=torch.tensor(2))  # type: ignore[arg-type]
    assert hash(layout) == hash(Layout(batch, cp_size=2))
    assert layout.spans(torch.tensor(1)) == layout.spans(1)  # type: ignore[arg-type]
    assert type(layout.spans(torch.tensor(1))[0][0].row) is int  # type: ignore[arg-type]


def test_narrow_token_types_have_room_for_no_target() -> None:
    assert targets([torch.arange(3, dtype=torch.uint8)], Layout(Batch([3], [1])), 0).tolist() == [
        1,
        2,
        slicing.NO_TARGET,
    ]
