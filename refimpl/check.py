"""A grader of the contract, for exercises and for production code alike.

    print(check.extraction(my_function))             # a report: each clause held, or its smallest failing case
    @pytest.mark.parametrize("case", check.cases("extraction"), ids=str)
    def test_mine(case): case.check(my_function)     # raises ContractError
    python -m refimpl check my_module:my_function --kind extraction

Most kinds simulate the ranks in this process, one after another; ``step`` and ``redistribution`` take real ones, for
C6. A candidate that raises, takes longer than two seconds (in the main thread) or returns something odd is a finding,
not a crash, unless it ends the process. ``KINDS`` says what is called, and how; ``grade`` and ``cases`` take a ``Kind``
of your own, too.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from refimpl import history, ranks, slicing
from refimpl.candidate import LIMIT, Broken, Candidate, Finding, Kind, Late, limited
from refimpl.cases import (
    BATCHES,
    ROWS,
    by_convention,
    differ,
    held_rows,
    judge_extraction,
    judge_pair,
    judge_tokens,
    judge_weights,
    layouts,
    named,
)
from refimpl.diagrams import strips
from refimpl.layout import Layout
from refimpl.recorder import first_difference, table

TIMEOUT = 5.0  # seconds for one case on real ranks


def judge_trained(got: history.Trained, given: tuple[Layout, float], rank: int) -> Iterator[Finding]:
    """C1, C4 and C7 of ``_trained``: values are positions, gradients of scoring rows these + 1 times a factor."""
    layout, coefficient = given
    positions = torch.zeros(layout.rows).double()  # of scoring rows, plus 1
    for position, row in (pair for pairs in held_rows(layout, rank) for pair in pairs):
        positions[row] = position + 1
    for name, pieces, sign in (("log-probs", got.log_probs, -1.0), ("entropies", got.entropies, 1.0)):
        if len(pieces) != len(layout.batch):
            yield Finding("C1", name, f"a tensor for each of {len(layout.batch)} samples", f"{len(pieces)} tensors")
            continue
        for i, (piece, pairs) in enumerate(zip(pieces, held_rows(layout.as_zigzag(), rank), strict=True)):
            yield from differ(f"{name} of sample {i}", piece, sign * torch.tensor([p for p, _ in pairs]).double())
    for name, gradient, factor in (("log-prob", got.of_log_prob, 1.0), ("entropy", got.of_entropy, coefficient)):
        want = factor * positions
        if gradient is None and factor:
            yield Finding("C4", f"{name} gradient", str(want.tolist()), "None")
        elif gradient is not None:
            yield from by_convention(f"{name} gradient", gradient, want)


def _trained(me: ranks.Rank, step: history.Step, given: tuple[Layout, float]) -> history.Trained:
    return history.train(me, step, *given, weigh=lambda value: value.abs() + 1)


def _redistributed(me: ranks.Rank, fn: Candidate, given: tuple[Layout, float]) -> history.Trained:
    return _trained(me, history.Step(slicing.extract, fn, if_weighted=True), given)


def _steps() -> dict[str, Any]:
    return {f"coefficient {c:g}, {named(layout)}": (layout, c) for layout in BATCHES for c in (0.0, 0.5)}


def _of_layout(clauses: str, takes: str, returns: str, judge: Any) -> Kind:
    return Kind(f"fn({takes}, layout, cp_rank) -> {returns}", clauses, layouts, judge)


def _on_ranks(signature: str, run: Any) -> Kind:
    return Kind(signature, "C1 C4 C6 C7 C8", _steps, judge_trained, run, lambda given: {"cp": given[0].cp_size})


PIECES = "(pieces, pieces), as slicing.extract"
TOKENS, TARGETS = partial(judge_tokens, shift=0, fill=0), partial(judge_tokens, shift=1, fill=slicing.NO_TARGET)
WEIGHTS = "pieces that sum to 1, as loss.token_weights(per='token')"
PAIR = "fn(logits, targets) -> ([T], [T]), as entropy.log_prob_and_entropy"
KINDS = {
    "extraction": _of_layout("C1 C2 C3 C4 C5 C7", "log_prob, entropy", PIECES, judge_extraction),
    "local_tokens": _of_layout("C1 C2 C3", "tokens", "[T_local], as slicing.local_tokens", TOKENS),
    "targets": _of_layout("C1 C2 C3", "tokens", "[T_local], as slicing.targets", TARGETS),
    "weights": _of_layout("C1 C7", "masks", WEIGHTS, judge_weights),
    "log_prob_entropy": Kind(PAIR, "C1 C4 C7", lambda: {n: (n, *rows) for n, rows in ROWS.items()}, judge_pair),
    "redistribution": _on_ranks("fn(keys, layout, cp_rank, group) -> keys under zigzag, on real ranks", _redistributed),
    "step": _on_ranks("a history.Step: an extraction and a redistribution, on real ranks", _trained),
}


class ContractError(AssertionError):
    """A case that a candidate does not hold, as an exception for tests."""


@dataclass(frozen=True)
class Case:
    """One input of a kind, a layout with all its ranks for most of them."""

    kind: Kind
    name: str
    given: Any

    def __str__(self) -> str:
        return self.name

    def findings(self, fn: Any) -> list[tuple[Finding, int]]:
        """What ``fn`` breaks here, one clause after another, and on which rank."""
        if self.kind.run is not None:
            return self._on_real_ranks(self.kind.run, fn)
        found: list[tuple[Finding, int]] = []
        for rank in range(self.given.cp_size if isinstance(self.given, Layout) else 1):
            try:
                with limited():
                    for finding in self.kind.judge(fn, self.given, rank):
                        found.append((finding, rank))
            except Broken as broken:
                found.append((Finding("C1", "", *broken.args), rank))
            except Late:
                found.append((Finding("C1", "", "an answer", f"no answer within {LIMIT:g} s", hung=True), rank))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # from a backward, or values that cannot be compared
                found.append((Finding("C1", "", "something to compare", type(error).__name__), rank))
        return found

    def _on_real_ranks(self, run: Any, fn: Any) -> list[tuple[Finding, int]]:
        grid: dict[str, Any] = self.kind.grid(self.given)
        outcomes = ranks.observe(run, fn, self.given, **grid, timeout=TIMEOUT, check=True)
        if all(outcome.status == "returned" for outcome in outcomes):
            try:
                return [(f, o.rank) for o in outcomes for f in self.kind.judge(o.value, self.given, o.rank)]
            except Broken as broken:
                return [(Finding("C1", "", *broken.args), 0)]
        issued = f"\n{table(ranks.records(outcomes))}"
        hung = any(outcome.status == "unfinished" for outcome in outcomes)
        alike = all(o.status == "raised" for o in outcomes) and first_difference(ranks.records(outcomes)) is None
        expected = "an answer" if alike else "every rank issues the same collectives, and returns"
        return [(Finding("C1" if alike else "C6", "", expected, issued, hung), 0)]

    def located(self, finding: Finding, rank: int) -> Finding:
        """The finding with the case and its strip."""
        parts = self.given if isinstance(self.given, tuple) else (self.given,)
        drawn = [str(strips(part)) for part in parts if isinstance(part, Layout)]
        where = ", ".join(filter(None, (finding.where, f"rank {rank} of {self}" if drawn else "")))
        return replace(finding, where="\n".join([where, *drawn]))

    def check(self, fn: Any) -> None:
        """Nothing, or ``ContractError`` with the first finding."""
        for finding, rank in self.findings(fn):
            raise ContractError(str(self.located(finding, rank)))


@dataclass
class Report:
    """What a grading found: for each clause the finding of its smallest failing case, or ``None``."""

    candidate: str
    kind: str
    cases: int = 0
    seen: Counter[str] = field(default_factory=Counter)  # in how many cases each clause could be looked at
    clauses: dict[str, Finding | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every clause held in every case."""
        return not any(self.clauses.values())

    def __str__(self) -> str:
        clauses = sorted(self.clauses.items())
        words = [f"{c} {'BROKEN' if found else 'held' if self.seen[c] else 'not seen'}" for c, found in clauses]
        findings = [str(found) for _, found in clauses if found]
        return "\n".join([f"{self.candidate} as {self.kind}, {self.cases} cases: {'  '.join(words)}", *findings])


