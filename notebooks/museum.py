"""Real bugs, each as a small function that makes its mistake on the smallest input that shows it, beside ours.

Re-created in our own terms; the links lead to the reports. ``EXHIBITS`` is what notebook 08 shows.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.dates import DateFormatter, MonthLocator
from matplotlib.figure import Figure
from torch import Tensor

from refimpl import history, ranks, slicing
from refimpl.collectives import all_reduce
from refimpl.diagrams import Drawing
from refimpl.entropy import log_prob_and_entropy
from refimpl.layout import Batch, Layout
from refimpl.loss import token_weights, weighted_sum
from refimpl.recorder import table


def weights_per_sample(masks: Sequence[Tensor], layout: Layout, cp_rank: int) -> list[Tensor]:
    """Each sample weighs the same: right."""
    return token_weights(masks, layout, cp_rank, per="sample", dtype=torch.float64)


def weights_of_own_shard(masks: Sequence[Tensor], layout: Layout, cp_rank: int) -> list[Tensor]:
    """Megatron-LM #673: each rank divides by the tokens that it holds itself."""
    pieces = [(weight > 0).double() for weight in weights_per_sample(masks, layout, cp_rank)]
    return [piece / piece.sum().clamp_min(1) / len(pieces) for piece in pieces]


def own_share(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Backward starts from this rank's share: right, the ranks' gradients then add up."""
    return share


def summed_for_a_replicated_loss(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The shares are summed, and the convention fits the replicated loss that follows: right too."""
    return all_reduce(share, group, loss="replicated")


def summed_for_an_own_slice_loss(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """slime #1748: the sum's backward sums again, though each rank already holds the whole loss: cp_size times."""
    return all_reduce(share, group, loss="own slice")


def averaged(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Shares treated as if each rank had the mean of a replica of its own: 1 / cp_size."""
    return share / dist.get_world_size(group)


@dataclass(frozen=True)
class Normalisation:
    """How tokens are weighed, and what each rank calls backward on."""

    weights: Callable[[Sequence[Tensor], Layout, int], list[Tensor]]
    loss: Callable[[Tensor, dist.ProcessGroup], Tensor]


NORMALISATIONS = {
    "share": Normalisation(weights_per_sample, own_share),
    "sum, then a replicated loss": Normalisation(weights_per_sample, summed_for_a_replicated_loss),
    "divided by the shard's own tokens": Normalisation(weights_of_own_shard, own_share),
    "sum with the other convention": Normalisation(weights_per_sample, summed_for_an_own_slice_loss),
    "averaged over CP": Normalisation(weights_per_sample, averaged),
}


# ---------------------------------------------------------------- exhibits


@dataclass(frozen=True)
class Exhibit:
    """A bug: its kind, where it was reported, what one saw, and the test that would have caught it.

    ``old`` and ``new`` take no arguments: each runs its side on the smallest input and returns what to show.
    """

    kind: str
    link: str
    symptom: str
    smallest: str
    old: Callable[[], Any]
    new: Callable[[], Any]
    caught_by: str


def show(name: str, side: str = "") -> None:
    """Print an exhibit's label, or with ``side`` ``"old"`` or ``"new"`` what that side does."""
    exhibit = EXHIBITS[name]
    if not side:
        print(f"{exhibit.kind}: {exhibit.symptom}\nsmallest input: {exhibit.smallest}")
        return
    try:
        value = getattr(exhibit, side)()
        per_rank = isinstance(value, list) and len(str(value)) > 100
        print(f"{side}:", *([f"\n  rank {rank}: {one}" for rank, one in enumerate(value)] if per_rank else [value]))
    except Exception as error:
        print(f"{side}: {type(error).__name__}: {str(error).splitlines()[0]}")


def reveal(name: str, prediction: Any = None) -> None:
    """Both sides, whether the old one did what was predicted, the test that would have caught it, and the report."""
    show(name, "old")
    show(name, "new")
    exhibit = EXHIBITS[name]
    print(f"caught by: {exhibit.caught_by}\nreported in: {exhibit.link}")
    if prediction is not None:
        print("as you predicted" if _plain(prediction) == _plain(exhibit.old()) else "not what you predicted")


def _plain(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


def report(name: str) -> None:
    """Of a mystery: what was seen, and what may be behind it."""
    symptom, choices, _ = MYSTERIES[name]
    print(symptom())
    for number, choice in enumerate(choices, 1):
        print(f"{number}. {choice}")


def solve(name: str, cause: int | None) -> None:
    """Whether that is the cause of a mystery; if it is, the exhibit behind it."""
    _, choices, right = MYSTERIES[name]
    if cause is None:
        print("not answered yet")
    elif cause - 1 != right:
        print("no: with that the report would look different")
    else:
        print(f"right: {choices[right]}")
        reveal(BEHIND[name])


def rolled_after_the_split(layout: Layout, rank: int) -> list[int]:
    """Targets as a roll of the rank's own rows."""
    tokens = [torch.arange(n) for n in layout.batch.total_lengths]
    return slicing.local_tokens(tokens, layout, rank).roll(-1).tolist()


def own_targets(layout: Layout, rank: int) -> list[int]:
    """Targets from the whole sample."""
    tokens = [torch.arange(n) for n in layout.batch.total_lengths]
    return slicing.targets(tokens, layout, rank).tolist()


def rows_of_tokens(total: int, response: int) -> list[int]:
    """The rows of the response's tokens, where the rows that score them are wanted."""
    return list(range(total - response, total))


def packed_slices(total_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[list[int]]:
    """Rows end - R - 1 to end - 1 of a packed stream, whatever the lengths."""
    stream, found, end = list(range(sum(total_lengths))), [], 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        end += total
        found.append(stream[end - response - 1 : end - 1])
    return found


def plain_entropy(logits: list[float]) -> float:
    """-sum p log p, as everybody writes it."""
    log_p = torch.log_softmax(torch.tensor(logits), 0)
    return round(-(log_p.exp() * log_p).sum().item(), 4)


def entropy_slope(logits: list[float], careful: bool) -> list[float]:
    """The gradient of the entropy, p (log p + H), with log p taken of p."""
    if careful:
        x = torch.tensor([logits], requires_grad=True)
        _, entropy = log_prob_and_entropy(x, torch.tensor([0]))
        assert entropy is not None
        return rounded(torch.autograd.grad(entropy.sum(), x)[0][0])
    p = torch.tensor(logits).softmax(0)
    log_p = p.log()
    plogp = torch.where(p == 0, 0, p * log_p)
    return rounded(-p * (log_p - plogp.sum()))


def rounded(values: Tensor) -> list[float]:
    """To 4 places."""
    return [round(v, 4) + 0.0 for v in values.tolist()]


def log_prob_in_tiles(logits: list[float], tile: int, fill: float) -> float:
    """The largest log-prob of a row, whose last tile is filled up with ``fill``."""
    x = torch.tensor(logits)
    padded = torch.nn.functional.pad(x, (0, -len(x) % tile), value=fill)
    pieces = [part.logsumexp(0) for part in torch.split(padded, tile)]
    return round((x.max() - torch.stack(pieces).logsumexp(0)).item(), 4)


def wrapped_offset(row: int, stride: int, bits: int) -> int:
    """row * stride in an integer of so many bits."""
    dtype = torch.int32 if bits == 32 else torch.int64
    return int((torch.tensor(row, dtype=dtype) * torch.tensor(stride, dtype=dtype)).item())


def row_scaled(incoming: list[float], by_first: bool) -> list[float]:
    """The gradient of each row's own sum, scaled by the incoming gradient of its row, or of row 0."""
    scale = torch.tensor(incoming)
    return rounded(torch.ones(len(incoming)) * (scale[0] if by_first else scale))


def bytes_sent_back(per_sample: bool, samples: int = 4, rows: int = 32, columns: int = 64) -> str:
    """The size of all gradients of ``[T, V]`` that arrive at the logits, in buffers of that size."""
    logits, seen = torch.zeros(rows, columns, requires_grad=True), []
    hooked = logits * 1
    size = rows // samples
    parts = [hooked[i * size : (i + 1) * size] for i in range(samples)] if per_sample else [hooked]
    for part in parts:
        (gradient,) = torch.autograd.grad(part.log_softmax(1)[:, 0].sum(), hooked, retain_graph=True)
        seen.append(gradient.numel() / logits.numel())
    return f"{sum(seen):g} times [T, V] for {samples} samples"


def mean_of_nothing(guarded: bool) -> float:
    """The mean over the unmasked tokens of a rank that has none."""
    values, mask = torch.ones(4), torch.zeros(4)
    if not guarded:
        return ((values * mask).sum() / mask.sum()).item()
    layout = Layout(Batch([5], [4]))
    return weighted_sum([values], token_weights([mask], layout, 0, per="token")).item()


def keep_graph(careful: bool) -> float:
    """Nothing, added to a loss so that the logits stay in the graph."""
    logits = torch.tensor([1.0, -torch.inf], requires_grad=True)
    return (logits[:0].sum() if careful else 0 * logits.sum()).item()


def padded_vocabulary(vocab_size: int | None) -> list[float]:
    """The log-prob of the first of 5 equal logits, in a vocabulary padded to 6 columns."""
    log_prob, _ = log_prob_and_entropy(torch.zeros(1, 6), torch.tensor([0]), vocab_size=vocab_size)
    return rounded(log_prob)


def returns_early(me: ranks.Rank, early: bool) -> float:
    """The mean over all ranks' unmasked tokens; rank 0 has none."""
    sums = torch.tensor([5.0 * me.rank, float(me.rank)])
    if early and sums[1] == 0:
        return 0.0
    dist.all_reduce(sums, group=me.cp_group)
    return (sums[0] / sums[1]).item()


def on_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What two ranks return, or how they end."""
    ends = ranks.observe(fn, *args, cp=2, timeout=3)
    values: list[Any] = [end.value if end.status == "returned" else end.summary for end in ends]
    return [
        rounded(v.of_log_prob) if isinstance(v, history.Trained) and v.of_log_prob is not None else v for v in values
    ]


def gradient_by_convention(me: ranks.Rank, loss: Any) -> list[float]:
    """Both ranks compute the same loss from the sum of their x."""
    x = torch.ones(2, requires_grad=True)
    all_reduce(x, me.cp_group, loss=loss).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return rounded(x.grad)


ZIGZAG = Layout(Batch([8], [2]), cp_size=2)
HALF = Layout(Batch([16], [4]), cp_split="contiguous", cp_size=2)
MIXED = Layout(Batch([6, 10], [4, 9]), cp_split="contiguous", cp_size=2)
TWO = Layout(Batch([3, 2], [1, 1]))
GITHUB = "https://github.com/"

EXHIBITS = {
    "rolled after the split": Exhibit(
        "silent wrong number",
        f"{GITHUB}verl-project/verl/pull/4250",
        "the loss of a run with context parallelism is a little higher than without",
        "one sample of 8 tokens (token = position), cp 2, zigzag; targets of rank 0, which holds 0 1 6 7",
        partial(rolled_after_the_split, ZIGZAG, 0),
        partial(own_targets, ZIGZAG, 0),
        "targets of every rank against the whole sample (C2)",
    ),
    "shifted after packing": Exhibit(
        "silent wrong number",
        f"{GITHUB}pytorch/torchtitan/pull/3347",
        "the last token of each document is trained to predict the first of the next",
        "documents of 3 and 2 tokens in one row",
        partial(rolled_after_the_split, TWO, 0),
        partial(own_targets, TWO, 0),
        "no target at a sample's last position",
    ),
    "token rows for logit rows": Exhibit(
        "silent wrong number",
        f"{GITHUB}THUDM/slime/commit/e8d3f58f3",
        "every log-prob belongs to the token after the one that it is booked under",
        "one sample of 8 tokens, response of 2: which rows score it",
        partial(rows_of_tokens, 8, 2),
        lambda: [row for (s,) in Layout(Batch([8], [2])).response_spans(0) for row in range(s.row, s.row + s.length)],
        "the row at p scores the token at p + 1, on token = position",
    ),
    "no prompt": Exhibit(
        "silent wrong number",
        f"{GITHUB}huggingface/trl/pull/3711",
        "a sample without a prompt gets its first log-prob from its neighbour, or has none",
        "lengths 3 and 4, responses 2 and 4",
        partial(packed_slices, [3, 4], [2, 4]),
        lambda: Batch([3, 4], [2, 4]),
        "response = total as an input, expecting an error",
    ),
    "the last none": Exhibit(
        "silent wrong number",
        f"{GITHUB}THUDM/slime/pull/2255",
        "a sample without a response token counts with all its tokens",
        "5 log-probs, the last n of them with n = 0",
        lambda: [1, 2, 3, 4, 5][-0:],
        lambda: [1, 2, 3, 4, 5][5 - 0 :],
        "response length 0 as an input",
    ),
    "None in the list": Exhibit(
        "crash and hang",
        f"{GITHUB}THUDM/slime/pull/1846",
        "one rank raises TypeError, the others stand still until the timeout",
        "one sample of 16, response of 4, allgather over 2 ranks: rank 0 holds none of it",
        partial(on_ranks, history.train, history.LINE["#1822"], HALF),
        partial(on_ranks, history.train, history.LINE["now"], HALF),
        "every rank issues the same collectives, on a batch with an empty rank (C6)",
    ),
    "zeros that ask": Exhibit(
        "silent wrong number, then a hang",
        f"{GITHUB}THUDM/slime/pull/2123",
        "one rank waits in backward for a reduce; the other finished, with a gradient that lacks a part",
        "samples of 6 and 10, responses of 4 and 9, over 2 ranks; entropy coefficient 0; log-prob gradients",
        partial(on_ranks, history.train, history.LINE["#2153"], MIXED, 0.0),
        partial(on_ranks, history.train, history.LINE["now"], MIXED, 0.0),
        "requires_grad equal on every rank (C5), gradients against one process (C7)",
    ),
    "an early return": Exhibit(
        "hang",
        f"{GITHUB}huggingface/trl/pull/4041",
        "training stops at the first batch in which a rank has no unmasked token",
        "2 ranks, masks 0 and 1",
        partial(on_ranks, returns_early, True),
        partial(on_ranks, returns_early, False),
        "the same collectives whatever a rank holds (C6)",
    ),
    "0 times infinity, for the graph": Exhibit(
        "silent wrong number",
        f"{GITHUB}THUDM/slime/issues/1678",
        "the loss is NaN on ranks without response tokens, if a logit is infinite",
        "logits 1 and -inf",
        partial(keep_graph, False),
        partial(keep_graph, True),
        "a logit of -inf on an empty rank",
    ),
    "0 times infinity, in the entropy": Exhibit(
        "silent wrong number",
        f"{GITHUB}pytorch/pytorch/issues/40553",
        "the entropy is NaN as soon as a token is forbidden",
        "logits 0, 0 and -inf; log 2 is right",
        partial(plain_entropy, [0.0, 0.0, -torch.inf]),
        lambda: rounded(log_prob_and_entropy(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([0]))[1]),  # type: ignore[arg-type]
        "a row with -inf, against a count by hand",
    ),
    "a gradient at p = 0": Exhibit(
        "silent wrong number",
        f"{GITHUB}ByteDance-Seed/VeOmni/pull/720",
        "the entropy is right, its gradient is NaN",
        "logits 0 and -200 in fp32: p underflows to 0",
        partial(entropy_slope, [0.0, -200.0], False),
        partial(entropy_slope, [0.0, -200.0], True),
        "the gradient, not only the value, far from the maximum",
    ),
    "the last tile": Exhibit(
        "silent wrong number",
        f"{GITHUB}verl-project/verl/issues/5349",
        "log-probs that no softmax gives, wherever the vocabulary is no multiple of the tile",
        "logits -15 five times and -12, in tiles of 4; the largest log-prob",
        partial(log_prob_in_tiles, [-15.0] * 5 + [-12.0], 4, 0.0),
        partial(log_prob_in_tiles, [-15.0] * 5 + [-12.0], 4, -torch.inf),
        "a vocabulary that is no multiple of the tile",
    ),
    "padded columns": Exhibit(
        "silent wrong number",
        f"{GITHUB}NVIDIA/Megatron-LM/issues/1754",
        "log-probs are lower with tensor parallelism than without",
        "5 equal logits padded to 6 columns for tp 2; -log 5 is right",
        partial(padded_vocabulary, None),
        partial(padded_vocabulary, 5),
        "tp 2 against one process, with a vocabulary that does not divide",
    ),
    "every row scaled by row 0": Exhibit(
        "silent wrong number",
        f"{GITHUB}NVIDIA/TransformerEngine/pull/2139",
        "the gradient is right as long as all rows have the same weight",
        "2 rows, incoming gradients 0 and 1",
        partial(row_scaled, [0.0, 1.0], True),
        partial(row_scaled, [0.0, 1.0], False),
        "incoming gradients that differ from row to row",
    ),
    "twice the gradient": Exhibit(
        "silent wrong number",
        f"{GITHUB}THUDM/slime/pull/1748",
        "gradients grow with cp_size",
        "2 ranks, the same loss on each from the sum of their x = [1, 1]; 1 is right",
        partial(on_ranks, gradient_by_convention, "own slice"),
        partial(on_ranks, gradient_by_convention, "replicated"),
        "cp 2 against cp 1 (C7, C8)",
    ),
    "a slice per sample": Exhibit(
        "memory",
        f"{GITHUB}THUDM/slime/pull/1788",
        "out of memory in the loss, the more samples the sooner",
        "4 samples in a buffer of [32, 64]",
        partial(bytes_sent_back, True),
        partial(bytes_sent_back, False),
        "memory against the number of samples",
    ),
    "an offset of 32 bits": Exhibit(
        "crash",
        f"{GITHUB}linkedin/Liger-Kernel/issues/1248",
        "an illegal memory access, in long batches only",
        "row 20,000 of a vocabulary of 151,936",
        partial(wrapped_offset, 20_000, 151_936, 32),
        partial(wrapped_offset, 20_000, 151_936, 64),
        "index arithmetic beyond 2^31",
    ),
    "a mean over nothing": Exhibit(
        "silent wrong number",
        f"{GITHUB}OpenRLHF/OpenRLHF/issues/583",
        "the loss is NaN on a rank whose part of a sequence has no label",
        "4 tokens, all masked",
        partial(mean_of_nothing, False),
        partial(mean_of_nothing, True),
        "a rank without a label",
    ),
}

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


def own_shard_weights(wrong: bool) -> list[list[float]]:
    """Of a sample of 1 prompt and 4 response tokens, on each of 2 ranks."""
    layout, masks = Layout(Batch([5], [4]), cp_size=2), [torch.ones(4)]
    rule = weights_of_own_shard if wrong else weights_per_sample
    return [rounded(rule(masks, layout, rank)[0]) for rank in range(2)]


def log_of(fn: Callable[..., Any], *args: Any) -> str:
    """The report of a run on two ranks."""
    return table(ranks.records(ranks.observe(fn, *args, cp=2, timeout=3)))


MYSTERIES: dict[str, tuple[Callable[[], str], Sequence[str], int]] = {  # report, choices, which one is right
    "A": (
        lambda: f"{log_of(returns_early, True)}\nIt happens at some batches, and never with one rank.",
        (
            "a rank sums tensors of another size",
            "a rank without data returns before the collective",
            "the network lost a message",
        ),
        1,
    ),
    "B": (
        lambda: (
            f"5 equal logits: log-prob {padded_vocabulary(5)[0]} on one process, {padded_vocabulary(None)[0]} with tp 2"
        ),
        (
            "the all-reduce of the sums counts one shard twice",
            "the maximum was not exchanged",
            "columns that pad the vocabulary take part in the softmax",
        ),
        2,
    ),
    "C": (
        lambda: f"weights of 4 response tokens, cp 2, zigzag: {own_shard_weights(True)}; on one process 0.25 each",
        (
            "a factor of cp_size from the wrong gradient convention",
            "each rank divides by the tokens that it holds",
            "one token is counted on both ranks",
        ),
        1,
    ),
}
EXHIBITS["the shard's own tokens"] = Exhibit(
    "silent wrong number",
    f"{GITHUB}NVIDIA/Megatron-LM/issues/673",
    "the loss changes with cp_size",
    "one sample of 5 tokens, 4 of them response, cp 2, zigzag: the weights of the mean",
    partial(own_shard_weights, True),
    partial(own_shard_weights, False),
    "the weights of all ranks must sum to 1",
)
BEHIND = {"A": "an early return", "B": "padded columns", "C": "the shard's own tokens"}
