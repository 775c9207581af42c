"""The grader pointed at other people's code: your checkout, its signature, ten lines in between.

``load`` takes single functions out of a source file and runs them with the few names that you give, so that nothing of
the framework need be installed. Each function below turns what it loaded into a candidate for ``refimpl.check``.
"""

import __future__

import ast
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor

from refimpl import slicing
from refimpl.history import Step
from refimpl.layout import Layout

Candidate = Callable[..., Any]


def load(source: str, *names: str, **given: Any) -> SimpleNamespace:
    """The named functions and classes of a file's text, executed without its imports; ``given`` stands in for those."""
    tree = ast.parse(source)
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name in names]
    missing = set(names) - {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if missing:
        raise ValueError(f"no function or class {', '.join(sorted(missing))} in this source")
    space = {"torch": torch, "dist": dist, "F": torch.nn.functional} | given
    code = compile(
        tree, "loaded", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True
    )  # types are not looked up
    exec(code, space)
    return SimpleNamespace(**{name: space[name] for name in names})


def slime_extraction(checkout: Path) -> Candidate:
    """slime's ``_extract_per_sample`` of any commit since #1788: before and after #1846, with or without bshd.

    It takes lengths in place of a layout, and asks megatron-core for the rank; here a stand-in answers.
    """
    extract, mpu = _slime(checkout, "_extract_per_sample")
    takes = inspect.signature(extract).parameters

    def candidate(log_prob: Tensor, entropy: Tensor | None, layout: Layout, cp_rank: int) -> Any:
        mpu.get_context_parallel_rank = lambda: cp_rank
        mpu.get_context_parallel_world_size = lambda: layout.cp_size
        window = layout.cp_split == "contiguous" and layout.cp_size > 1
        if layout.qkv_format == "bshd" and (window or "qkv_format" not in takes):
            return slicing.extract(log_prob, entropy, layout, cp_rank)  # no such layout there: not its to answer
        totals, width = list(layout.batch.total_lengths), layout.rows * layout.cp_size // max(1, len(layout.batch))
        every: dict[str, Any] = {"unconcat_tokens": totals, "qkv_format": layout.qkv_format, "allgather_cp": window}
        every |= {"total_lengths": totals, "response_lengths": list(layout.batch.response_lengths)}
        every["max_seq_lens"] = [width] * len(totals) if layout.qkv_format == "bshd" else None
        return extract(log_prob, entropy, **{name: value for name, value in every.items() if name in takes})

    candidate.__name__ = "slime _extract_per_sample"
    return candidate


def slime_step(checkout: Path, if_weighted: bool) -> Step:
    """The same with slime's own redistribution, for real ranks; ``if_weighted`` as in ``Step``, of that commit."""
    move, mpu = _slime(checkout, "_allgather_cp_redistribute")
    takes = inspect.signature(move).parameters

    def redistribute(keys: Any, layout: Layout, cp_rank: int, group: dist.ProcessGroup) -> list[Any]:
        mpu.get_context_parallel_rank, mpu.get_context_parallel_group = lambda: cp_rank, lambda: group
        mpu.get_context_parallel_world_size = lambda: layout.cp_size
        every: dict[str, Any] = {"logits_local_len": layout.rows, "args": SimpleNamespace(qkv_format="thd")}
        every |= {"total_lengths": list(layout.batch.total_lengths)}
        every |= {"response_lengths": list(layout.batch.response_lengths)}
        named = dict(zip(("log_probs", "entropy"), keys, strict=False))
        move(named, **{name: value for name, value in every.items() if name in takes})  # changes the dictionary
        return list(named.values())

    return Step(slime_extraction(checkout), redistribute, if_weighted)


def _slime(checkout: Path, name: str) -> tuple[Candidate, SimpleNamespace]:
    folder, mpu = checkout / "slime/backends/megatron_utils", SimpleNamespace()
    needs = "get_logits_and_tokens_offset_with_cp", "slice_log_prob_with_cp"
    offsets = load((folder / "cp_utils.py").read_text(), *needs, mpu=mpu)
    return getattr(load((folder / "loss.py").read_text(), name, mpu=mpu, **vars(offsets)), name), mpu


def verl_rows(checkout: Path) -> Candidate:
    """verl's ``logprobs_from_logits_v2`` and ``entropy_from_logits``, as log-prob and entropy of rows."""
    source = (checkout / "verl/utils/torch_functional.py").read_text()
    verl = load(source, "logprobs_from_logits_v2", "entropy_from_logits")
    return lambda logits, targets: (verl.logprobs_from_logits_v2(logits, targets), verl.entropy_from_logits(logits))


def torchtitan_rows(checkout: Path) -> Candidate:
    """torchtitan's ``compute_logprobs``; its entropy is a metric, without gradient by design."""
    given = {"DTensor": (), "get_spmd_backend": lambda: "", "IGNORE_INDEX": slicing.NO_TARGET}
    titan = load((checkout / "torchtitan/components/loss.py").read_text(), "compute_logprobs", **given)
    return lambda logits, targets: titan.compute_logprobs(logits, targets, return_entropy=True)


def nemo_tokens(checkout: Path) -> Candidate:
    """NeMo-RL's ``_get_tokens_on_this_cp_rank``: one padded sample in, a rank's two chunks out."""
    source = (checkout / "nemo_rl/distributed/model_utils.py").read_text()
    take = load(source, "_get_tokens_on_this_cp_rank")._get_tokens_on_this_cp_rank

    def candidate(tokens: list[Tensor], layout: Layout, cp_rank: int) -> Tensor:
        if layout.cp_split == "contiguous" and layout.cp_size > 1:
            return slicing.local_tokens(tokens, layout, cp_rank)  # zigzag is all it knows
        ends = list(itertools.pairwise(layout.cu_seqlens))
        padded = [torch.nn.functional.pad(t, (0, b - a - len(t)))[None] for t, (a, b) in zip(tokens, ends, strict=True)]
        return torch.cat([take(sample, cp_rank, layout.cp_size)[0] for sample in padded])

    return candidate
