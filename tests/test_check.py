"""The grader: ours passes, each wrong answer is rejected for the right clause, and no candidate crashes it."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import test_layout
import torch

import adapters
from refimpl import candidate, check, collectives, entropy, history, loss, slicing
from refimpl.candidate import Kind
from refimpl.layout import Batch, Layout

OURS = {
    "extraction": slicing.extract,
    "local_tokens": slicing.local_tokens,
    "targets": slicing.targets,
    "weights": lambda masks, layout, rank: loss.token_weights(masks, layout, rank, per="token"),
    "log_prob_entropy": entropy.log_prob_and_entropy,
}


@pytest.mark.parametrize("kind", OURS)
def test_ours_passes_in_time(kind: str) -> None:
    started = time.monotonic()
    report = check.grade(kind, OURS[kind])
    assert report.ok, str(report)
    assert set(report.seen.values()) == {report.cases}
    assert report.cases > (10 if kind == "log_prob_entropy" else 400)
    assert len(set(map(str, check.cases(kind)))) == report.cases  # as ids of tests
    assert time.monotonic() - started < 10
    assert "BROKEN" not in str(report)


@pytest.mark.parametrize("case", check.cases("extraction")[::40], ids=str)
def test_a_case_as_a_test(case: check.Case) -> None:
    case.check(slicing.extract)


# ---------------------------------------------------------------- wrong extractions


def per_buffer(change: Any) -> Any:
    def wrong(log_prob: Any, entropy: Any, layout: Layout, rank: int) -> Any:
        both = [
            None if b is None else change(slicing.response_pieces(b, layout, rank), b, layout, rank)
            for b in (log_prob, entropy)
        ]
        return tuple(both)

    return wrong


def one_row_late(pieces: Any, buffer: Any, layout: Layout, rank: int) -> Any:
    spans = layout.response_spans(rank)
    return [torch.cat([buffer[s.row + 1 : s.row + 1 + s.length] for s in own]) for own in spans]


class ExitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> torch.Tensor:
        sys.exit(3)


def list_of_none(log_prob: Any, entropy: Any, layout: Layout, rank: int) -> Any:
    pieces, entropies = slicing.extract(log_prob, entropy, layout, rank)
    return pieces, [None] * len(layout.batch) if entropies is None else entropies


WRONG = {
    "fresh zeros": ("C4", per_buffer(lambda ps, b, *_: [p if len(p) else torch.zeros(0, dtype=b.dtype) for p in ps])),
    "zeros of the default dtype": ("C3", per_buffer(lambda ps, *_: [p if len(p) else torch.zeros(0) for p in ps])),
    "detached": ("C4", per_buffer(lambda ps, *_: [p.detach() for p in ps])),
    "one sample missing": ("C1", per_buffer(lambda ps, *_: ps[:-1])),
    "empty pieces left out": ("C1", per_buffer(lambda ps, *_: [p for p in ps if len(p)])),
    "None": ("C1", per_buffer(lambda ps, *_: [p if len(p) else None for p in ps])),
    "one row late": ("C2", per_buffer(one_row_late)),
    "reversed": ("C2", per_buffer(lambda ps, *_: [p.flip(0) for p in ps])),
    "samples in another order": ("C2", per_buffer(lambda ps, *_: ps[::-1])),
    "asks where the entropy does not": (
        "C5",
        per_buffer(lambda ps, *_: [p if len(p) or p.requires_grad else p.clone().requires_grad_() for p in ps]),
    ),
    "a list of None": ("C5", list_of_none),
    "negated": ("C2", per_buffer(lambda ps, *_: [-p for p in ps])),
    "a little more": ("C2", per_buffer(lambda ps, *_: [p + 0.5 for p in ps])),
    "a column too many": ("C2", per_buffer(lambda ps, *_: [p[:, None] for p in ps])),
    "another dtype": ("C3", per_buffer(lambda ps, *_: [p.double() for p in ps])),
    "another gradient": ("C7", per_buffer(lambda ps, *_: [p.detach() + 2 * (p - p.detach()) for p in ps])),
    "exchanged": ("C2", lambda a, b, *at: slicing.extract(a, b, *at) if b is None else slicing.extract(b, a, *at)),
    "nothing without entropy": ("C1", lambda a, b, *at: ([None], None) if b is None else slicing.extract(a, b, *at)),
    "exits in backward": ("C1", per_buffer(lambda ps, *_: [ExitsInBackward.apply(p) for p in ps])),
    "returns nothing": ("C1", lambda *_: None),
    "returns numbers": ("C1", lambda *_: ([1], [2])),
    "raises": ("C1", lambda *_: 1 / 0),
    "exits": ("C1", lambda *_: sys.exit(3)),
    "NaN": ("C2", per_buffer(lambda ps, *_: [p * torch.nan for p in ps])),
}  # fmt: skip


def few(kind: str, each: int = 5) -> Kind:
    """The kind with each n-th of its cases: enough for whoever is wrong in most, and so many times quicker."""
    of = check.KINDS[kind]
    return replace(of, inputs=lambda: dict(list(of.inputs().items())[::each]))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_extractions(name: str) -> None:
    clause, wrong = WRONG[name]
    report = check.grade(few("extraction"), wrong)
    found = report.clauses[clause]
    assert found is not None, str(report)
    first = next(c for c in ("C1", "C2", "C3", "C4", "C5", "C7") if report.clauses[c])
    assert first == clause, str(report)
    assert f"{clause} BROKEN" in str(report)
    assert "rank 0 |" in found.where  # the strip
    case = next(case for case in check.cases("extraction") if any(f.clause == clause for f, _ in case.findings(wrong)))
    with pytest.raises(check.ContractError, match="broken: "):
        case.check(wrong)


EXPECTED = {  # which clause each mutant of test_layout breaks, as an extraction, or as targets
    "first_row_late": "C2", "first_row_early": "C2", "padding_included": "C2", "other_split": "C2",
    "second_chunk_of_the_neighbour": "C2", "last_sample_forgotten": "C1", "none_for_empty": "C1",
    "zeros_for_empty": "C4", "other_dtype_for_empty": "C3", "detached": "C4", "falling_position": "C2",
    "local_roll": "C2",
}  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "mutant"), test_layout.MUTANTS, ids=lambda x: getattr(x, "__name__", ""))
def test_every_mutant_of_the_layouts(owner: Any, name: str, mutant: Any) -> None:
    """Mutated only while the candidate runs; the grader keeps the right layouts."""
    target = {"response_pieces": slicing, "targets": slicing}.get(name, owner)
    kind = "targets" if name == "targets" else "extraction"

    def candidate(*args: Any) -> Any:
        with mock.patch.object(target, name, mutant):
            return getattr(slicing, "targets" if name == "targets" else "extract")(*args)

    report = check.grade(few(kind), candidate)
    broken = [clause for clause, found in report.clauses.items() if found]
    assert EXPECTED[mutant.__name__] in broken, str(report)


def test_the_finding_is_the_smallest() -> None:
    """A mistake that needs two samples and two ranks is shown on the fewest rows that have it."""

    def wrong(a: Any, b: Any, layout: Layout, rank: int) -> Any:
        pieces = slicing.extract(a, b, layout, rank)
        spoil = len(layout.batch) == 2 and layout.cp_size == 2 and rank == 1
        return (pieces[0][::-1], pieces[1]) if spoil else pieces

    found = check.extraction(wrong).clauses["C2"]
    assert found is not None
    assert found.where.startswith("log-probs of sample 0, rank 1 of ")
    assert "allgather CP, cp_size 2, 3 rows, lengths [3, 2] [2, 1]" in found.where  # [2, 3] [1, 0] has no such row


@pytest.mark.parametrize("catches", [False, True])
def test_a_candidate_that_hangs(catches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "LIMIT", 0.2)  # the text keeps the 2 s

    def hangs(*_: Any) -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:
                if not catches:
                    raise

    report = check.extraction(hangs)
    assert report.cases <= 3
    assert report.clauses["C1"] is not None
    assert report.clauses["C1"].got == "no answer within 2 s"
    assert "C2 not seen" in str(report)


def test_buffers_changed_in_place() -> None:
    def wrong(a: Any, b: Any, layout: Layout, rank: int) -> Any:
        got = slicing.extract(a.clone(), None if b is None else b.clone(), layout, rank)
        a.data.zero_()
        return got

    found = check.extraction(wrong).clauses["C7"]
    assert found is not None
    assert found.expected == "the caller's buffers as they were"


def test_an_error_says_where() -> None:
    def raises(*_: Any) -> None:
        raise KeyError("why")

    found = check.extraction(raises).clauses["C1"]
    assert found is not None
    assert found.got.startswith("KeyError: 'why' (line ")
    assert found.got.endswith(", in raises)")


@pytest.mark.parametrize(
    ("kind", "clause", "wrong"),
    [
        ("targets", "C2", lambda tokens, layout, rank: slicing.local_tokens(tokens, layout, rank).roll(-1)),
        ("targets", "C2", lambda tokens, layout, rank: slicing.targets(tokens, layout, rank, response_only=True)),
        ("targets", "C1", lambda tokens, layout, rank: slicing.targets(tokens, layout, rank)[:-1]),
        ("local_tokens", "C2", lambda tokens, layout, rank: slicing.local_tokens(tokens, layout, rank, pad_id=7)),
        ("targets", "C3", lambda tokens, layout, rank: slicing.targets(tokens, layout, rank).double()),
        (
            "weights",
            "C7",
            lambda m, la, r: [w * 0 / 0 if not any(x.any() for x in m) else w for w in OURS["weights"](m, la, r)],
        ),
        ("weights", "C7", lambda masks, layout, rank: loss.token_weights(masks, layout, rank, per="sample")),
        ("weights", "C7", lambda m, layout, r: loss.token_weights([x * 0 + 1 for x in m], layout, r, per="token")),
    ],
)
def test_wrong_answers_of_other_kinds(kind: str, clause: str, wrong: Any) -> None:
    assert check.grade(kind, wrong).clauses[clause] is not None


def rows(of: Any) -> Any:
    def candidate(x: torch.Tensor, t: torch.Tensor) -> Any:
        log_p = torch.log_softmax(x.float(), 1)
        return log_p.gather(1, t[:, None])[:, 0], of(x.float(), log_p)

    return candidate


@pytest.mark.parametrize(
    ("clause", "where", "wrong"),
    [
        ("C7", "entropy, a logit of -inf", rows(lambda x, log_p: -(log_p.exp() * log_p).sum(1))),
        ("C7", "entropy, a logit of -inf", rows(lambda x, log_p: x.logsumexp(1) - (log_p.exp() * x).sum(1))),
        ("C4", "one row", rows(lambda x, log_p: -(log_p.exp() * log_p).nansum(1).detach())),
        ("C7", "entropy, one row", rows(lambda x, log_p: -(log_p.exp() * log_p).nan_to_num(0).sum(1) / 0.6931)),
    ],
)
def test_wrong_rows(clause: str, where: str, wrong: Any) -> None:
    found = check.log_prob_entropy(wrong).clauses[clause]
    assert found is not None
    assert found.where.startswith(where)


class OneAlone(torch.autograd.Function):
    """Right as long as both outputs are in the loss."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return one.clone(), other.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        return incoming[0] * 1, incoming[1] * 1


