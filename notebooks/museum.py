"""Real bugs: what the old code of ``bugs.py`` does on the smallest input that shows it, beside what is right.

The links lead to the reports. ``EXHIBITS`` is what notebook 08 shows, and what the grader is tried on: both sides of an
exhibit are functions with a signature that the grader knows.
"""

import datetime
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bugs
import kinds
from refimpl import bench, check, history, ranks, slicing
from refimpl.candidate import Kind
from refimpl.diagrams import Drawing
from refimpl.entropy import log_prob_and_entropy
from refimpl.layout import Batch, Layout
from refimpl.recorder import table


@dataclass(frozen=True)
class Exhibit:
    """A bug: what kind of symptom, where it was reported, what one saw; its code, and what is right instead.

    ``on`` calls either side on the smallest input and returns what to show. ``graded_as`` is a kind of the grader, and
    ``breaks`` are the clauses for which it rejects the old code.
    """

    kind: str
    link: str
    symptom: str
    smallest: str
    old: Any
    new: Any
    on: Callable[[Any], Any]
    why: str
    caught_by: str
    graded_as: str | Kind
    breaks: str


def code(fn: Any) -> str:
    """The source of a candidate, without its docstring; of a step, its redistribution."""
    if isinstance(fn, history.Step):
        return code(fn.redistribute)
    if isinstance(fn, partial):
        given = ", ".join(f"{name}={value!r}" for name, value in fn.keywords.items())
        return f"{code(fn.func)}\n\ncalled with {given}"
    source = re.sub(r'\n +""".*?"""\n?(?=\n)', "", inspect.getsource(fn), count=1, flags=re.DOTALL)
    return re.sub("  # type: ignore.*", "", source).strip()


def show(name: str) -> None:
    """Print an exhibit's label, and the old code."""
    exhibit = EXHIBITS[name]
    print(f"{exhibit.kind}: {exhibit.symptom}\nsmallest input: {exhibit.smallest}\n\n{code(exhibit.old)}")


def reveal(name: str, prediction: Any = None) -> None:
    """Both sides, whether the old one did what was predicted, why, the test that would have caught it, the report."""
    exhibit = EXHIBITS[name]
    said = {side: outcome(exhibit, side) for side in ("old", "new")}
    for side, value in said.items():
        per_rank = isinstance(value, list) and len(str(value)) > 100
        print(f"{side}:", *([f"\n  rank {rank}: {one}" for rank, one in enumerate(value)] if per_rank else [value]))
    if prediction is not None:
        print(compare(prediction, said["old"]))
    print(f"why: {exhibit.why}\ncaught by: {exhibit.caught_by}\nreported in: {exhibit.link}")


def outcome(exhibit: Exhibit, side: str) -> Any:
    """What a side, ``"old"`` or ``"new"``, does on the smallest input; an error as its first line."""
    try:
        return exhibit.on(getattr(exhibit, side))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def compare(prediction: Any, seen: Any) -> str:
    """Whether the numbers are the same, to 0.01 and however they are nested; words are the reader's to compare."""
    try:
        given, wanted = _numbers(prediction), _numbers(seen)
    except ValueError:
        return "compare it with what you predicted"
    pairs = zip(given, wanted, strict=False)
    same = all(math.isclose(a, b, abs_tol=0.01) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)
    return "as you predicted" if same and len(given) == len(wanted) else "not what you predicted"


def _numbers(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for part in value for number in _numbers(part)]
    return [float(value)]


def first_finding(name: str) -> str:
    """The smallest case in which the grader rejects the old code, and the clause; quick, since it stops there."""
    exhibit = EXHIBITS[name]
    for case in check.cases(exhibit.graded_as):
        for finding, _ in case.findings(exhibit.old):
            return f"{finding.clause:7}{name}: {case}"
    return f"nothing found: {name}"


# ---------------------------------------------------------------- what each kind of function does on an input


def targets_of(layout: Layout, fn: Any) -> list[int]:
    """On rank 0, for tokens that are their positions."""
    rows: Tensor = fn([torch.arange(n) for n in layout.batch.total_lengths], layout, 0)
    return rows.tolist()


def rows_taken(layout: Layout, fn: Any) -> list[list[int]]:
    """On rank 0, for log-probs that are their rows."""
    return [piece.int().tolist() for piece in fn(torch.arange(layout.rows).float(), None, layout, 0)[0]]


def pieces_of(values: list[float], fn: Any) -> list[float]:
    """The piece of a response of one token, from a prompt of one."""
    return rounded(fn(torch.tensor(values), None, Layout(Batch([2], [1])), 0)[0][0])