def cases(kind: str | Kind) -> list[Case]:
    """The cases of a kind, the smallest first."""
    if isinstance(kind, str) and kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    of = KINDS[kind] if isinstance(kind, str) else kind
    return [Case(of, name, given) for name, given in of.inputs().items()]


def grade(kind: str | Kind, fn: Any) -> Report:
    """All cases of a kind; of each clause the first finding is kept. At most three calls may hang."""
    listed = cases(kind)
    clauses = (KINDS[kind] if isinstance(kind, str) else kind).clauses.split()
    report = Report(getattr(fn, "__name__", type(fn).__name__), kind if isinstance(kind, str) else kind.signature)
    report.clauses = dict.fromkeys(clauses)
    hung = 0
    for case in listed:
        report.cases += 1
        found = case.findings(fn)
        stops = [finding.clause for finding, _ in found if finding.clause in ("C1", "C2", "C6")]  # nothing to see after
        report.seen.update(stops if "C6" in stops else [c for c in clauses if c <= min(stops, default="z")])
        for finding, rank in found:
            report.clauses[finding.clause] = report.clauses.get(finding.clause) or case.located(finding, rank)
            hung += finding.hung
        if hung >= 3:
            break
    return report


extraction, targets = partial(grade, "extraction"), partial(grade, "targets")
log_prob_entropy = partial(grade, "log_prob_entropy")
redistribution, step = partial(grade, "redistribution"), partial(grade, "step")
"""On real ranks, forward and backward, on the batches of the history; ``redistribution`` behind our own extraction.
C6: the ranks issue the same collectives, and return. C4, C7, C8: values, and a gradient, if of zeros, on each rank."""
