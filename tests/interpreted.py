"""The Triton kernels against fp64 in Triton's interpreter; run by test_kernels.py with TRITON_INTERPRET=1."""

import math

import pytest
import torch
from test_entropy import reference

from refimpl import entropy, kernels
from refimpl.entropy import log_prob_and_entropy
from refimpl.slicing import NO_TARGET

INF = math.inf


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "_kernels", lambda *_: (kernels.forward, kernels.backward))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("columns", [1, 100, 4099])
def test_interpreted_kernels(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    wide = (torch.randn(5, columns + 7) * 3).to(dtype)
    logits = wide[:, 3 : columns + 3]  # a row stride that is no multiple of anything
    if columns > 1:
        logits[1, ::2] = -INF
    logits[2] += 100
    targets = torch.tensor([0, min(1, columns - 1), columns - 1, NO_TARGET, columns // 2])
    g1, g2 = torch.randn(2, 5)
    want = reference(logits, targets, g1, g2, 0.7)
    leaf = logits.detach().requires_grad_()
    log_prob, h = log_prob_and_entropy(leaf, targets, temperature=0.7)
    assert h is not None
    torch.autograd.backward([log_prob, h], [g1.to(h.dtype), g2.to(h.dtype)])
    assert leaf.grad is not None
    fine = 1e-11 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(log_prob.double(), want[0], atol=fine, rtol=fine)
    torch.testing.assert_close(h.double(), want[1], atol=fine, rtol=fine)
    ulp = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, fine)  # the interpreter cuts bf16 off
    torch.testing.assert_close(leaf.grad.double(), want[2], atol=max(fine, 1e-7), rtol=ulp)


def test_interpreted_edges() -> None:
    logits = torch.tensor([[1.0, 2, 3], [-INF] * 3, [1, math.nan, 3], [1, INF, 3], [0, 0, -INF]]).requires_grad_()
    log_prob, h = log_prob_and_entropy(logits, torch.tensor([2, 0, 0, 0, 0]))
    assert h is not None
    assert h.isnan().tolist() == log_prob.isnan().tolist() == [False, True, True, True, False]
    assert h[0].item() == pytest.approx(0.8324, abs=1e-4)
    assert h[4].item() == pytest.approx(0.6931, abs=1e-4)
    (log_prob[[0, 4]].sum() + h[[0, 4]].sum()).backward()
    assert logits.grad is not None
    assert logits.grad[[0, 4]].isfinite().all()
    late = torch.full((1, 9000), -INF)
    late[0, 8999] = 1.0
    assert log_prob_and_entropy(late, torch.tensor([8999]))[1].tolist() == [0.0]  # type: ignore[union-attr]
    hidden = torch.tensor([[1.0, 2, 3]]).requires_grad_() * 1
    log_prob, _ = log_prob_and_entropy(hidden, torch.tensor([0]), overwrite_logits=True)
    log_prob.sum().backward()
    torch.testing.assert_close(hidden.detach(), torch.tensor([[0.9100, -0.2447, -0.6652]]), atol=1e-4, rtol=0)