def on_row(logits: list[float], target: int, which: int, fn: Any) -> list[float]:
    """The log-prob (0) or the entropy (1) of one row."""
    return rounded(fn(torch.tensor([logits]), torch.tensor([target]))[which])


def slopes(logits: list[list[float]], incoming: tuple[list[float], list[float]], fn: Any) -> list[list[float]]:
    """The gradient of the logits, for these incoming gradients of log-prob and entropy; all targets are 0."""
    x = torch.tensor(logits, requires_grad=True)
    pair = fn(x, torch.zeros(len(logits), dtype=torch.long))
    (gradient,) = torch.autograd.grad(pair, x, [torch.tensor(g) for g in incoming])
    return [rounded(row) for row in gradient]


def far_apart(fn: Any) -> list[float]:
    """The log-probs of two rows whose memory begins 2^31 numbers apart: of these 4 GiB two pages are touched."""
    logits = torch.empty_strided((2, 2), (2**31, 1), dtype=torch.bfloat16).zero_()
    return rounded(fn(logits, torch.tensor([0, 1]))[0])


def first_column(fn: Any) -> list[float]:
    """The log-prob of the first of 5 equal logits on two real ranks with 3 columns each."""
    log_prob, *_ = ranks.run(kinds.run_shards, fn, ([[0.0] * 6], [0], [0, 3, 6], 5), tp=2)[0]
    return rounded(log_prob)


def weights_on_both(layout: Layout, mask: list[float], fn: Any) -> list[list[float]]:
    """The weights of one sample's mean on each of 2 ranks."""
    return [rounded(fn([torch.tensor(mask)], layout, rank)[0]) for rank in range(2)]


def whole_gradients(fn: Any) -> int:
    """How many gradients of ``[T, V]`` are handed from node to node in backward of 4 samples."""
    return kinds.run_from_logits(fn, Layout(Batch([3] * 4, [2] * 4)), 0)[-1]


def on_ranks(run: Callable[..., Any], part: Callable[[Any], Any], *given: Any) -> Callable[[Any], list[Any]]:
    """A function of a candidate: on each of two ranks, ``part`` of what it returns, or how it ends."""

    def of(fn: Any) -> list[Any]:
        ends = ranks.observe(run, fn, *given, cp=2, timeout=3)
        return [part(end.value) if end.status == "returned" else end.summary for end in ends]

    return of


def rounded(values: Tensor) -> list[float]:
    """To 4 places."""
    return [round(v, 4) + 0.0 for v in values.tolist()]


HALF = Layout(Batch([16], [4]), cp_split="contiguous", cp_size=2)
MIXED = Layout(Batch([6, 10], [4, 9]), cp_split="contiguous", cp_size=2)
EARLY: kinds.PerRank = [([5.0, 1.0], [0.0, 0.0]), ([3.0, 7.0], [1.0, 1.0])]
ONES: kinds.PerRank = [([1.0, 1.0], [1.0, 1.0])] * 2
GITHUB = "https://github.com/"
WRONG, SHARD = "silent wrong number", "the shard's own tokens"

