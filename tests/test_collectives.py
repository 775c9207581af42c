"""Autograd collectives: conventions by hand, the redistribution against cut lists, and C6 and C7 over many batches."""

from typing import Any

import oracle
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from sweeps import CASES
from sweeps import batches as any_batches
from sweeps import layouts as any_layouts
from torch import Tensor

from refimpl import collectives, ranks, slicing
from refimpl.collectives import redistribute
from refimpl.entropy import log_prob_and_entropy
from refimpl.layout import Batch, Layout
from refimpl.ranks import Rank
from refimpl.recorder import first_difference


def gradient_of(me: Rank, collective: str, loss: Any, replicated: bool) -> tuple[list[float], list[float]]:
    """x = [1, 2] on rank 0 and [3, 4] on rank 1; the loss is all of the result, or rank r's part of it."""
    x = torch.tensor([1.0, 2.0]) + 2 * me.cp_rank
    x.requires_grad_()
    y = getattr(collectives, collective)(x, me.cp_group, loss=loss)
    part = y if replicated else y[me.cp_rank :: 2]
    (
        part * torch.tensor([5.0, 7.0, 11.0, 13.0])[me.cp_rank :: 2][: len(part)] if not replicated else part
    ).sum().backward()
    return y.tolist(), x.grad.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("collective", "loss", "replicated", "values", "gradients"),
    [
        # replicated loss, sum of [4, 6]: its gradient by x is [1, 1] on each rank; the wrong name doubles it
        ("all_reduce", "replicated", True, [4, 6], [[1, 1], [1, 1]]),
        ("all_reduce", "own slice", True, [4, 6], [[2, 2], [2, 2]]),
        # rank 0 counts 5 * y[0], rank 1 counts 7 * y[1]: the sum has gradient [5, 7]; the wrong name drops a part
        ("all_reduce", "own slice", False, [4, 6], [[5, 7], [5, 7]]),
        ("all_reduce", "replicated", False, [4, 6], [[5, 0], [0, 7]]),
        ("all_gather", "replicated", True, [1, 2, 3, 4], [[1, 1], [1, 1]]),
        ("all_gather", "own slice", True, [1, 2, 3, 4], [[2, 2], [2, 2]]),
        # rank 0 counts 5 * y[0] + 11 * y[2], rank 1 counts 7 * y[1] + 13 * y[3]
        ("all_gather", "own slice", False, [1, 2, 3, 4], [[5, 7], [11, 13]]),
        ("all_gather", "replicated", False, [1, 2, 3, 4], [[5, 0], [0, 13]]),
    ],
)
def test_conventions(
    collective: str, loss: str, replicated: bool, values: list[int], gradients: list[list[int]]
) -> None:
    got = ranks.run(gradient_of, collective, loss, replicated, cp=2)
    assert [value for value, _ in got] == [values, values]
    assert [gradient for _, gradient in got] == gradients


def test_a_sub_group_and_strides() -> None:
    """Over CP beside TP, of a transposed input and with an expanded gradient."""

    def body(me: Rank) -> tuple[list[list[float]], list[list[float]]]:
        x = (torch.arange(6.0).view(2, 3).t() + 10 * me.rank).requires_grad_()
        y = collectives.all_gather(x, me.cp_group, loss="own slice")
        y.sum().backward()  # type: ignore[no-untyped-call]
        return y.tolist(), x.grad.tolist()  # type: ignore[union-attr]

    mine = torch.arange(6.0).view(2, 3).t()
    for rank, (values, gradient) in enumerate(ranks.run(body, tp=2, cp=2)):
        pair = (0, 2) if rank in (0, 2) else (1, 3)
        assert values == torch.cat([mine + 10 * other for other in pair]).tolist()
        assert gradient == [[2.0, 2.0]] * 3


