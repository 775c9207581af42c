"""Log-prob and entropy of vocabulary-parallel logits: one read in forward, one read and one write in backward.

For one row x over any set of columns keep the triple m = max x, s = sum e^d and w = sum e^d d, where d is x - m over
the temperature, and an x of -inf adds 0. Triples of two sets of columns merge without loss, so vocabulary tiles, TP
shards and one process are the same algebra (m and s: online softmax, Milakov and Gimelshein, arXiv 1805.02867). The
log-prob is then d - log s, and the entropy log s - w / s, in which a large offset of all logits cancels before
anything is rounded. Backward recomputes p: dx = (g_lp (onehot - p) - g_H p (log p + H)) / temperature, and p log p is
0 at p = 0.
"""

import math
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl import _cpu
from refimpl.slicing import NO_TARGET

NOT_HERE, NO_ROW = -1, -2  # as in the kernels: the target lies in another shard; the row is skipped
FUSED_FROM = 1 << 20  # logits; below, the eager formulas are done sooner than a compiler starts


class Triple(NamedTuple):
    """(m, s, w) of each row over some columns, ``[T]`` each; ``scale`` is 1 / temperature."""

    m: Tensor
    s: Tensor
    w: Tensor
    scale: float = 1.0

    @classmethod
    def of(cls, x: Tensor, scale: float = 1.0) -> "Triple":
        """Of the columns of x, ``[T, columns]``; of no columns it is (-inf, 0, 0)."""
        if x.shape[1] == 0:
            return cls(x.new_full(x.shape[:1], -torch.inf), x.new_zeros(x.shape[:1]), x.new_zeros(x.shape[:1]), scale)
        m = x.amax(1)
        counts = x != -torch.inf
        d = torch.where(counts, (x - m[:, None]) * scale, 0)
        e = torch.where(counts, d.exp(), 0)
        return cls(m, e.sum(1), torch.where(e == 0, 0, e * d).sum(1), scale)

    def moved(self, m: Tensor) -> "Triple":
        """The same columns seen from another maximum ``m``, at least as large."""
        d = torch.where(self.s == 0, 0, (self.m - m) * self.scale)
        return Triple(m, d.exp() * self.s, d.exp() * (self.w + d * self.s), self.scale)

    def merge(self, other: "Triple") -> "Triple":
        """Of the columns of both."""
        m = torch.maximum(self.m, other.m)
        one, two = self.moved(m), other.moved(m)
        return Triple(m, one.s + two.s, one.w + two.w, self.scale)

    def entropy(self) -> Tensor:
        """H = log s - w / s, in nats."""
        return self.s.log() - self.w / self.s


def eager_forward(x: Tensor, target: Tensor, out: Tensor, scale: float) -> None:
    """The formulas to read: m, s, w and the target's logit of each row that has a target into ``out``, ``[4, T]``."""
    for some in _active_rows(x, target):
        z = x[some].to(out.dtype)
        here = target[some].clamp_min(0)[:, None]
        logit = torch.where(target[some] >= 0, z.gather(1, here)[:, 0], 0) if z.shape[1] else z.new_zeros(len(some))
        out[:, some] = torch.stack([*Triple.of(z, scale)[:3], logit])