EXHIBITS = {
    "rolled after the split": Exhibit(
        WRONG,
        f"{GITHUB}verl-project/verl/pull/4250",
        "the loss of a run with context parallelism is a little higher than without",
        "one sample of 8 tokens (token = position), cp 2, zigzag; targets of rank 0, which holds 0 1 6 7",
        bugs.rolled_after_the_split,
        slicing.targets,
        partial(targets_of, Layout(Batch([8], [2]), cp_size=2)),
        "the next row of the rank is the next token of the sample only within a chunk; position 1 is followed by 2",
        "targets of every rank against the whole sample (C2)",
        "targets",
        "C2",
    ),
    "shifted after packing": Exhibit(
        WRONG,
        f"{GITHUB}pytorch/torchtitan/pull/3347",
        "the loss of packed documents is a little higher than that of single ones",
        "documents of 3 and 2 tokens (token = position) in one row",
        bugs.shifted_after_packing,
        slicing.targets,
        partial(targets_of, Layout(Batch([3, 2], [1, 1]))),
        "the last token of a document is trained to predict the first of the next",
        "no target at a sample's last position",
        "targets",
        "C2",
    ),
    "token rows for logit rows": Exhibit(
        WRONG,
        f"{GITHUB}THUDM/slime/commit/e8d3f58f3",
        "log-probs that do not fit their tokens",
        "one sample of 8 tokens, response of 2: the rows whose log-probs are taken",
        bugs.rows_of_tokens,
        slicing.extract,
        partial(rows_taken, Layout(Batch([8], [2]))),
        "the row at p scores the token at p + 1, so each log-prob is that of the token after",
        "log-probs that say which position they score",
        "extraction",
        "C2",
    ),
    "no prompt": Exhibit(
        WRONG,
        f"{GITHUB}huggingface/trl/pull/3711",
        "the first log-prob of some samples does not fit, or all of them are missing",
        "lengths 3 and 4, responses 2 and 4",
        bugs.packed_slices,
        bugs.right_rows,
        lambda fn: fn([3, 4], [2, 4]),
        "no row scores the first token; the slice begins in the neighbour, or, in the first sample, at -1",
        "response = total as an input, expecting an error",
        kinds.ROWS,
        "input",
    ),
    "the last none": Exhibit(
        WRONG,
        f"{GITHUB}THUDM/slime/pull/2255",
        "samples that should count nothing count",
        "one sample of 5 tokens, response of 0",
        bugs.last_n,
        bugs.right_rows,
        lambda fn: fn([5], [0]),
        "[-n:] with n = 0 is [0:], everything",
        "response length 0 as an input",
        kinds.ROWS,
        "C2",
    ),
    "None in the list": Exhibit(
        "crash and hang",
        f"{GITHUB}THUDM/slime/pull/1846",
        "a job that stands still, with an error in some of its logs",
        "one sample of 16, response of 4, allgather over 2 ranks: rank 0 holds none of it; gradients of the log-probs",
        history.LINE["#1822"],
        history.LINE["now"],
        on_ranks(history.train, lambda got: rounded(got.of_log_prob), HALF),
        "rank 0 has nothing but None for entropies, hands it back without the all-reduce, and cannot concatenate it",
        "every rank issues the same collectives, on a batch with an empty rank (C6)",
        "step",
        "C6",
    ),
    "zeros that ask": Exhibit(
        f"{WRONG}, then a hang",
        f"{GITHUB}THUDM/slime/pull/2123",
        "a job that stands still, without an error in any log",
        "samples of 6 and 10, responses of 4 and 9, over 2 ranks; entropy coefficient 0; gradients of the log-probs",
        history.LINE["#2153"],
        history.LINE["now"],
        on_ranks(history.train, lambda got: rounded(got.of_log_prob), MIXED, 0.0),
        "only the rank that lacks a piece has zeros, and only these ask for a gradient: it alone reduces the entropy's",
        "the same collectives on every rank, in backward too (C6); requires_grad equal on every rank (C5)",
        "step",
        "C4 C6",
    ),
    "an early return": Exhibit(
        "hang",
        f"{GITHUB}huggingface/trl/pull/4041",
        "training stops at the first batch in which a rank has no unmasked token",
        "2 ranks: values 5 and 1, both masked; values 3 and 7, neither",
        bugs.returns_early,
        bugs.mean_over_ranks,
        on_ranks(kinds.run_mean, lambda got: got[0], EARLY),
        "rank 0 decides by its own data not to take part; rank 1 waits for it",
        "the same collectives whatever a rank holds (C6)",
        kinds.MEAN,
        "C6",
    ),
    "kept in the graph": Exhibit(
        WRONG,
        f"{GITHUB}THUDM/slime/issues/1678",
        "training breaks down at logits of -inf, though no response token has one",
        "a buffer of 1 and -inf, of which row 0 scores a response token: its piece",
        bugs.kept_by_zero,
        slicing.extract,
        partial(pieces_of, [1.0, -torch.inf]),
        "0 times infinity is NaN; a slice of no rows keeps the graph without a number",
        "-inf in a row that scores nothing (C2)",
        "extraction",
        "C2",
    ),
    "p log p": Exhibit(
        WRONG,
        f"{GITHUB}pytorch/pytorch/issues/40553",
        "training breaks down as soon as a token is forbidden",
        "the entropy of logits 0, 0 and -inf; log 2 is right",
        bench.plain,
        log_prob_and_entropy,
        partial(on_row, [0.0, 0.0, -torch.inf], 0, 1),
        "p is 0 and log p is -inf, and their product is NaN",
        "a row with -inf, against a count by hand",
        "log_prob_entropy",
        "C7",
    ),
    "p log p, masked": Exhibit(
        WRONG,
        f"{GITHUB}ByteDance-Seed/VeOmni/pull/720",
        "the entropy is right, and training breaks down one step later",
        "the entropy's gradient at logits 0 and -inf",
        bugs.masked_where_p_is_0,
        log_prob_and_entropy,
        partial(slopes, [[0.0, -torch.inf]], ([0.0], [1.0])),
        "where() masks the value; backward still takes 0 times the slope of log at 0, which is infinite",
        "the gradient, not only the value, where p is 0",
        "log_prob_entropy",
        "C7",
    ),
    "the last tile": Exhibit(
        WRONG,
        f"{GITHUB}verl-project/verl/issues/5349",
        "probabilities that do not sum to 1, wherever the vocabulary is no multiple of the tile",
        "the log-prob of the last of logits -15 five times and -12; log-sum-exp is -11.7777",
        bugs.in_tiles,
        log_prob_and_entropy,
        partial(on_row, [-15.0] * 5 + [-12.0], 5, 0),
        "the last tile is filled up with two logits of 0, which outweigh all that are there: log-sum-exp 0.6932",
        "a vocabulary that is no multiple of the tile",
        "log_prob_entropy",
        "C7",
    ),
    "padded columns": Exhibit(
        WRONG,
        f"{GITHUB}NVIDIA/Megatron-LM/issues/1754",
        "log-probs are lower with tensor parallelism than without",
        "5 equal logits, 3 columns on each of 2 ranks; -log 5 is right",
        bugs.over_the_padding,
        bugs.unpadded,
        first_column,
        "the column that pads the vocabulary takes a share of the softmax",
        "tp 2 against one process, with a vocabulary that does not divide",
        kinds.SHARDS,
        "C7",
    ),
    "rows of different weight": Exhibit(
        WRONG,
        f"{GITHUB}NVIDIA/TransformerEngine/pull/2139",
        "the gradient is right as long as all rows have the same weight",
        "the gradient of 2 rows of logits 0 and 0, targets 0; incoming gradients of the log-probs 0 and 1",
        bugs.by_row_0,
        log_prob_and_entropy,
        partial(slopes, [[0.0, 0.0], [0.0, 0.0]], ([0.0, 1.0], [0.0, 0.0])),
        "row 1 is scaled by the 0 that came in for row 0",
        "incoming gradients that differ from row to row",
        "log_prob_entropy",
        "C7",
    ),
    "a sum and its backward": Exhibit(
        WRONG,
        f"{GITHUB}THUDM/slime/pull/1748",
        "the right loss, and a run that goes another way with each cp_size",
        "2 ranks with 2 unmasked values each; each calls backward on the mean of all 4: the gradient of a value",
        partial(bugs.mean_over_ranks, loss="own slice"),
        bugs.mean_over_ranks,
        on_ranks(kinds.run_mean, lambda got: rounded(got[1]), ONES),
        "each rank has the whole mean, and the sum's backward sums over the ranks once more",
        "cp 2 against cp 1 (C7, C8)",
        kinds.MEAN,
        "C8",
    ),
    "a slice per sample": Exhibit(
        "memory",
        f"{GITHUB}THUDM/slime/pull/1788",
        "out of memory in the loss, the more samples the sooner",
        "4 samples: how many gradients as large as all logits, [T, V], backward makes",
        history.extract_before_1788,
        bugs.all_at_once,
        whole_gradients,
        "the backward of each slice hands on a gradient for all rows, zeros where it left them out",
        "memory against the number of samples",
        kinds.FROM_LOGITS,
        "memory",
    ),
    "an offset of 32 bits": Exhibit(
        "crash",
        f"{GITHUB}linkedin/Liger-Kernel/issues/1248",
        "an illegal memory access, in long batches only",
        "two rows of two equal logits, 2^31 numbers apart: their log-probs",
        bugs.offsets_of_32_bits,
        log_prob_and_entropy,
        far_apart,
        "row 1 times the stride of 2^31 is negative in 32 bits; with 151,936 columns row 14,135 is the first such",
        "index arithmetic beyond 2^31",
        "log_prob_entropy",
        "C1",
    ),
    "a mean of own labels": Exhibit(
        WRONG,
        f"{GITHUB}OpenRLHF/OpenRLHF/issues/583",
        "training breaks down at some batches, and only if sequences are split over ranks",
        "one sample of 5 tokens, response of 4, of which the last counts; cp 2, allgather: the weights of the mean",
        bugs.over_own_labels,
        bugs.weights_per_token,
        partial(weights_on_both, Layout(Batch([5], [4]), cp_split="contiguous", cp_size=2), [0.0, 0.0, 0.0, 1.0]),
        "rank 0 holds no label, and divides nothing by nothing",
        "a rank without a label",
        "weights",
        "C7",
    ),
    SHARD: Exhibit(
        WRONG,
        f"{GITHUB}NVIDIA/Megatron-LM/issues/673",
        "the loss changes with cp_size",
        "one sample of 4 tokens, 3 of them response, cp 2, zigzag: the weights of the mean, on each rank",
        partial(bugs.over_own_shard, per="token"),
        bugs.weights_per_token,
        partial(weights_on_both, Layout(Batch([4], [3]), cp_size=2), [1.0] * 3),
        "each rank divides by the tokens that it holds, so that all weights sum to cp_size",
        "the weights of all ranks must sum to 1",
        "weights",
        "C7",
    ),
}


