"""Kinds for the grader beyond those of ``refimpl.check``: what the museum's exhibits need, and how to write one's own.

print(check.grade(kinds.MEAN, my_mean))
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from refimpl.candidate import Broken, Candidate, Finding, Kind, call
from refimpl.cases import by_convention, differ, exact, held_rows, layouts
from refimpl.layout import Batch, Layout
from refimpl.ranks import Rank


def weights(rows: int) -> tuple[Tensor, Tensor]:
    """Incoming gradients of log-prob and entropy, another one for each row."""
    return 1.0 + torch.arange(rows), 3.0 - torch.arange(rows)


# ---------------------------------------------------------------- which rows of a packed batch


def judge_rows(fn: Candidate, given: tuple[list[int], list[int]], _: int) -> Iterator[Finding]:
    """The scoring rows of packed samples; for lengths that cannot be, an error that names sample and response."""
    totals, responses = given
    where, start, want = f"total_lengths {totals}, response_lengths {responses}", 0, []
    bad = [i for i, (n, r) in enumerate(zip(totals, responses, strict=True)) if not 0 <= r <= n or r == n > 0]
    for n, r in zip(totals, responses, strict=True):
        want.append([start + p for p in range(n) if n - r - 1 <= p < n - 1])
        start += n
    expected = f"an error that says: sample {bad[0]}, and its {responses[bad[0]]}" if bad else str(want)
    try:
        got = call(fn, list(totals), list(responses))
    except Broken as broken:
        said = str(broken.args[1])
        error = said.rpartition(" (line ")[0]  # where it was raised is no number of a sample
        if not bad or not re.search(rf"sample\D{{0,3}}{bad[0]}\b.*(?<!\w){responses[bad[0]]}\b", error):
            yield Finding("input" if bad else "C1", where, expected, said)
        return
    try:
        numbers = [[int(row) for row in rows] for rows in got]
    except (TypeError, ValueError):
        raise Broken(f"a list of rows for each of {len(totals)} samples", str(got)) from None
    if bad or numbers != want:
        yield Finding("input" if bad else "C2", where, expected, str(got))


def lengths() -> dict[str, Any]:
    """Batches that can be, and some that cannot."""
    good = [([1], [0]), ([2], [1]), ([5], [2]), ([5], [0]), ([3, 4], [2, 1]), ([0, 3], [0, 2]), ([5, 2, 7], [3, 1, 4])]
    bad = [([2], [2]), ([3, 4], [2, 4]), ([3], [5]), ([4, 6], [1, -1])]
    return {f"lengths {a} {b}": (a, b) for a, b in good + bad}


ROWS = Kind("fn(total_lengths, response_lengths) -> rows of each sample, packed", "C1 C2 input", lengths, judge_rows)


# ---------------------------------------------------------------- from logits to pieces


def arrivals(loss: Tensor, size: int) -> int:
    """How many gradients of at least ``size`` numbers ``loss.backward()`` hands from node to node."""
    nodes, seen, counts = [loss.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.register_hook(lambda sent, _: counts.append(sum(g is not None and g.numel() >= size for g in sent)))
            nodes += [before for before, _ in node.next_functions]
    loss.backward()  # type: ignore[no-untyped-call]
    return sum(counts)


def run_from_logits(fn: Candidate, layout: Layout, rank: int) -> tuple[Tensor, list[Tensor], list[Tensor], int]:
    """The logits with their gradient, the pieces, and how many gradients of ``[T, V]`` there were."""
    tokens = [torch.arange(n) * (i + 2) % 5 for i, n in enumerate(layout.batch.total_lengths)]
    logits = torch.linspace(-30, 30, layout.rows * 5).view(-1, 5).sin().requires_grad_()
    log_probs, entropies = call(fn, logits, tokens, layout, rank)
    if len(log_probs) != len(tokens) or len(entropies) != len(tokens):
        raise Broken(f"two lists of {len(tokens)} tensors", f"{len(log_probs)} and {len(entropies)}")
    flat = torch.stack([torch.cat(list(log_probs)), torch.cat(list(entropies))])
    if not flat.requires_grad:
        return logits, log_probs, entropies, 0
    loss = (flat * torch.stack(weights(flat.shape[1]))).sum()
    return logits, log_probs, entropies, arrivals(loss, logits.numel())


def judge_from_logits(fn: Candidate, layout: Layout, rank: int) -> Iterator[Finding]:
    """Values and gradient against fp64; and gradients of ``[T, V]`` no more for many samples than for one."""
    logits, log_probs, entropies, many = run_from_logits(fn, layout, rank)
    held, goals, upon = held_rows(layout, rank), torch.zeros(layout.rows).long(), torch.zeros(2, layout.rows)
    for i, pairs in enumerate(held):
        for p, row in pairs:
            goals[row] = (p + 1) * (i + 2) % 5
    rows = [row for pairs in held for _, row in pairs]
    upon[:, rows] = torch.stack(weights(len(rows)))
    log_prob, entropy, slope = exact(logits, goals, (upon[0], upon[1]))
    for i, pairs in enumerate(held):
        own = [row for _, row in pairs]
        yield from differ(f"log-probs of sample {i}", log_probs[i], log_prob[own])
        yield from differ(f"entropies of sample {i}", entropies[i], entropy[own])
    if logits.grad is None:
        yield Finding("C4", "", "a gradient at the logits", "None")
    else:
        yield from differ("gradient", logits.grad, slope)
    *_, one = run_from_logits(fn, Layout(Batch([9], [8]), layout.qkv_format, layout.cp_split, layout.cp_size), rank)
    if many > one:
        yield Finding("memory", f"{len(held)} samples", f"{one} gradients of [T, V], as for one sample", str(many))


FROM_LOGITS = Kind(
    "fn(logits, tokens, layout, cp_rank) -> (pieces, pieces)",
    "C1 C4 C7 memory",
    lambda: dict(list(layouts().items())[::7]),
    judge_from_logits,
)


# ---------------------------------------------------------------- on real ranks

PerRank = list[tuple[list[float], list[float]]]  # values and mask of each rank


def run_mean(me: Rank, fn: Candidate, given: PerRank) -> tuple[float, Tensor | None]:
    """The mean on this rank, and the gradient of its values."""
    values, mask = (torch.tensor(numbers, dtype=torch.float64) for numbers in given[me.cp_rank])
    mean = fn(values.requires_grad_(), mask, me.cp_group)
    mean.backward()
    return mean.item(), values.grad


def judge_mean(got: tuple[float, Tensor | None], given: PerRank, rank: int) -> Iterator[Finding]:
    """The mean of what no mask leaves out, 0 if that is nothing, and 1 / their number as gradient."""
    count = max(1.0, sum(sum(mask) for _, mask in given))
    total = sum(v * m for values, mask in given for v, m in zip(values, mask, strict=True))
    yield from differ("mean", torch.tensor([got[0]]), torch.tensor([total / count]).double())
    want = torch.tensor(given[rank][1], dtype=torch.float64) / count
    if got[1] is None:
        yield Finding("C4", "", str(want.tolist()), "no gradient")
    else:
        yield from by_convention("gradient", got[1], want)


MEAN = Kind(
    "fn(values, mask, group) -> the mean over all ranks, the same on each; backward is called on each",
    "C1 C4 C6 C7 C8",
    lambda: {
        f"values and masks {given}": given
        for given in (
            [([5.0, 1.0], [1.0, 1.0]), ([3.0, 7.0], [1.0, 1.0])],
            [([5.0, 1.0], [1.0, 0.0]), ([3.0, 7.0], [1.0, 1.0])],
            [([5.0, 1.0], [0.0, 0.0]), ([3.0, 7.0], [0.0, 1.0])],
            [([], []), ([2.0], [1.0])],
            [([5.0], [0.0]), ([3.0], [0.0])],
        )
    },
    judge_mean,
    run_mean,
    lambda given: {"cp": len(given)},
)

Shards = tuple[list[list[float]], list[int], list[int], int]  # logits, targets, where they are cut, size of vocabulary


def run_shards(me: Rank, fn: Candidate, given: Shards) -> list[Tensor]:
    """Log-prob, entropy and the gradient of this rank's columns."""
    rows, targets, cuts, size = given
    shard = torch.tensor(rows)[:, cuts[me.tp_rank] : cuts[me.tp_rank + 1]].requires_grad_()
    log_prob, entropy = fn(shard, torch.tensor(targets), cuts[me.tp_rank], size, me.tp_group)
    upon = weights(len(rows))
    (log_prob * upon[0] + entropy * upon[1]).sum().backward()
    return [log_prob.detach(), entropy.detach(), torch.zeros(0) if shard.grad is None else shard.grad]


