"""A grader of the contract, for exercises and for production code alike.

    print(check.extraction(my_function))             # a report: each clause held, or its smallest failing case
    @pytest.mark.parametrize("case", check.cases("extraction"), ids=str)
    def test_mine(case): case.check(my_function)     # raises ContractError
    python -m refimpl check my_module:my_function --kind extraction

Ranks are simulated in this process, one after another; ``step`` takes real ones, for C6. A candidate that raises, takes
longer than two seconds (in the main thread) or returns something odd is a finding, not a crash, unless it ends the
process. ``KINDS`` says what is called, and how.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from refimpl import history, ranks, slicing
from refimpl.candidate import LIMIT, Broken, Candidate, Finding, Late, limited
from refimpl.cases import BATCHES, JUDGES, ROWS, judge_trained, layouts
from refimpl.diagrams import strips
from refimpl.layout import Layout
from refimpl.recorder import table

KINDS = {
    "extraction": "fn(log_prob, entropy, layout, cp_rank) -> (pieces, pieces), as slicing.extract",
    "local_tokens": "fn(tokens, layout, cp_rank) -> [T_local], as slicing.local_tokens",
    "targets": "fn(tokens, layout, cp_rank) -> [T_local], as slicing.targets",
    "weights": "fn(masks, layout, cp_rank) -> pieces that sum to 1, as loss.token_weights(per='token')",
    "log_prob_entropy": "fn(logits, targets) -> ([T], [T]), as entropy.log_prob_and_entropy",
}


class ContractError(AssertionError):
    """A case that a candidate does not hold, as an exception for tests."""


@dataclass(frozen=True)
class Case:
    """One input of a kind: a layout with all its ranks, or some rows of logits."""

    kind: str
    layout: Layout | None = None
    logits: str = ""

    def __str__(self) -> str:
        if self.layout is None:
            return self.logits
        batch, rows = self.layout.batch, self.layout.rows
        return f"{self.layout}, {rows} rows, lengths {list(batch.total_lengths)} {list(batch.response_lengths)}"

    def findings(self, fn: Candidate) -> Iterator[tuple[Finding, int]]:
        """What ``fn`` breaks here, one clause after another, and on which rank."""
        for rank in range(self.layout.cp_size if self.layout else 1):
            found: list[Finding] = []
            try:
                with limited():
                    found.extend(JUDGES[self.kind][0](fn, *((self.layout, rank) if self.layout else (self.logits,))))
            except Broken as broken:
                found.append(Finding("C1", "", *broken.args))
            except Late:
                found.append(Finding("C1", "", "an answer", f"no answer within {LIMIT:g} s"))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # from a backward, or values that cannot be compared
                found.append(Finding("C1", "", "something to compare", type(error).__name__))
            yield from ((finding, rank) for finding in found)

    def located(self, finding: Finding, rank: int) -> Finding:
        """The finding with the case and its strip."""
        if self.layout is None:
            return finding
        where = ", ".join(filter(None, (finding.where, f"rank {rank} of {self}")))
        return replace(finding, where=f"{where}\n{strips(self.layout)}")

    def check(self, fn: Candidate) -> None:
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
        words = {
            clause: "BROKEN" if found else "held" if self.seen[clause] else "not seen" for clause, found in clauses
        }
        verdicts = "  ".join(f"{clause} {word}" for clause, word in words.items())
        findings = [str(found) for _, found in clauses if found]
        return "\n".join([f"{self.candidate} as {self.kind}, {self.cases} cases: {verdicts}", *findings])


def cases(kind: str) -> list[Case]:
    """The cases of a kind, the smallest first."""
    if kind not in JUDGES:
        raise ValueError(f"kind {kind!r} is none of {', '.join(JUDGES)}")
    if kind == "log_prob_entropy":
        return [Case(kind, logits=name) for name in ROWS]
    return [Case(kind, layout) for layout in layouts()]


def grade(kind: str, fn: Candidate) -> Report:
    """All cases of a kind; of each clause the first finding is kept. At most three calls may hang."""
    listed = cases(kind)
    report = Report(getattr(fn, "__name__", type(fn).__name__), kind, clauses=dict.fromkeys(JUDGES[kind][1].split()))
    hung = 0
    for case in listed:
        report.cases += 1
        found = list(case.findings(fn))
        stops = min((finding.clause for finding, _ in found if finding.clause in ("C1", "C2")), default="C9")
        report.seen.update(clause for clause in report.clauses if clause <= stops)
        for finding, rank in found:
            report.clauses[finding.clause] = report.clauses[finding.clause] or case.located(finding, rank)
            hung += finding.got.startswith("no answer within")
        if hung >= 3:
            break
    return report


def extraction(fn: Candidate) -> Report:
    """Grade an extraction of pieces."""
    return grade("extraction", fn)


def targets(fn: Candidate) -> Report:
    """Grade the targets of each row."""
    return grade("targets", fn)


def log_prob_entropy(fn: Candidate) -> Report:
    """Grade log-prob and entropy of rows of logits, forward and gradient."""
    return grade("log_prob_entropy", fn)


def redistribution(fn: Candidate) -> Report:
    """Grade ``fn(keys, layout, cp_rank, group)``, allgather to zigzag, on real ranks behind our own extraction."""
    return step(history.Step(slicing.extract, fn, history.if_weighted))


def step(candidate: history.Step, timeout: float = 5.0) -> Report:
    """Grade an extraction and a redistribution on real ranks, forward and backward, on the batches of the history.

    C6: the ranks issue the same collectives, and all return. C7: values and gradients are right. C4: a rank without a
    response row has a gradient of zeros.
    """
    names = [getattr(part, "__name__", "?") for part in (candidate.extract, candidate.redistribute)]
    report = Report(", ".join(names), "step", clauses=dict.fromkeys(("C4", "C6", "C7")))
    for layout, coefficient in itertools.product(BATCHES, (0.0, 0.5)):
        case, run = Case("step", layout), (history.train, candidate, layout, coefficient)
        outcomes = ranks.observe(*run, cp=layout.cp_size, timeout=timeout, check=True)
        report.cases += 1
        if all(outcome.status == "returned" for outcome in outcomes):
            report.seen.update(list(report.clauses))
            judged = [(f, o.rank) for o in outcomes for f in judge_trained(o.value, layout, o.rank, coefficient)]
        else:
            issued = f"\n{table(ranks.records(outcomes))}"
            judged = [(Finding("C6", "", "every rank issues the same collectives, and returns", issued), 0)]
        for finding, rank in judged:
            named = replace(finding, where=", ".join(filter(None, (finding.where, f"coefficient {coefficient:g}"))))
            report.clauses[finding.clause] = report.clauses[finding.clause] or case.located(named, rank)
    return report
