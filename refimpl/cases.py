"""What ``check`` puts before a candidate on simulated ranks, and how it judges the answer: one judge for each kind."""

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad

from refimpl.candidate import Broken, Candidate, Finding, call
from refimpl.diagrams import boxes, describe
from refimpl.layout import Batch, Layout

gradients = partial(grad, retain_graph=True, allow_unused=True)


def held_rows(layout: Layout, rank: int) -> list[list[tuple[int, int]]]:
    """For each sample (position, row) of the predicting rows that a rank holds, in rising position, row by row."""
    rows = [(box.sample, box.position, row) for row, box in enumerate(boxes(layout, rank)) if box and box.predicting]
    return [sorted((p, row) for i, p, row in rows if i == sample) for sample in range(len(layout.batch))]


def _pieces(got: Any, layout: Layout, what: str) -> list[Tensor]:
    if not isinstance(got, list | tuple):
        raise Broken(f"{what}: a list of {len(layout.batch)} tensors", repr(got))
    if not all(isinstance(piece, Tensor) for piece in got):
        inside = [describe(p) if isinstance(p, Tensor | None) else type(p).__name__ for p in got]
        raise Broken(f"{what}: a list of {len(layout.batch)} tensors", f"[{', '.join(inside)}]")
    if len(got) != len(layout.batch):
        raise Broken(f"{what}: a tensor for each of {len(layout.batch)} samples", f"{len(got)} tensors")
    return list(got)


def _two(fn: Candidate, *args: Any) -> Any:
    """What the candidate returns, if it is two things."""
    got = call(fn, *args)
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Broken("two lists or tensors", repr(got))
    return got


def judge_extraction(fn: Candidate, layout: Layout, rank: int) -> Iterator[Finding]:
    """C1 to C5 and C7, on fp16 buffers: a value of its own in each row that scores a token, NaN in all others."""
    held, code = held_rows(layout, rank), torch.full((layout.rows,), torch.nan, dtype=torch.float16)
    for row in (row for pairs in held for _, row in pairs):
        code[row] = row
    log_prob, entropy = (-code - 1).requires_grad_(), (code + 1000).requires_grad_()
    for asked in (entropy, entropy.detach(), None):  # with gradient, without, not asked for
        got = _two(fn, log_prob, asked, layout, rank)
        both = {"log-probs": (_pieces(got[0], layout, "log-probs"), log_prob, entropy)}
        if asked is not None:
            both["entropies"] = (_pieces(got[1], layout, "entropies"), asked, log_prob)
        elif got[1] is not None:
            yield Finding("C5", "entropy not asked for", "None in place of the list", str(got[1]))
        for name, (pieces, buffer, other) in both.items():
            for i, (piece, pairs) in enumerate(zip(pieces, held, strict=True)):
                yield from _judge_piece(piece, buffer, other, [row for _, row in pairs], f"{name} of sample {i}")
    now, before = torch.stack([log_prob.detach(), entropy.detach()]), torch.stack([-code - 1, code + 1000])
    if not torch.allclose(now, before, 0, 0, equal_nan=True):
        yield Finding("C7", "", "the caller's buffers as they were", "other values in them")


def _judge_piece(piece: Tensor, buffer: Tensor, other: Tensor, rows: list[int], where: str) -> Iterator[Finding]:
    want, weights = buffer.detach()[rows], torch.arange(1.0, len(rows) + 1, dtype=buffer.dtype)
    if piece.shape != want.shape or not torch.equal(piece.detach().double(), want.double()):
        yield Finding("C2", where, f"rows {rows}: {want.tolist()}", str(piece.tolist()))
        return
    if (piece.dtype, piece.device) != (buffer.dtype, buffer.device):
        yield Finding("C3", where, f"{buffer.dtype} on {buffer.device}", f"{piece.dtype} on {piece.device}")
    if not buffer.requires_grad:
        if piece.requires_grad:
            yield Finding("C5", where, "no gradient where the entropy has none", describe(piece))
        return
    loss = (piece * weights).sum()
    reached, astray = gradients(loss, (buffer, other)) if piece.requires_grad else (None, None)
    if astray is not None and astray.any():
        yield Finding("C7", where, "no gradient in the other buffer", str(astray.tolist()))
    if reached is None:
        yield Finding("C4", where, "a path to the buffer", describe(piece))
    elif reached.tolist() != torch.zeros_like(buffer).index_put((torch.tensor(rows).long(),), weights).tolist():
        yield Finding("C7", where, f"a gradient of {weights.tolist()} on rows {rows}", str(reached.tolist()))