def judge_shards(got: list[Tensor], given: Shards, rank: int) -> Iterator[Finding]:
    """Against one fp64 process that holds the vocabulary and no padding."""
    rows, targets, cuts, size = given
    log_prob, entropy, slope = exact(torch.tensor(rows)[:, :size], torch.tensor(targets), weights(len(rows)))
    mine = torch.nn.functional.pad(slope, (0, cuts[-1] - size))[:, cuts[rank] : cuts[rank + 1]]
    yield from differ("log-prob", got[0], log_prob)
    yield from differ("entropy", got[1], entropy)
    yield from by_convention("gradient", got[2], mine)


SHARDS = Kind(
    "fn(logits, targets, vocab_start, vocab_size, group) -> ([T], [T]), the vocabulary split over the group",
    "C1 C6 C7 C8",
    lambda: {
        f"logits {given[0]}, targets {given[1]}, cut at {given[2]}, vocabulary of {given[3]}": given
        for given in (
            ([[1.0, 2.0, 3.0, 4.0]], [0], [0, 2, 4], 4),
            ([[1.0, 2.0, 3.0, 4.0], [0.0, -1.0, 2.0, 0.5]], [3, 1], [0, 1, 4], 4),
            ([[0.0] * 6], [0], [0, 3, 6], 5),
            ([[1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3]], [2], [0, 2, 4], 4),
            ([[-torch.inf, -torch.inf, 1.0, 2.0]], [3], [0, 2, 4], 4),
        )
    },
    judge_shards,
    run_shards,
    lambda given: {"tp": len(given[2]) - 1},
)
KINDS = {"rows": ROWS, "from_logits": FROM_LOGITS, "mean": MEAN, "shards": SHARDS}