def test_all_reduce_over_a_sub_group_of_other_strides_leaves_the_callers_tensors_alone() -> None:
    def body(me: Rank) -> Any:
        values = torch.arange(6.0).view(2, 3) + 10 * me.rank
        x = (values if me.cp_rank else values.t().contiguous().t()).requires_grad_()
        y = collectives.all_reduce(x, me.cp_group, loss="own slice")
        incoming = torch.full((2, 3), 1.0 + me.rank)
        y.backward(incoming)  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return y.tolist(), x.grad.tolist(), incoming.tolist(), values.tolist()

    values = torch.arange(6.0).view(2, 3)
    for rank, (y, gradient, incoming, kept) in enumerate(ranks.run(body, tp=2, cp=2)):
        pair = (0, 2) if rank in (0, 2) else (1, 3)
        assert y == sum(values + 10 * other for other in pair).tolist()  # type: ignore[union-attr]
        assert gradient == torch.full((2, 3), 2.0 + sum(pair)).tolist()
        assert incoming == torch.full((2, 3), 1.0 + rank).tolist()
        assert kept == (values + 10 * rank).tolist()


def test_a_replicated_gather_over_a_sub_group() -> None:
    def body(me: Rank) -> list[float]:
        x = torch.zeros(1, requires_grad=True)
        y = collectives.all_gather(x, me.cp_group, loss="replicated")
        (y * torch.tensor([3.0, 5.0])).sum().backward()  # type: ignore[no-untyped-call]
        return x.grad.tolist()  # type: ignore[union-attr, no-any-return]

    assert ranks.run(body, tp=2, cp=2) == [[3.0], [3.0], [5.0], [5.0]]


def test_an_empty_gather() -> None:
    def body(me: Rank) -> tuple[list[int], list[int]]:
        x = torch.zeros(3, 0, requires_grad=True)
        y = collectives.all_gather(x, me.cp_group, loss="own slice")
        y.sum().backward()  # type: ignore[no-untyped-call]
        return list(y.shape), list(x.grad.shape)  # type: ignore[union-attr]

    assert ranks.run(body, cp=2) == [([6, 0], [3, 0])] * 2
    with pytest.raises(ValueError, match="a scalar has no rows"):
        collectives.all_gather(torch.ones(()), None, loss="replicated")  # type: ignore[arg-type]


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "redistribute"])
def test_a_second_derivative_is_an_error(collective: str) -> None:
    def body(me: Rank) -> None:
        layout = Layout(Batch([8], [6]), "thd", "contiguous", 2)
        x = torch.full((layout.rows,), 2.0, requires_grad=True)
        if collective == "redistribute":
            keys = [slicing.response_pieces(x**3, layout, me.cp_rank)]
            y = torch.cat(redistribute(keys, layout, layout.as_zigzag(), me.cp_rank, me.cp_group)[0])
        else:
            y = getattr(collectives, collective)(x**3, me.cp_group, loss="own slice")
        (gradient,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        gradient.sum().backward()

    for outcome in ranks.observe(body, cp=2):
        assert "once_differentiable" in outcome.reason, outcome.summary


def test_a_convention_must_be_named() -> None:
    with pytest.raises(TypeError, match="loss"):
        collectives.all_reduce(torch.ones(1), None)  # type: ignore[call-arg, arg-type]
    for collective in (collectives.all_reduce, collectives.all_gather):
        with pytest.raises(ValueError, match="loss 'sum' is neither 'own slice' nor 'replicated'"):
            collective(torch.ones(1), None, loss="sum")  # type: ignore[arg-type]


# ---------------------------------------------------------------- redistribution

PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5)  # prompts and responses
FORCED = [  # ranks without any response row, a response of nothing, padding alone on a rank, short samples
    Layout(Batch([16], [4]), "thd", "contiguous", 4),
    Layout(Batch([8, 8], [2, 2]), "thd", "contiguous", 4),
    Layout(Batch([4, 4], [2, 2]), "thd", "contiguous", 2, pad_multiple=8),
    Layout(Batch([3, 1, 2], [1, 0, 0]), "thd", "contiguous", 3),
    Layout(Batch([1, 1], [0, 0]), "thd", "contiguous", 2),
]