def test_one_output_alone() -> None:
    def wrong(x: torch.Tensor, t: torch.Tensor) -> Any:
        return OneAlone.apply(*entropy.log_prob_and_entropy(x, t))

    assert not check.log_prob_entropy(wrong).ok


def test_a_wide_row() -> None:
    def wrong(x: torch.Tensor, t: torch.Tensor) -> Any:
        return entropy.log_prob_and_entropy(x[:, :4096], t)

    found = check.log_prob_entropy(wrong).clauses["C7"]
    assert found is not None
    assert found.where.startswith("log-prob, a row of 5000: logits [[-3.0, -2.0, ")
    assert len(found.where) < 300


def leaks(a: Any, b: Any, layout: Layout, rank: int) -> Any:
    pieces, entropies = slicing.extract(a, b, layout, rank)
    if entropies is not None:
        pieces = [p + (e - e.detach()) for p, e in zip(pieces, entropies, strict=True)]
    return pieces, entropies


def fills_unscored_rows(a: Any, b: Any, layout: Layout, rank: int) -> Any:
    got = slicing.extract(a.clone(), None if b is None else b.clone(), layout, rank)
    a.data.nan_to_num_(0)
    return got


def zeroes(fn: Any) -> Any:
    def wrong(lists: Any, *rest: Any) -> Any:
        got = fn(lists, *rest)
        for tensor in lists:
            tensor.zero_()
        return got

    return wrong


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("extraction", leaks),
        ("extraction", fills_unscored_rows),
        ("targets", zeroes(slicing.targets)),
        ("local_tokens", zeroes(slicing.local_tokens)),
        ("weights", zeroes(OURS["weights"])),
        ("weights", lambda *args: [weight[:, None] for weight in OURS["weights"](*args)]),
        ("log_prob_entropy", lambda x, t: (OURS["log_prob_entropy"](x, t), t.zero_())[0]),
    ],
)
def test_what_must_stay_as_it_was(kind: str, wrong: Any) -> None:
    """The caller's inputs, the other buffer's gradient, the shape."""
    assert check.grade(few(kind) if kind != "log_prob_entropy" else kind, wrong).clauses["C7"] is not None


