"""Log-prob and entropy against numbers worked out by hand and against one fp64 process that holds everything."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import CASES
from torch.autograd import gradcheck

from refimpl import _cpu, entropy, ranks
from refimpl.entropy import Triple, log_prob_and_entropy
from refimpl.slicing import NO_TARGET

INF = math.inf
BACKENDS = ["eager", "fused"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BOTH = [(b, d) for b in BACKENDS for d in DTYPES if (b, d) != ("fused", torch.float64)]


def reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    g_log_prob: torch.Tensor,
    g_entropy: torch.Tensor,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob, entropy and the logits' gradient, column by column in fp64, from the definitions."""
    z = logits.detach().double() / temperature
    log_p = z - torch.logsumexp(z, 1, keepdim=True)
    p = log_p.exp()
    terms = torch.where(z == -INF, 0.0, p * log_p)
    h = -terms.sum(1)
    skipped = targets == NO_TARGET
    index = targets.clamp_min(0)[:, None]
    onehot = torch.zeros_like(z).scatter_(1, index, 1.0)
    g1, g2 = g_log_prob.double()[:, None], g_entropy.double()[:, None]
    gradient = (g1 * (onehot - p) - g2 * (terms + p * h[:, None])) / temperature
    log_prob = log_p.gather(1, index)[:, 0]
    return log_prob.masked_fill(skipped, 0), h.masked_fill(skipped, 0), gradient.masked_fill(skipped[:, None], 0)


def both(logits: torch.Tensor, targets: Any, backend: str, **options: Any) -> tuple[torch.Tensor, ...]:
    """Log-prob, entropy, and the gradients of their sums with respect to the logits."""
    leaf = logits.clone().requires_grad_()
    log_prob, h = log_prob_and_entropy(leaf, torch.tensor(targets), backend=backend, **options)  # type: ignore[arg-type]
    assert h is not None
    one = torch.autograd.grad(log_prob.sum(), leaf, retain_graph=True)[0]
    return log_prob.detach(), h.detach(), one, torch.autograd.grad(h.sum(), leaf)[0]