def judge_tokens(fn: Candidate, layout: Layout, rank: int, *, shift: int, fill: int) -> Iterator[Finding]:
    """In each row the token at its position plus ``shift``, or ``fill``."""
    tokens = [100 * (i + 1) + torch.arange(n) for i, n in enumerate(layout.batch.total_lengths)]
    known = [[*sample.tolist(), fill] for sample in tokens]
    want = [fill if box is None else known[box.sample][box.position + shift] for box in boxes(layout, rank)]
    got = call(fn, given := [sample.clone() for sample in tokens], layout, rank)
    if not all(map(torch.equal, given, tokens)):
        yield Finding("C7", "", "the caller's tokens as they were", str(given))
    if not isinstance(got, Tensor) or got.shape != (layout.rows,):
        raise Broken(f"a tensor of {layout.rows} rows", str(list(got.shape)) if isinstance(got, Tensor) else repr(got))
    if got.dtype != torch.int64:
        yield Finding("C3", "", "torch.int64, as the tokens", str(got.dtype))
    if got.tolist() != want:
        row = next(r for r, (a, b) in enumerate(zip(got.tolist(), want, strict=True)) if a != b)
        yield Finding("C2", f"row {row}", str(want), str(got.tolist()))


def judge_weights(fn: Candidate, layout: Layout, rank: int) -> Iterator[Finding]:
    """The weights of a mean per token, under masks that leave out each third token, and under masks of zeros."""
    for keep in (1.0, 0.0):
        masks = [(torch.arange(n) % 3 != 1) * keep for n in layout.batch.response_lengths]  # 1 0 1 1 0 1 ... or 0
        total = max(1.0, sum(float(mask.sum()) for mask in masks))
        got = _pieces(call(fn, given := [mask.clone() for mask in masks], layout, rank), layout, "weights")
        if not all(map(torch.equal, given, masks)):
            yield Finding("C7", "", "the caller's masks as they were", str(given))
        for i, (piece, pairs) in enumerate(zip(got, held_rows(layout, rank), strict=True)):
            first = layout.batch.first_predicting(i)
            want = [float(masks[i][p - first]) / total for p, _ in pairs]
            where = f"weights of sample {i}, {'some' if keep else 'no'} token counts"
            yield from differ(where, piece, torch.tensor(want, dtype=torch.float64))


def by_convention(what: str, got: Tensor, want: Tensor) -> Iterator[Finding]:
    """``differ``; C8 if it is a whole number of times too large or small, as the other convention makes it."""
    for finding in differ(what, got, want):
        factors = [factor for n in (2, 3, 4) for factor in (n, 1 / n)]
        other = got.shape == want.shape and any(torch.allclose(got.double(), want * factor) for factor in factors)
        yield replace(finding, clause="C8") if other else finding