def test_an_input_filled_in_place() -> None:
    def wrong(x: torch.Tensor, t: torch.Tensor) -> Any:
        got = entropy.log_prob_and_entropy(x * 1, t)
        x.data.nan_to_num_(nan=torch.nan)
        return got

    found = check.log_prob_entropy(wrong).clauses["C7"]
    assert found is not None
    assert found.expected == "the caller's logits as they were"


def test_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind 'alchemy' is none of extraction"):
        check.cases("alchemy")
    with pytest.raises(ValueError, match="kind 'sorcery' is none of extraction"):
        check.grade("sorcery", slicing.extract)


# ---------------------------------------------------------------- on real ranks


@pytest.mark.parametrize(
    ("step", "broken"),
    [("#1788", "C1 C6"), ("#1846", "C4"), ("#2123", "C4")],  # the others are exhibits: test_museum
)
def test_steps_of_the_history(step: str, broken: str) -> None:
    started = time.monotonic()
    report = check.grade(few("step", 3), history.LINE[step])
    assert " ".join(clause for clause, found in report.clauses.items() if found) == broken, str(report)
    assert report.cases == 5
    assert (time.monotonic() - started) * 14 / 5 < 60


def test_a_redistribution_with_the_wrong_convention() -> None:
    """The sum's gradient kept to itself: what another rank's loss says never comes back."""

    def wrong(keys: Any, layout: Layout, rank: int, group: Any) -> Any:
        moved = []
        for pieces in keys:
            whole = []
            for i, (piece, (span,)) in enumerate(zip(pieces, layout.response_spans(rank), strict=True)):
                before = span.position - layout.batch.first_predicting(i)
                after = layout.batch.response_lengths[i] - before - len(piece)
                whole.append(torch.nn.functional.pad(piece, (before, after)))
            summed = collectives.all_reduce(torch.cat(whole), group, loss="replicated")
            responses = torch.split(summed, list(layout.batch.response_lengths))
            firsts = map(layout.batch.first_predicting, range(len(responses)))
            spans = layout.as_zigzag().response_spans(rank)
            owned = zip(responses, firsts, spans, strict=True)
            moved.append([torch.cat([v.narrow(0, s.position - f, s.length) for s in own]) for v, f, own in owned])
        return moved

    report = check.grade(few("redistribution", 3), wrong)
    assert report.clauses["C6"] is None
    assert report.clauses["C7"] is not None
    assert report.clauses["C7"].where.startswith("log-prob gradient")