def eager_backward(x: Tensor, target: Tensor, gradient: Tensor, constants: Tensor, scale: float) -> None:
    """The formulas to read: write dz * scale into ``gradient``, which may be ``x``. ``constants`` as in the kernels."""
    gradient[target == NO_ROW] = 0
    for some in _active_rows(x, target):
        m, log_s, entropy, of_log_prob, of_entropy = constants[:, some, None]
        log_p = (x[some].to(constants.dtype) - m) * scale - log_s
        p = log_p.exp()
        dz = -p * (of_log_prob + of_entropy * (torch.where(p == 0, 0, log_p) + entropy))
        here = (target[some] >= 0).nonzero().flatten()
        dz[here, target[some][here]] += of_log_prob[here, 0]
        gradient[some] = (dz * scale).to(gradient.dtype)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, columns: int, options: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        (kernel, _), scale, group, mode, _ = options
        out = torch.zeros(4, len(logits), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        kernel(logits[:, :columns], target, out, scale)
        m, s, w, logit = out
        triple, found = Triple(m, s, w, scale), (target >= 0).to(m.dtype)
        if group is not None:  # two all-reduces: the maximum, then all the rest
            dist.all_reduce(top := m.clone(), op=dist.ReduceOp.MAX, group=group)
            packed = torch.stack([*triple.moved(top)[1:3], logit, found])
            dist.all_reduce(packed, group=group)
            triple, logit, found = Triple(top, packed[0], packed[1], scale), packed[2], packed[3]
        skipped = target == NO_ROW
        log_s, entropy = triple.s.log(), triple.entropy().masked_fill(skipped, 0)
        log_prob = torch.where(found > 0, (logit - triple.m) * scale - log_s, torch.nan).masked_fill(skipped, 0)
        ctx.save_for_backward(logits, target, triple.m, log_s, entropy)
        ctx.columns, ctx.options = columns, options
        if mode != "grad":
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("no second derivative of log_prob_and_entropy: create_graph=True drops it in silence")
        logits, target, m, log_s, entropy = ctx.saved_tensors
        (_, kernel), scale, *_, overwrite = ctx.options
        gradient, inside = logits.detach() if overwrite else _cpu.empty_like(logits), slice(None, ctx.columns)
        constants = torch.stack([m, log_s, entropy, *incoming])
        kernel(logits[:, inside], target, gradient[:, inside], constants, scale)
        gradient[:, ctx.columns :] = 0
        if overwrite:
            torch.autograd.graph.increment_version(logits)  # whoever else saved the logits must hear of it
        return gradient, None, None, None


def log_prob_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    entropy: Literal["off", "value", "grad"] = "grad",
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
    check: bool = False,
    backend: Literal["auto", "eager", "fused"] = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each row's target, and entropy of each row, over the whole vocabulary.

    Args:
        logits: ``[T_local, V_local]``, the columns ``[vocab_start, vocab_start + V_local)`` of the vocabulary, in fp32,
            bf16, fp16 or fp64, with any strides. Read as they are; never changed unless ``overwrite_logits``.
        targets: ``[T_local]`` int64 on the same device, ids of the whole vocabulary, the same on every TP rank.
            ``NO_TARGET`` rows are skipped: they give 0, and a gradient of 0.
        entropy: ``"off"``: not returned. ``"value"``: returned without gradient. ``"grad"``: with it.
        temperature: the logits are divided by it, inside.
        tp_group: the group that the vocabulary is split over; shards may be uneven. ``None``: this rank has it all.
        vocab_start: the first column's id.
        vocab_size: columns with ids from here on are padding and left out; by default none are.
        overwrite_logits: backward writes the gradient over the logits and so needs no second buffer. A second backward,
            and any other function that saved them or a slice of them, then get autograd's error, not wrong numbers.
        check: raise on a target outside the vocabulary or a row that gives NaN, naming the row. Costs a sync on a GPU.
        backend: ``"fused"`` is Triton on CUDA and compiled C on the CPU; ``"eager"`` the formulas in torch; ``"auto"``
            takes what is there, and eager for small logits on the CPU.

    Returns:
        log-probs and entropies in nats, ``[T_local]`` each, in fp32 (fp64 for fp64 logits); if off, the second is
        ``None``. A row of -inf alone, or with NaN or +inf, gives NaN, and so does the log-prob of a target outside the
        vocabulary. Both are equal on all TP ranks. Convention: *replicated loss*. Every TP rank computes the same loss,
        and then the gradient of its shard needs no collective.

    Raises:
        ValueError: shapes, dtypes or options that do not go together, or what ``check`` finds.
    """
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"logits of shape {list(logits.shape)} and {logits.dtype}; they must be [T, V] and floating")
    if targets.shape != logits.shape[:1] or targets.dtype != torch.int64 or targets.device != logits.device:
        got = f"targets of shape {list(targets.shape)}, {targets.dtype}, on {targets.device}"
        raise ValueError(f"{got}; they must be [T] int64 beside logits of {len(logits)} rows on {logits.device}")
    bad_range = not all(isinstance(n, int) and n >= 0 for n in (vocab_start, 0 if vocab_size is None else vocab_size))
    if entropy not in ("off", "value", "grad") or not 0 < float(temperature) < math.inf or bad_range:
        given = f"entropy {entropy!r}, temperature {temperature}, vocab_start {vocab_start}, vocab_size {vocab_size}"
        raise ValueError(f"{given}: one of off, value and grad; positive and finite; integers, not negative")
    owner = logits if logits._base is None else logits._base
    if overwrite_logits and ((owner.is_leaf and owner.requires_grad) or not logits.is_contiguous()):
        raise ValueError("overwrite_logits: they are a leaf or a view of one, which others hold, or not contiguous")
    last = logits.shape[1] if vocab_size is None else min(logits.shape[1], max(0, vocab_size - vocab_start))
    here = (targets >= vocab_start) & (targets < vocab_start + last)
    local = torch.where(here, targets - vocab_start, NOT_HERE).masked_fill(targets == NO_TARGET, NO_ROW)
    options = _kernels(logits, backend), 1.0 / float(temperature), tp_group, entropy, overwrite_logits
    log_prob, entropies = _Function.apply(logits, local, last, options)  # type: ignore[no-untyped-call]
    if check and bool((wrong := log_prob.isnan() | entropies.isnan()).any()):
        row = int(wrong.nonzero()[0])
        what = "its logits hold NaN or +inf, or nothing but -inf" if entropies[row].isnan() else "not in the vocabulary"
        raise ValueError(f"row {row}: target {int(targets[row])}: {what}")
    return log_prob, None if entropy == "off" else entropies


def _kernels(logits: Tensor, backend: str) -> tuple[Any, Any]:
    """Forward and backward of the backend that fits."""
    if backend not in ("auto", "eager", "fused"):
        raise ValueError(f"backend {backend!r} is not one of auto, eager and fused")
    neighbours = logits.stride(1) == 1 or logits.shape[1] < 2
    if backend != "eager" and logits.device.type == "cuda" and neighbours and find_spec("triton"):
        from refimpl import kernels  # needs Triton

        return kernels.forward, kernels.backward
    large = backend == "fused" or (backend == "auto" and logits.numel() >= FUSED_FROM)
    if large and neighbours and _cpu.usable(logits):
        return _cpu.forward, _cpu.backward
    if backend == "fused":
        raise ValueError(f"no fused kernels for {logits.dtype} logits of strides {logits.stride()} on {logits.device}")
    return eager_forward, eager_backward


def _active_rows(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """The rows with a target, so many at a time that copies of them stay small."""
    rows = (target != NO_ROW).nonzero().flatten()
    return torch.split(rows, max(1, FUSED_FROM // max(1, x.shape[1])))