def batches(cp: int, count: int) -> list[Layout]:
    """The forced ones of this cp_size, and ``count`` that hypothesis thinks of, the same in each run."""
    found = [layout for layout in FORCED if layout.cp_size == cp]

    @seed(20260101)
    @settings(max_examples=count, deadline=None, phases=[Phase.generate], database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(PAIRS, st.integers(1, 3))
    def collect(pairs: list[tuple[int, int]], multiple: int) -> None:
        batch = Batch([p + r for p, r in pairs], [r for _, r in pairs])
        found.append(Layout(batch, "thd", "contiguous", cp, pad_multiple=multiple))

    collect()
    return found


VOCAB = 6


def logits_of(layout: Layout) -> list[Tensor]:
    """Of each sample, ``[L, VOCAB]`` fp64."""
    generator = torch.Generator().manual_seed(sum(layout.batch.total_lengths))
    return [torch.randn(n, VOCAB, dtype=torch.float64, generator=generator) for n in layout.batch.total_lengths]


def tokens_of(layout: Layout) -> list[Tensor]:
    return [torch.arange(n) * 5 % VOCAB for n in layout.batch.total_lengths]


def local(samples: list[Tensor], layout: Layout, rank: int) -> Tensor:
    """One rank's rows, cut as the oracle says; padding rows hold ones."""
    rows = oracle.rows(layout)[rank]
    return torch.stack(
        [samples[c[0]][c[1]] if c else torch.ones(VOCAB, dtype=torch.float64) for c in rows] or [torch.ones(VOCAB)]
    )[: len(rows)]


def one_step(me: Rank, layout: Layout, coefficient: float) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Forward and backward of a loss that weighs every response token differently."""
    shard = slice(me.tp_rank * VOCAB // me.tp_size, (me.tp_rank + 1) * VOCAB // me.tp_size)
    logits = local(logits_of(layout), layout, me.cp_rank)[:, shard].clone().requires_grad_()
    goals = slicing.targets(tokens_of(layout), layout, me.cp_rank, response_only=True)
    log_prob, entropy = log_prob_and_entropy(
        logits, goals, entropy="grad" if coefficient else "value", tp_group=me.tp_group, vocab_start=shard.start
    )
    keys = slicing.extract(log_prob, entropy, layout, me.cp_rank)
    assert keys[1] is not None
    log_probs, entropies = redistribute([keys[0], keys[1]], layout, layout.as_zigzag(), me.cp_rank, me.cp_group)
    assert all(piece.requires_grad == bool(coefficient) for piece in entropies)
    weights = weights_of(layout, me.cp_rank)
    loss = (torch.cat(log_probs) * weights).sum() + coefficient * (torch.cat(entropies) * weights).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return [p.detach() for p in log_probs], [p.detach() for p in entropies], logits.grad


def weights_of(layout: Layout, rank: int) -> Tensor:
    """1 + 10 * sample + position, of the response tokens that a rank owns under zigzag."""
    zigzag = Layout(layout.batch, "thd", "zigzag", layout.cp_size)
    samples = range(len(layout.batch))
    owned = [(i, p) for i in samples for _, p in oracle.response(zigzag, rank, i)]
    return torch.tensor([1.0 + 10 * i + p for i, p in owned], dtype=torch.float64)


def alone(layout: Layout, coefficient: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """One fp64 process that holds everything: per sample log-probs, entropies and the gradient of its logits."""
    samples = [x.requires_grad_() for x in logits_of(layout)]
    log_probs, entropies, loss = [], [], torch.zeros((), dtype=torch.float64)
    for i, (x, tokens) in enumerate(zip(samples, tokens_of(layout), strict=True)):
        first = layout.batch.total_lengths[i] - layout.batch.response_lengths[i] - 1
        log_p = torch.log_softmax(x[first:-1] if layout.batch.response_lengths[i] else x[:0], 1)
        log_probs.append(log_p.gather(1, tokens[first + 1 :, None][: len(log_p)])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(1))
        weight = 1.0 + 10 * i + torch.arange(first, first + len(log_p))
        loss = loss + (weight * (log_probs[-1] + coefficient * entropies[-1])).sum()
    gradients = torch.autograd.grad(loss, samples, allow_unused=True, materialize_grads=True)
    return [p.detach() for p in log_probs], [h.detach() for h in entropies], list(gradients)


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (3, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_many_batches_equal_one_process_with_the_same_collectives(cp: int, tp: int, coefficient: float) -> None:
    """C2, C4, C5, C6 and C7 at once, 50 batches a run and more."""
    layouts = batches(cp, 50)
    assert len(layouts) > 50
    assert any(not any(oracle.response(x, r, i) for i in range(len(x.batch))) for x in layouts for r in range(cp))

    def sweep(me: Rank) -> Any:
        return [one_step(me, layout, coefficient) for layout in layouts]

    outcomes = ranks.observe(sweep, tp=tp, cp=cp, timeout=120)
    assert [outcome.summary for outcome in outcomes] == ["returned"] * (tp * cp)
    assert first_difference(ranks.records(outcomes)) is None
    over_cp = [[(c.operation, c.phase) for c in o.calls if c.group == "cp"] for o in outcomes]
    assert over_cp == [[("all_to_all", "forward"), ("all_to_all", "backward")] * len(layouts)] * (tp * cp)
    for number, layout in enumerate(layouts):
        log_probs, entropies, gradients = alone(layout, coefficient)
        zigzag = Layout(layout.batch, "thd", "zigzag", cp)
        for rank, outcome in enumerate(outcomes):
            cp_rank, tp_rank = rank // tp, rank % tp
            got_log_probs, got_entropies, got_gradient = outcome.value[number]
            for i in range(len(layout.batch)):
                first = layout.batch.first_predicting(i)
                owned = [p - first for _, p in oracle.response(zigzag, cp_rank, i)]
                assert torch.allclose(got_log_probs[i], log_probs[i][owned], atol=1e-12), layout
                assert torch.allclose(got_entropies[i], entropies[i][owned], atol=1e-12), layout
            assert got_gradient is not None, layout  # zeros on an empty rank, never absent
            rows = [gradients[c[0]][c[1]] if c else torch.zeros(VOCAB) for c in oracle.rows(layout)[cp_rank]]
            shard = slice(tp_rank * VOCAB // tp, (tp_rank + 1) * VOCAB // tp)
            assert all(
                torch.allclose(a, b[shard].double(), atol=1e-12) for a, b in zip(got_gradient, rows, strict=True)
            )


@pytest.mark.parametrize("keys", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, 7])
def test_one_collective_each_way_whatever_the_number_of_samples_and_keys(keys: int, samples: int) -> None:
    def body(me: Rank, layout: Layout) -> None:
        buffer = torch.arange(float(layout.rows), requires_grad=True)
        pieces = slicing.response_pieces(buffer, layout, me.cp_rank)
        moved = redistribute([pieces] * keys, layout, layout.as_zigzag(), me.cp_rank, me.cp_group)
        torch.cat([torch.cat(key) for key in moved]).sum().backward()  # type: ignore[no-untyped-call]

    layout = Layout(Batch([6] * samples, [4] * samples), "thd", "contiguous", 2)
    for outcome in ranks.observe(body, layout, cp=2):
        assert [(c.operation, c.phase) for c in outcome.calls] == [
            ("all_to_all", "forward"),
            ("all_to_all", "backward"),
        ]


Move = tuple[Layout, Layout, tuple[bool, ...]]  # from, to, and for each key whether it wants a gradient


def moves(cp: int, count: int) -> list[Move]:
    """Any batch, any two layouts of it, one to three keys."""
    found: list[Move] = []

    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        batch = data.draw(any_batches())
        source, target = (data.draw(any_layouts(batch, cp)) for _ in range(2))
        found.append((source, target, tuple(data.draw(st.lists(st.booleans(), min_size=1, max_size=3)))))

    collect()
    return found


def value(key: int, sample: int, position: int) -> float:
    return 100_000.0 * key + 1000 * (sample + 1) + position


def weight(key: int, sample: int, position: int) -> float:
    return (key + 1) * (7.0 + 100 * sample + 3 * position)


def owned(layout: Layout, rank: int) -> list[list[tuple[int, int]]]:
    return [oracle.response(layout, rank, i) for i in range(len(layout.batch))]


def move(me: Rank, moves: list[Move]) -> Any:
    """What arrives, which keys of it have a gradient, and the gradients of what was sent, by the loss with weights."""
    done = []
    for source, target, wants in moves:
        mine, keys, buffers = owned(source, me.cp_rank), [], []
        for key, wanted in enumerate(wants):
            rows = [-7.0 if c is None else value(key, *c) for c in oracle.rows(source)[me.cp_rank]]
            buffers.append(torch.tensor(rows, dtype=torch.float64, requires_grad=wanted))
            keys.append([buffers[-1][[row for row, _ in held]] for held in mine])
        arrived = redistribute(keys, source, target, me.cp_rank, me.cp_group)
        loss = sum(
            ((piece * torch.tensor([weight(key, i, p) for _, p in held])).sum()
            for key, pieces in enumerate(arrived) if wants[key]
            for i, (piece, held) in enumerate(zip(pieces, owned(target, me.cp_rank), strict=True))),
            start=torch.zeros((), requires_grad=True),
        )  # fmt: skip
        loss.backward()
        done.append((
            [[piece.tolist() for piece in pieces] for pieces in arrived],
            [[piece.requires_grad for piece in pieces] for pieces in arrived],
            [None if buffer.grad is None else buffer.grad.tolist() for buffer in buffers],
        ))  # fmt: skip
    return done


def expected(rank: int, source: Layout, target: Layout, wants: tuple[bool, ...]) -> Any:
    samples = range(len(source.batch))
    scoring = {(row, i): p for i in samples for row, p in oracle.response(source, rank, i)}
    gradient = lambda key: [  # noqa: E731
        weight(key, *cell) if cell and (row, cell[0]) in scoring else 0.0
        for row, cell in enumerate(oracle.rows(source)[rank])
    ]
    return (
        [[[value(k, i, p) for _, p in held] for i, held in enumerate(owned(target, rank))] for k in range(len(wants))],
        [[wanted] * len(samples) for wanted in wants],
        [gradient(key) if wanted and samples else None for key, wanted in enumerate(wants)],
    )


@pytest.mark.sweep
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_any_batch_between_any_two_layouts(cp: int) -> None:
    """All of them in one start of real ranks; the smallest that went wrong is shown."""
    cases = moves(cp, settings.default.max_examples // 3)
    assert len(cases) >= settings.default.max_examples // 3
    CASES["redistribution"] += len(cases)
    outcomes = ranks.observe(move, cases, cp=cp, timeout=600)
    assert [outcome.summary for outcome in outcomes] == ["returned"] * cp
    assert first_difference(ranks.records(outcomes)) is None
    wrong = [
        (sum(case[0].batch.total_lengths), rank, *case, got, expected(rank, *case))
        for rank, outcome in enumerate(outcomes)
        for case, got in zip(cases, outcome.value, strict=True)
        if got != expected(rank, *case)
    ]
    assert not wrong, min(wrong, key=lambda found: found[0])


def test_it_moves_between_any_two_layouts() -> None:
    """bshd windows to bshd zigzag, and back again: what went comes back."""

    def there_and_back(me: Rank) -> tuple[list[list[float]], list[list[float]]]:
        layout = Layout(Batch([5, 2, 7], [3, 1, 4]), "bshd", "contiguous", 2)
        buffer = me.cp_rank * 100 + torch.arange(float(layout.rows))
        pieces = slicing.response_pieces(buffer, layout, me.cp_rank)
        (moved,) = redistribute([pieces], layout, layout.as_zigzag(), me.cp_rank, me.cp_group)
        (back,) = redistribute([moved], layout.as_zigzag(), layout, me.cp_rank, me.cp_group)
        return [p.tolist() for p in pieces], [p.tolist() for p in back]

    for before, after in ranks.run(there_and_back, cp=2):
        assert before == after
        assert any(before)


def test_nan_and_infinity_travel_alone() -> None:
    def body(me: Rank) -> list[list[float]]:
        layout = Layout(Batch([8], [6]), "thd", "contiguous", 2)
        buffer = torch.arange(4.0) + 4 * me.cp_rank
        buffer[3] = torch.inf if me.cp_rank else torch.nan
        pieces = slicing.response_pieces(buffer, layout, me.cp_rank)
        return [p.tolist() for p in redistribute([pieces], layout, layout.as_zigzag(), me.cp_rank, me.cp_group)[0]]

    first, second = ranks.run(body, cp=2)
    assert first == [[1.0, 6.0]]
    assert second[0][0] == 2.0
    assert second[0][1] != second[0][1]
    assert second[0][2:] == [4.0, 5.0]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("length", r"sample 0: a piece is \[3\] torch.float32; rank 0 of thd, allgather CP, cp_size 2 holds \[1\]"),
        ("dtype", r"sample 0: a piece is \[1\] torch.float64; rank 0 of .* holds \[1\] torch.float32"),
        ("none", r"sample 0: a piece is None; rank 0 of"),
        ("batch", "thd, zigzag CP, cp_size 2 is not a layout of the same batch and cp_size"),
        ("cp_size", "thd, zigzag CP, cp_size 4 is not a layout of the same batch and cp_size"),
        ("number", "key 1: 2 pieces for 1 samples"),
    ],
)
def test_bad_input_is_an_error_before_anyone_waits(what: str, message: str) -> None:
    layout = Layout(Batch([4], [2]), "thd", "contiguous", 2)
    targets = {"batch": Layout(Batch([5], [2]), cp_size=2), "cp_size": Layout(layout.batch, cp_size=4)}
    seconds: Any = {"length": [torch.ones(3)], "dtype": [torch.ones(1).double()], "none": [None]}
    seconds["number"] = [torch.ones(1), torch.ones(1)]
    keys = [[torch.ones(1)], seconds.get(what, [torch.ones(1)])]
    with pytest.raises(ValueError, match=message):
        redistribute(keys, layout, targets.get(what, layout.as_zigzag()), 0, None)  # type: ignore[arg-type]


def test_a_rank_that_is_another_than_it_says() -> None:
    def body(me: Rank) -> None:
        layout = Layout(Batch([4], [2]), "thd", "contiguous", 2)
        pieces = slicing.response_pieces(torch.ones(layout.rows), layout, 1)
        redistribute([pieces], layout, layout.as_zigzag(), 1, me.cp_group)

    assert ranks.observe(body, cp=2)[0].reason == (
        "ValueError: cp_rank 1 of 2 in the layout, but rank 0 of a group of 2"
    )


def test_no_sample_and_no_key() -> None:
    empty, some = Layout(Batch([], []), "thd", "contiguous", 2), Layout(Batch([4], [2]), "thd", "contiguous", 2)
    assert redistribute([[], []], empty, empty.as_zigzag(), 0, None) == [[], []]  # type: ignore[arg-type]
    assert redistribute([], some, some.as_zigzag(), 0, None) == []  # type: ignore[arg-type]