def exact(logits: Tensor, targets: Tensor, upon: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and, for these incoming gradients, the gradient of the logits: the formulas in fp64."""
    x = logits.detach().double()
    p, log_p = torch.softmax(x, 1), torch.log_softmax(x, 1)
    plogp = torch.where(p == 0, 0, p * log_p)
    of_entropy = -torch.where(p == 0, 0, p * (log_p - plogp.sum(1, keepdim=True)))
    slope = upon[0][:, None] * (torch.nn.functional.one_hot(targets, x.shape[1]) - p) + upon[1][:, None] * of_entropy
    return log_p.gather(1, targets[:, None])[:, 0], -plogp.sum(1), slope


def differ(what: str, got: Any, want: Tensor, near: float = 1e-5) -> Iterator[Finding]:
    """C7, if ``got`` is not what is wanted, to a relative or absolute error of ``near``; NaN is equal to NaN."""
    if not isinstance(got, Tensor) or got.shape != want.shape:
        yield Finding("C7", what, f"shape {list(want.shape)}", str(getattr(got, "shape", got)))
    elif not torch.allclose(got.double(), want, near, near, equal_nan=True):
        yield Finding("C7", what, _short(want), _short(got))


def judge_pair(fn: Candidate, given: tuple[Any, ...], rank: int) -> Iterator[Finding]:
    """Values and gradient against fp64, and the caller's logits unchanged."""
    name, values, wanted, *memory = given
    dtype, stride = memory or (torch.float32, 0)
    columns, near = len(values[0]) if values else 3, 1e-5 if dtype == torch.float32 else 2e-2
    logits = torch.empty_strided((len(wanted), columns), (stride or columns, 1), dtype=dtype)
    logits.copy_(torch.tensor(values).view_as(logits))  # memory between rows far apart is never touched
    goals, before = torch.tensor(wanted).long(), logits.clone()
    logits.requires_grad_()
    where = f"{name}: logits {textwrap.shorten(str(values), 80, placeholder=' ...')}, targets {wanted}"
    upon = torch.arange(1.0, len(wanted) + 1), 3 - 2 * torch.arange(0.0, len(wanted))  # each row and output its own
    log_prob, entropy, _ = exact(logits, goals, upon)
    try:
        got = _two(fn, logits, goals)
        if not all(isinstance(value, Tensor) for value in got):
            raise Broken("two tensors", repr(got))
        for what, value, want in (("log-prob", got[0], log_prob), ("entropy", got[1], entropy)):
            for finding in differ(f"{what}, {where}", value, want, near):
                yield finding
                return
        if not all(value.requires_grad for value in got):
            yield Finding("C4", where, "a graph to the logits", "values without gradient")
            return
        none = torch.zeros(len(goals))
        for of, asked in {"both": upon, "log-prob alone": (upon[0], none), "entropy alone": (none, upon[1])}.items():
            losses = [(value * g).sum() for value, g in zip(got, asked, strict=True) if g is not none]
            (gradient,) = call(gradients, sum(losses), logits)
            if gradient is None:
                yield Finding("C4", f"gradient of {of}, {where}", "a gradient", "None")
            else:
                yield from differ(f"gradient of {of}, {where}", gradient, exact(logits, goals, asked)[2], near)
        if not torch.equal(goals, torch.tensor(wanted).long()):
            yield Finding("C7", where, "the caller's targets as they were", str(goals.tolist()))
        if not bool(((logits == before) | (logits.isnan() & before.isnan())).all()):
            yield Finding("C7", where, "the caller's logits as they were", _short(logits))
    except Broken as broken:
        yield Finding("C1", where, *broken.args)


def _short(values: Tensor) -> str:
    rows = values.detach().double().tolist()
    rounded = [[round(v, 4) for v in row] if isinstance(row, list) else round(row, 4) for row in rows]
    return textwrap.shorten(str(rounded), 300, placeholder=" ...")


INF, NAN = float("inf"), float("nan")
ROWS: dict[str, tuple[Any, ...]] = {  # logits, targets; of some the dtype, and how many numbers further each row begins
    "one row": ([[1, 2, 3]], [1]),
    "a uniform row": ([[0, 0, 0, 0]], [0]),
    "a logit of -inf": ([[1, 2, -INF]], [1]),
    "two equal logits and -inf": ([[0, 0, -INF]], [0]),
    "a logit far below": ([[0, -200]], [0]),
    "a target far below": ([[0, -200]], [1]),
    "an offset of 10000": ([[10001, 10002, 10003]], [2]),
    "two rows": ([[1, -1, 0.5], [0, 3, -2]], [2, 1]),
    "bf16": ([[1.5, -1, 0.5, 4]], [0], torch.bfloat16, 0),
    "a row of NaN beside another": ([[NAN, 1], [1, 2]], [0, 1]),
    "a row of -inf beside another": ([[-INF, -INF], [1, 2]], [0, 1]),
    "three rows": ([[1, -1], [0.5, 0.25], [-3, 3]], [0, 1, 1]),
    "two rows 2^31 numbers apart, in bf16": ([[1, 2, 3], [0.5, -1, 0]], [1, 2], torch.bfloat16, 2**31),
    "a row of 5000": ([[i % 7 - 3.0 for i in range(4990)] + [9.0] * 10], [4999]),  # the largest in the last tile
    "no rows": ([], []),
}


HISTORY = ([16], [14]), ([6, 10], [4, 9]), ([8, 8], [5, 6]), ([10, 6], [9, 4]), ([16], [4])
BATCHES = [Layout(Batch(*lengths), "thd", "contiguous", 2) for lengths in HISTORY]  # those of the bug's history
BATCHES += [Layout(Batch([4, 4], [2, 2]), "thd", "contiguous", 2, pad_multiple=8)]
BATCHES += [Layout(Batch([8, 8], [2, 2]), "thd", "contiguous", 4)]


def named(layout: Layout) -> str:
    """A layout with its lengths, as one line."""
    batch = layout.batch
    return f"{layout}, {layout.rows} rows, lengths {list(batch.total_lengths)} {list(batch.response_lengths)}"


def layouts() -> dict[str, Layout]:
    """Ways to lay out some batches, fewest rows first: lengths of 1, shorter than the chunks, indivisible, R = 0."""
    batches = [Batch([n], [r]) for n in range(1, 8) for r in range(n)]
    batches += [Batch([1, 1], [0, 0]), Batch([2, 3], [1, 0]), Batch([3, 2], [2, 1]), Batch([9, 1], [8, 0])]
    batches += [Batch([5, 2, 7], [3, 1, 4]), Batch([4, 1, 6], [0, 0, 5]), Batch([8, 8], [2, 2])]
    ways = product(batches, (1, 2, 3, 4), ("zigzag", "contiguous"), ("thd", "bshd"))
    found = [Layout(batch, form, split, cp) for batch, cp, split, form in ways]  # type: ignore[arg-type]
    found += [Layout(Batch([3, 5], [1, 4]), "bshd", "zigzag", cp, max_seq_len=8) for cp in (1, 2)]
    ordered = sorted([*found, *BATCHES], key=lambda layout: (layout.rows * layout.cp_size, layout.cp_size))
    return {named(layout): layout for layout in ordered}  # each once: of cp 1 there are two, of one kind