def flipped(keys: Any, *at: Any) -> Any:
    log_probs, entropies = history.redistribute_now(keys, *at)
    return [[piece.flip(0) for piece in log_probs], entropies]


class FlippedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Any) -> Any:
        return piece.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        return incoming[0].flip(0)


def flipped_in_backward(keys: Any, *at: Any) -> Any:
    return [[FlippedBack.apply(piece) for piece in key] for key in history.redistribute_now(keys, *at)]


def in_one_piece(keys: Any, *at: Any) -> Any:
    return [[torch.cat(key)] for key in history.redistribute_now(keys, *at)]


@pytest.mark.parametrize(("wrong", "clause"), [(flipped, "C7"), (flipped_in_backward, "C7"), (in_one_piece, "C1")])
def test_a_redistribution_with_wrong_pieces(wrong: Any, clause: str) -> None:
    report = check.grade(few("redistribution", 4), wrong)
    assert [c for c, found in report.clauses.items() if found] == [clause], str(report)


def test_a_kind_of_your_own_that_is_odd() -> None:
    of = check.KINDS["targets"]
    assert check.grade(replace(of, inputs=dict), slicing.targets).cases == 0
    odd = replace(of, judge=lambda *_: iter([check.Finding("C9", "", "", "")]))
    assert check.grade(odd, slicing.targets).clauses["C9"] is not None