# ---------------------------------------------------------------- mysteries


@dataclass(frozen=True)
class Mystery:
    """A report, what may be behind it, which of these is, and the exhibit that it comes from."""

    report: Callable[[], str]
    choices: Sequence[str]
    right: int
    exhibit: str


def report(name: str) -> None:
    """Of a mystery: what was seen, and what may be behind it."""
    print(MYSTERIES[name].report())
    for number, choice in enumerate(MYSTERIES[name].choices, 1):
        print(f"{number}. {choice}")


def solve(name: str, cause: int | None) -> None:
    """Whether that is the cause of a mystery; if it is, the exhibit behind it."""
    mystery = MYSTERIES[name]
    if cause is None:
        print("not answered yet")
    elif cause != mystery.right:
        print("no: with that the report would look different")
    else:
        print(f"right: {mystery.choices[cause - 1]}\n\n{code(EXHIBITS[mystery.exhibit].old)}\n")
        reveal(mystery.exhibit)


def log_of(exhibit: Exhibit) -> str:
    """The record of its old code on two ranks."""
    return table(ranks.records(ranks.observe(kinds.run_mean, exhibit.old, EARLY, cp=2, timeout=3)))


MYSTERIES = {
    "A": Mystery(
        lambda: f"{log_of(EXHIBITS['an early return'])}\nIt happens at some batches, and never with one rank.",
        (
            "a rank sums tensors of another size",
            "a rank without data returns before the collective",
            "the network lost a message",
        ),
        2,
        "an early return",
    ),
    "B": Mystery(
        lambda: "5 equal logits, tp 2, 3 columns on each rank: log-prob {old[0]}; right is {new[0]}".format(
            **{side: outcome(EXHIBITS["padded columns"], side) for side in ("old", "new")}
        ),
        (
            "the all-reduce of the sums counts one shard twice",
            "the maximum was not exchanged",
            "columns that pad the vocabulary take part in the softmax",
        ),
        3,
        "padded columns",
    ),
    "C": Mystery(
        lambda: (
            f"weights of 3 response tokens, cp 2, zigzag: {outcome(EXHIBITS[SHARD], 'old')}; on one process 1/3 each"
        ),
        (
            "a factor of cp_size from the wrong gradient convention",
            "each rank divides by the tokens that it holds",
            "one token is counted on both ranks",
        ),
        2,
        SHARD,
    ),
}