def close(got: torch.Tensor, want: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), atol=tolerance, rtol=0, equal_nan=True)


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_by_hand(backend: str) -> None:
    _, h, _, _ = both(torch.tensor([[1.0, 2.0, 3.0]]), [0], backend)
    close(h, [0.8324])
    for columns in (1, 2, 7, 3000):
        log_prob, h, _, g_h = both(torch.full((1, columns), 5.0), [0], backend)
        close(h, [math.log(columns)])
        close(log_prob, [-math.log(columns)])
        close(g_h, [[0.0] * columns])
    _, h, _, g_h = both(torch.tensor([[0.0, 0.0, -INF]]), [0], backend)
    close(h, [0.6931])
    assert g_h[0, 2] == 0
    log_prob, _, g_lp, _ = both(torch.tensor([[1.0, 2.0, -INF]]), [1], backend)
    close(log_prob, [-0.3133])
    close(g_lp, [[-0.2689, 0.2689, 0.0]])
    _, h, g_lp, g_h = both(torch.tensor([[0.0, -200.0]]), [1], backend)
    close(h, [0.0])
    close(g_h, [[0.0, 0.0]])
    close(g_lp, [[-1.0, 1.0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_offset_changes_nothing(backend: str) -> None:
    base = torch.tensor([[0.0, 1.0, 2.5, -3.0]])
    for name, got, want in zip(
        ["lp", "h", "g_lp", "g_h"], both(base + 1e4, [2], backend), both(base, [2], backend), strict=True
    ):
        assert torch.allclose(got, want, atol=2e-6), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_offset_changes_nothing_at_any_temperature(backend: str, temperature: float) -> None:
    base = torch.randint(-9, 9, (3, 40), generator=torch.Generator().manual_seed(0)) / 4  # exact in fp32, also far out
    for offset in (1e4, 1e6):
        moved = both(base + offset, [2, 0, 39], backend, temperature=temperature)
        for got, want in zip(moved, both(base, [2, 0, 39], backend, temperature=temperature), strict=True):
            torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ends_of_the_range(backend: str) -> None:
    log_prob, h, _, g_h = both(torch.tensor([[3e38, -3e38, -3e38]]), [0], backend)
    close(torch.cat([log_prob, h]), [0.0, 0.0])
    close(g_h, [[0.0, 0.0, 0.0]])


def test_the_compiled_kernels_leave_subnormal_numbers_alone() -> None:
    both(torch.ones(1, 4), [0], "fused")
    assert 5e-324 * 1.0 == 5e-324
    assert (torch.tensor([1e-310], dtype=torch.float64) * 1).item() == 1e-310


def test_no_second_derivative_instead_of_a_wrong_one() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    log_prob, _ = log_prob_and_entropy(logits, torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(log_prob.sum(), logits, create_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_row_stays_alone(backend: str) -> None:
    logits = torch.tensor([[1.0, 2, 3], [-INF] * 3, [1, math.nan, 3], [1, INF, 3], [1, 2, 3]]).repeat(1, 600)
    results = both(logits, [2, 0, 0, 0, 2], backend)
    for result in results:
        assert result[[1, 2, 3]].isnan().all()
        assert result[[0, 4]].isfinite().all()
    late = torch.full((1, 3000), -INF)
    late[0, 2999] = 1.0  # the first tiles hold nothing but -inf
    close(both(late, [2999], backend)[1], [0.0])
    late[0, 5] = math.nan
    assert both(late, [2999], backend)[1].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_verl_5349_missing_columns_of_the_last_tile(backend: str) -> None:
    for columns in (5, 1023, 1025, 4097):
        logits = torch.full((1, columns), -15.0)
        logits[0, 3] = 3.0
        log_prob = both(logits, [3], backend)[0]
        assert log_prob[0] <= 0
        close(log_prob, [-math.log1p((columns - 1) * math.exp(-18))])


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer_engine_2139_each_row_its_own_incoming_gradient(backend: str) -> None:
    leaf = torch.tensor([[1.0, 2, 3], [1, 2, 3]]).requires_grad_()
    log_prob, _ = log_prob_and_entropy(leaf, torch.tensor([0, 0]), backend=backend)  # type: ignore[arg-type]
    log_prob.backward(torch.tensor([0.0, 1.0]))
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == [0.0] * 3
    close(leaf.grad[1], [0.9100, -0.2447, -0.6652])


# ---------------------------------------------------------------- against fp64


@st.composite
def logits_and_targets(draw: st.DrawFn, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Logits; targets; the number of columns that count, after which there is rubbish; the rows that are not finite."""
    rows, columns = draw(st.integers(1, 5)), draw(st.sampled_from([2500, 1, 2, 31, 1024, 1025, 2049, 3000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    offsets = [0.0, 1e4, -1e4] + [1e6, 1e30, -1e30] * (dtype != torch.float16)
    offset = torch.tensor(draw(st.lists(st.sampled_from(offsets), min_size=rows, max_size=rows)), dtype=torch.float64)
    spread = draw(st.sampled_from([0.0, 0.1, 3.0, 30.0]))
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * spread + offset[:, None]
    holes = torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.95]))
    holes[torch.arange(rows), torch.randint(columns, (rows,), generator=generator)] = False
    values[holes] = -INF
    bad = torch.zeros(rows, dtype=torch.bool)
    if rows and draw(st.booleans()):
        bad[0], column = True, draw(st.integers(0, columns - 1))
        what = draw(st.sampled_from([INF, math.nan, -INF]))
        values[0, slice(None) if what == -INF else column] = what
    rubbish = torch.tensor([[math.nan, INF, 3e4][: draw(st.integers(0, 3))]], dtype=torch.float64).expand(rows, -1)
    targets = torch.randint(columns, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.2] = NO_TARGET
    return torch.cat([values, rubbish], 1).to(dtype), targets, columns, bad


def one_row(row: torch.Tensor, target: int, g_log_prob: float, g_entropy: float, temperature: float) -> list[Any]:
    """From the definitions, in fp64, by autograd, over the columns of one row that are not -inf."""
    counts = row > -INF
    x = row[counts].clone().requires_grad_()
    d = (x - x.detach().max()) / temperature
    log_sum = d.exp().sum().log()
    h = ((d - log_sum).exp() * (log_sum - d)).sum()
    gradient = torch.zeros_like(row)
    gradient[counts] = torch.autograd.grad(g_entropy * h - g_log_prob * log_sum, x)[0]
    gradient[target] += g_log_prob / temperature
    return [((row[target] - x.detach().max()) / temperature - log_sum).item(), h.item(), gradient]


@pytest.mark.sweep
@given(data=st.data(), case=st.sampled_from(BOTH))
def test_any_logits(data: st.DataObject, case: tuple[str, torch.dtype]) -> None:
    CASES["entropy"] += 1
    backend, dtype = case
    logits, targets, columns, bad = data.draw(logits_and_targets(dtype))
    temperature, start = data.draw(st.sampled_from([0.05, 0.7, 1.0, 3.0, 50.0])), data.draw(st.sampled_from([0, 7]))
    overwrite, mode = data.draw(st.booleans()), data.draw(st.sampled_from(["grad", "grad", "value", "off"]))
    g1, g2 = torch.linspace(-1, 2, 2 * len(logits)).view(2, -1) + 0.1
    g2 = g2 if mode == "grad" else torch.zeros_like(g2)

    leaf = logits.clone().requires_grad_()
    log_prob, h = log_prob_and_entropy(
        leaf * 1.0, torch.where(targets == NO_TARGET, targets, targets + start), temperature=temperature,
        backend=backend, entropy=mode, vocab_start=start, vocab_size=start + columns, overwrite_logits=overwrite,
    )  # type: ignore[call-overload]  # fmt: skip
    results = [(log_prob, g1)] + ([(h, g2)] if mode == "grad" else [])
    torch.autograd.backward([y for y, _ in results], [g.to(y.dtype) for y, g in results])
    assert (h is None) == (mode == "off")
    assert log_prob.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert h is None or (h.dtype, h.requires_grad) == (log_prob.dtype, mode == "grad")
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype
    assert torch.equal(leaf.detach().nan_to_num(7.0), logits.nan_to_num(7.0))
    assert (leaf.grad[:, columns:] == 0).all()

    fine = 1e-11 if dtype == torch.float64 else 2e-5
    ulp = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, fine)
    for i, target in enumerate(targets.tolist()):
        got = [log_prob[i], *([] if h is None else [h[i]]), leaf.grad[i, :columns]]
        if target == NO_TARGET:
            assert all((value == 0).all() for value in got)
        elif bad[i]:
            assert all(value.isnan().all() for value in got)
        else:
            row = logits[i, :columns].double()
            lp, entropy_, gradient = one_row(row, target, float(g1[i]), float(g2[i]), temperature)
            assert got[0].item() == pytest.approx(lp, rel=fine, abs=fine)
            assert got[0] <= 0
            assert h is None or got[1].item() == pytest.approx(entropy_, rel=fine, abs=fine)
            grain = fine * max(1, 1 / temperature)
            torch.testing.assert_close(got[-1].detach().double(), gradient, atol=grain, rtol=ulp)


@pytest.mark.parametrize(("backend", "dtype"), BOTH)
def test_strides(backend: str, dtype: torch.dtype) -> None:
    """A slice of wider rows, a transposed matrix, rows that are one row expanded; expanded incoming gradients."""
    torch.manual_seed(0)
    wide = torch.randn(6, 2000).to(dtype)
    targets = torch.tensor([0, 5, NO_TARGET, 7, 99, 3])
    for logits in (wide[:, 100:1400], torch.randn(1300, 6).to(dtype).T, wide[:1, :1300].expand(6, -1)):
        if backend == "fused" and logits.stride(1) != 1:
            with pytest.raises(ValueError, match="no fused kernels"):
                log_prob_and_entropy(logits, targets, backend="fused")
            continue
        want = reference(logits, targets, torch.ones(6), torch.full((6,), 2.0))
        leaf = logits.detach().requires_grad_()
        log_prob, h = log_prob_and_entropy(leaf, targets, backend=backend)  # type: ignore[arg-type]
        assert h is not None
        (gradient,) = torch.autograd.grad(log_prob.sum() + 2 * h.sum(), leaf)  # sum's gradient has stride 0
        for got, expected in zip((log_prob, h, gradient), want, strict=True):
            torch.testing.assert_close(
                got.double(),
                expected,
                atol=1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-5,
                rtol=1e-2 if got is gradient else 1e-5,
            )


def test_gradcheck() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, NO_TARGET, 2])
    assert gradcheck(lambda x: log_prob_and_entropy(x, targets, temperature=0.7), (logits,))
    inside = targets.clamp_max(4)
    assert gradcheck(lambda x: log_prob_and_entropy(x, inside, vocab_size=5), (logits,))


# ---------------------------------------------------------------- the algebra


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([-INF, -200.0, -1.0, 0.0, 0.5, 3.0, 300.0]), min_size=1, max_size=12), st.data())
def test_triples_merge_in_any_order(values: list[float], data: st.DataObject) -> None:
    z = torch.tensor([values], dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    parts = [Triple.of(z[:, a:b]) for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    order = data.draw(st.permutations(range(len(parts))))
    merged = parts[order[0]]
    for i in order[1:]:
        merged = merged.merge(parts[i])
    finite = [v for v in values if v != -INF]
    if finite:
        top, total = max(finite), sum(math.exp(v - max(finite)) for v in finite)
        weighted = sum(math.exp(v - top) * (v - top) for v in finite)
        for got, want in zip(merged[:3], (top, total, weighted), strict=True):
            assert got.item() == pytest.approx(want, rel=1e-12, abs=1e-300)
    else:
        assert (merged.m.item(), merged.s.item(), merged.w.item()) == (-INF, 0, 0)


# ---------------------------------------------------------------- autograd manners


@pytest.mark.parametrize("backend", BACKENDS)
def test_options_of_the_entropy(backend: Any) -> None:
    logits, targets = torch.randn(3, 5).requires_grad_(), torch.tensor([0, 1, NO_TARGET])
    assert log_prob_and_entropy(logits, targets, entropy="off", backend=backend)[1] is None
    log_prob, h = log_prob_and_entropy(logits, targets, entropy="value", backend=backend)
    assert h is not None
    assert (log_prob.requires_grad, h.requires_grad) == (True, False)
    log_prob.sum().backward()
    _, h = log_prob_and_entropy(logits, targets, backend=backend)
    assert h is not None
    assert h.requires_grad
    with torch.no_grad():
        log_prob, h = log_prob_and_entropy(logits, targets, backend=backend)
    assert h is not None
    assert not log_prob.requires_grad
    assert not h.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_rows_in_attached_zero_rows_out(backend: Any) -> None:
    logits = torch.randn(0, 5).requires_grad_()
    log_prob, h = log_prob_and_entropy(logits, torch.zeros(0, dtype=torch.int64), backend=backend)
    assert h is not None
    assert log_prob.shape == h.shape == (0,)
    (log_prob.sum() + h.sum()).backward()
    assert logits.grad is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_backward_and_two_losses(backend: Any) -> None:
    logits, targets = torch.randn(3, 5).requires_grad_(), torch.tensor([0, 1, 2])
    hidden = logits * 1.0
    log_prob, h = log_prob_and_entropy(hidden, targets, backend=backend)
    other = hidden.logsumexp(1)
    assert h is not None
    loss = log_prob.sum() + h.sum() + other.sum()
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, logits)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overwriting_the_logits(backend: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    leaf = torch.randn(5, 1500).to(dtype).requires_grad_()
    targets = torch.tensor([0, 3, NO_TARGET, 7, 1499])
    want = reference(leaf, targets, torch.ones(5), torch.ones(5))[2]
    hidden = leaf * 1.0
    where = hidden.data_ptr()
    log_prob, h = log_prob_and_entropy(hidden, targets, overwrite_logits=True, backend=backend)
    assert h is not None
    loss = log_prob.sum() + h.sum()
    seen = []
    hidden.register_hook(lambda g: seen.append(g.data_ptr()))
    loss.backward(retain_graph=True)
    assert seen == [where]  # no second buffer
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), want, atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_gradient_keeps_its_memory_as_long_as_somebody_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu, "KEPT_FROM", 1)
    monkeypatch.setattr(_cpu, "_kept", [])
    targets = torch.tensor([0, NO_TARGET, 2])

    def gradient(scale: float) -> torch.Tensor:
        logits = (torch.arange(15.0).view(3, 5) * scale).requires_grad_()
        log_prob_and_entropy(logits, targets, backend="fused")[0].sum().backward()
        assert logits.grad is not None
        return logits.grad

    one, two = gradient(1.0), gradient(-1.0)
    kept = one.clone()
    place, view = two.data_ptr(), two[2, 1:3]
    del two
    three = gradient(0.5)  # the view still holds the second one's memory
    assert len({one.data_ptr(), place, three.data_ptr()}) == 3
    assert torch.equal(one, kept)
    place = three.data_ptr()
    del three, view
    four = gradient(1.0)
    assert four.data_ptr() == place  # free, and taken again
    assert torch.equal(four, kept)
    assert four[1].tolist() == [0.0] * 5


def test_overwriting_is_refused_or_heard_where_it_is_unsafe() -> None:
    targets = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="they are a leaf"):
        log_prob_and_entropy(torch.randn(2, 5).requires_grad_(), targets, overwrite_logits=True)
    with pytest.raises(ValueError, match="a view of one"):
        log_prob_and_entropy(torch.randn(1, 2, 5).requires_grad_().view(2, 5), targets, overwrite_logits=True)
    with pytest.raises(ValueError, match="not contiguous"):
        log_prob_and_entropy((torch.randn(5, 2).requires_grad_() * 1).T, targets, overwrite_logits=True)
    soft = torch.randn(2, 5).requires_grad_().tanh()  # tanh needs its output again in backward
    log_prob, _ = log_prob_and_entropy(soft, targets, overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_prob.sum().backward()


# ---------------------------------------------------------------- bad input


def test_bad_input() -> None:
    logits, targets = torch.randn(3, 5), torch.tensor([0, 1, 2])
    for bad, message in ((torch.randn(3), "must be"), (torch.zeros(3, 5, dtype=torch.int64), "floating")):
        with pytest.raises(ValueError, match=message):
            log_prob_and_entropy(bad, targets)
    for bad in (targets[:2], targets.int(), targets[None]):
        with pytest.raises(ValueError, match="int64"):
            log_prob_and_entropy(logits, bad)
    for options in (
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"vocab_start": -1},
        {"vocab_size": -1},
        {"entropy": "yes"},
        {"vocab_start": 0.5},
        {"temperature": math.inf},
    ):
        with pytest.raises(ValueError, match="positive"):
            log_prob_and_entropy(logits, targets, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_of_any_type(backend: Any) -> None:
    logits, targets = torch.randn(3, 5), torch.tensor([0, 1, 2])
    want = log_prob_and_entropy(logits, targets, temperature=2.0, backend=backend)[0]
    got = log_prob_and_entropy(logits, targets, temperature=torch.tensor(2.0), backend=backend)[0]  # type: ignore[arg-type]
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="not one of auto, eager and fused"):
        log_prob_and_entropy(logits, targets, backend="Fused")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_check_names_the_row(backend: Any) -> None:
    logits, targets = torch.randn(3, 5), torch.tensor([0, 7, NO_TARGET])
    assert log_prob_and_entropy(logits, targets, backend=backend)[0].isnan().tolist() == [False, True, False]
    with pytest.raises(ValueError, match="row 1: target 7: not in the vocabulary"):
        log_prob_and_entropy(logits, targets, check=True, backend=backend)
    logits[0, 2] = math.nan
    with pytest.raises(ValueError, match="row 0: target 0: its logits hold NaN"):
        log_prob_and_entropy(logits, targets, check=True, backend=backend)


def test_padded_columns_are_left_out() -> None:
    """Megatron-LM #1754, in one process: 5 real columns and one of padding, which holds the largest logit."""
    logits = torch.tensor([[1.0, 2, 3, 4, 5, 99]])
    for backend in BACKENDS:
        padded = both(logits, [4], backend, vocab_size=5)
        for got, want in zip(padded, both(logits[:, :5], [4], backend), strict=True):
            assert torch.equal(got[:, :5] if got.dim() == 2 else got, want)
            assert got.dim() == 1 or got[0, 5] == 0
        hidden = logits.clone().requires_grad_() * 1
        log_prob, _ = log_prob_and_entropy(
            hidden,
            torch.tensor([4]),
            vocab_size=5,
            overwrite_logits=True,
            backend=backend,  # type: ignore[arg-type]
        )
        log_prob.sum().backward()
        assert hidden[0, 5] == 0


def test_without_a_compiler_the_formulas_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    _cpu.library.cache_clear()
    monkeypatch.setattr(entropy, "FUSED_FROM", 4)
    try:
        assert both(torch.tensor([[1.0, 2.0, 3.0, 0.0]]), [0], "auto")[1].item() == pytest.approx(0.9475, abs=1e-4)
        with pytest.raises(ValueError, match="no fused kernels"):
            both(torch.ones(1, 4), [0], "fused")
    finally:
        _cpu.library.cache_clear()


# ---------------------------------------------------------------- tensor parallel


def shard(
    me: ranks.Rank, logits: torch.Tensor, targets: torch.Tensor, cuts: list[int], vocab: int, backend: Any
) -> Any:
    """One rank's share: columns [cuts[r], cuts[r + 1]), and how many collectives it took."""
    calls: list[str] = []
    real = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *a, **k: (calls.append("all_reduce"), real(*a, **k))[1]
    mine = logits[:, cuts[me.tp_rank] : cuts[me.tp_rank + 1]].clone().requires_grad_()
    log_prob, h = log_prob_and_entropy(
        mine,
        targets,
        tp_group=me.tp_group,
        vocab_start=cuts[me.tp_rank],
        vocab_size=vocab,
        backend=backend,
        temperature=0.7,
    )
    forward = len(calls)
    assert h is not None
    (log_prob.sum() + 2 * h.sum()).backward()
    return log_prob.detach(), h.detach(), mine.grad, forward, len(calls)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "cuts", [[0, 12], [0, 6, 12], [0, 1, 12], [0, 0, 12], [0, 3, 6, 9, 12], [0, 4, 4, 5, 12]], ids=str
)
def test_shards_equal_one_process(cuts: list[int], backend: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float64 if backend == "eager" else torch.float32
    logits = torch.randn(6, 12, dtype=dtype) * 3
    logits[1, :6] = -INF  # a whole shard of nothing
    logits[2] = -INF
    logits[:, 11] = 50.0  # padding: vocabulary of 11 in 12 columns
    targets = torch.tensor([0, 10, 3, NO_TARGET, 5, 7])
    want = reference(logits[:, :11], targets, torch.ones(6), torch.full((6,), 2.0), 0.7)
    results = ranks.run(shard, logits, targets, cuts, 11, backend, tp=len(cuts) - 1)
    good = [0, 1, 3, 4, 5]
    tolerance = {"atol": 1e-12 if backend == "eager" else 1e-5, "rtol": 1e-12 if backend == "eager" else 1e-5}
    for log_prob, h, _, forward, total in results:
        torch.testing.assert_close(log_prob.double()[good], want[0][good], **tolerance)
        torch.testing.assert_close(h.double()[good], want[1][good], **tolerance)
        assert log_prob[2].isnan()
        assert (forward, total) == (2, 2)
    gradient = torch.cat([result[2] for result in results], 1)
    torch.testing.assert_close(gradient.double()[good, :11], want[2][good], **tolerance)
    assert gradient[good, 11].tolist() == [0.0] * 5


def test_the_helper_threads_survive_a_fork() -> None:
    script = """
import os, torch
from refimpl.entropy import log_prob_and_entropy
def entropy():
    return round(log_prob_and_entropy(torch.zeros(64, 32), torch.zeros(64).long(), backend="fused")[1].sum().item(), 3)
torch.set_num_threads(3)
here = entropy()
child = os.fork()
if not child:
    os._exit(entropy() != here)
assert here == 221.807, here  # 64 log 32
assert os.waitpid(child, 0)[1] == 0
"""
    if not _cpu.usable(torch.zeros(1, 1)):
        pytest.skip("no C compiler")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