# ---------------------------------------------------------------- command line and adapters


def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from refimpl import slicing\nright = slicing.extract\ndef wrong(a, b, layout, rank):\n    return [], []\n"
    )
    for name, code in (("right", 0), ("wrong", 1), ("absent", 2)):
        command = [sys.executable, "-m", "refimpl", "check", f"mine:{name}", "--kind", "extraction"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        if code == 2:
            assert "'mine:absent' is no function that can be imported" in done.stderr
            continue
        assert done.stdout.startswith("extract as extraction" if name == "right" else "wrong as extraction")
        assert ("C1 BROKEN" in done.stdout) == (name == "wrong")


BOTH = """
def _extract_per_sample(log_prob_full, entropy_full, total_lengths, response_lengths, allgather_cp):
    start, rank, here = 0, mpu.get_context_parallel_rank(), log_prob_full.size(0)
    lists = [], []
    for total, response in zip(total_lengths, response_lengths):
        first, last = max(start + total - response - 1, rank * here), min(start + total - 1, (rank + 1) * here)
        for out, full in zip(lists, (log_prob_full, entropy_full)):
            if full is not None:
                out.append(full[:0] if last <= first else full[first - rank * here : last - rank * here])
        start += total
    return lists


def get_logits_and_tokens_offset_with_cp(): ...
def slice_log_prob_with_cp(): ...
"""


def test_an_adapter_to_another_signature(tmp_path: Path) -> None:
    """A stand-in with slime's names, windows only: absent entropy comes back as an empty list, zigzag is wrong."""
    folder = tmp_path / "slime/backends/megatron_utils"
    folder.mkdir(parents=True)
    for name in ("loss.py", "cp_utils.py"):
        (folder / name).write_text("import nothing_that_is_installed\n" + BOTH)
    candidate = adapters.slime_extraction(tmp_path)
    window = check.Case(check.KINDS["extraction"], "", Layout(Batch([8], [2]), "thd", "contiguous", 2))
    assert [finding.clause for finding, _ in window.findings(candidate)] == ["C5", "C5"]
    zigzag = check.Case(check.KINDS["extraction"], "", Layout(Batch([8], [2]), "thd", "zigzag", 2))
    assert "C2" in {finding.clause for finding, _ in zigzag.findings(candidate)}


def test_load_takes_single_functions() -> None:
    source = "import nothing\ndef one(x: Unknown) -> Unknown:\n    return helper(x)\ndef two():\n    raise\n"
    assert adapters.load(source, "one", helper=lambda x: x + 1).one(1) == 2
    assert isinstance(adapters.load(source, "one"), SimpleNamespace)
    with pytest.raises(ValueError, match="no function or class three"):
        adapters.load(source, "one", "three")