# ---------------------------------------------------------------- slime's line

STEPS = {  # merged into slime's main branch
    "#1788 computed once, sliced": datetime.date(2026, 4, 4),
    "#1822 gradient back": datetime.date(2026, 4, 9),
    "#1846 zeros for None": datetime.date(2026, 4, 20),
    "#2144 fused": datetime.date(2026, 6, 29),
    "#2152 memory, and a TypeError": datetime.date(2026, 6, 30),
    "#2153 mends the TypeError": datetime.date(2026, 6, 30),
    "#2123 slices for zeros": datetime.date(2026, 7, 1),
}


def time_line() -> Drawing:
    """The steps of slime's history by the day they were merged."""
    from matplotlib.dates import DateFormatter, MonthLocator  # here, since ranks import this file too
    from matplotlib.figure import Figure

    figure = Figure((8.4, 2.4))
    axes = figure.add_axes((0.03, 0.14, 0.94, 0.74))
    days: list[Any] = list(STEPS.values())
    for number, (name, day) in enumerate(STEPS.items()):
        when: Any = day
        left = day < datetime.date(2026, 5, 15)
        height = 2 - number if left else number - 3  # no label is crossed by another one's line
        axes.plot([when, when], [0, height + 1], color="#666666", lw=0.8)
        axes.text(when, height + 1, f" {name} ", fontsize=7.5, va="center", ha="left" if left else "right")
    axes.plot(days, [0] * len(days), "o", color="#E69F00")
    axes.set(ylim=(-0.4, 4.8), yticks=[])
    axes.xaxis.set_major_locator(MonthLocator())  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(DateFormatter("%b %Y"))  # type: ignore[no-untyped-call]
    axes.tick_params(labelsize=7)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.set_title("slime: one bug, seven steps", fontsize=9, weight="bold", loc="left")
    return Drawing(
        figure, "\n".join(["slime: one bug, seven steps", *(f"{day}  {name}" for name, day in STEPS.items())])
    )
