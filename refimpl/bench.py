"""Side-by-side measurements, ``python -m refimpl.bench ranks``, ``entropy``, ``redistribute``. No test needs a time."""

import argparse
import gc
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl import _cpu, history, ranks, slicing
from refimpl.cases import exact
from refimpl.entropy import log_prob_and_entropy
from refimpl.layout import Batch, Layout


def start_seconds(start_method: str) -> float:
    """Seconds until megatron-core's groups have stood on 4 ranks and all processes are gone again."""
    start = time.perf_counter()
    with mock.patch.object(ranks, "START_METHOD", start_method):
        ranks.run(lambda me: me.rank, tp=2, cp=2, timeout=300)
    return time.perf_counter() - start


def bench_ranks(runs: int) -> None:
    """The fork server against ``spawn``, in turn; its first start happens once and is measured once."""
    seconds = {"forkserver, first start": [start_seconds("forkserver")], "forkserver, later": [], "spawn": []}
    for name in ("forkserver, later", "spawn") * runs:
        seconds[name].append(start_seconds(name.partition(",")[0]))
    print(f"start and end of 4 ranks with megatron-core's groups (tp 2, cp 2), median of {runs} in turn")
    for name, measured in seconds.items():
        ratio = statistics.median(seconds["spawn"]) / statistics.median(measured)
        print(f"{name:28}{statistics.median(measured):7.2f} s{ratio:7.1f} times as fast as spawn")


def exchange(me: ranks.Rank, layout: Layout, runs: int) -> dict[str, list[float]]:
    """Seconds of forward and backward of two keys under each way to redistribute, in turn."""
    ways = {"one all-reduce for each key": history.redistribute_2123, "ours: one all-to-all": history.redistribute_now}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in list(ways.items()) * runs:
        buffers = torch.randn(2, layout.rows, requires_grad=True).unbind()
        keys = [slicing.response_pieces(buffer, layout, me.cp_rank) for buffer in buffers]
        start = time.perf_counter()
        moved: Any = way(keys, layout, me.cp_rank, me.cp_group)
        torch.cat([torch.cat(pieces) for pieces in moved]).sum().backward()  # type: ignore[no-untyped-call]
        seconds[name].append(time.perf_counter() - start)
    return seconds


def bench_redistribute(runs: int, samples: int, cp: int) -> None:
    """Collectives, and bytes that all ranks together hand to them, from the record; whole time from the clock."""
    random.seed(0)
    lengths = [(random.randint(50, 500), random.randint(100, 2000)) for _ in range(samples)]
    batch = Batch([p + r for p, r in lengths], [r for _, r in lengths])
    outcomes = ranks.observe(exchange, Layout(batch, cp_split="contiguous", cp_size=cp), runs, cp=cp, timeout=3600)
    if outcomes[0].status != "returned":
        raise ranks.RankError(outcomes)
    tokens, calls = sum(batch.response_lengths), [call for outcome in outcomes for call in outcome.calls]
    print(
        f"log-prob and entropy in fp32 from allgather to zigzag, cp {cp}, {samples} samples, {tokens} response tokens"
    )
    print(f"{'':30}{'collectives':>12}{'in backward':>12}{'bytes per token':>17}{'ms, median of ' + str(runs):>20}")
    for name, measured in outcomes[0].value.items():
        own = [call for call in calls if call.operation == ("all_reduce" if "reduce" in name else "all_to_all")]
        forward = [call for call in own if call.phase == "forward"]
        moved = sum(math.prod(call.shape) * 4 for call in forward) / tokens / runs
        each = [len(forward) // cp // runs, (len(own) - len(forward)) // cp // runs]
        print(f"{name:30}{each[0]:12}{each[1]:12}{moved:17.0f}{statistics.median(measured) * 1e3:20.2f}")


def plain(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """``log_softmax``, gather, and minus the sum of p log p, left to autograd."""
    log_p = torch.log_softmax(x.float(), 1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def megatron(x: Tensor, targets: Tensor, fused: bool) -> tuple[Tensor]:
    """megatron-core's own cross entropy: the log-prob alone. It needs a TP group, here of one rank."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    given = x[:, None], targets[:, None]
    group = parallel_state.get_tensor_model_parallel_group()
    loss = fused_vocab_parallel_cross_entropy(*given, group) if fused else vocab_parallel_cross_entropy(*given)
    return (-loss[:, 0],)


def peak_memory(device: torch.device, reset: bool = False) -> int:
    """Bytes: the most that was held since the last reset (Linux counts it for the process, CUDA for its allocator)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def bench_entropy(runs: int, rows: int, columns: int, device: torch.device) -> None:
    """Forward and backward with entropy gradient, all in turn in one run; accuracy on the first rows against fp64.

    ``faster`` compares medians; ``at best`` the fastest run of each, for plain autograd, which faults five buffers of
    fresh memory in, takes up to twice as long in some runs as in others.
    """
    torch.manual_seed(0)
    some = slice(0, 32)
    targets, g = torch.randint(0, columns, (rows,), device=device), torch.randn(2, rows, device=device)
    prompts = torch.arange(rows, device=device) // 64 % 2 == 0  # samples of 64 prompt and 64 response rows
    half = targets.masked_fill(prompts, slicing.NO_TARGET)
    ways: dict[str, tuple[Callable[..., Any], Tensor]] = {
        "plain autograd": (plain, targets),
        "ours": (log_prob_and_entropy, targets),
        "ours, half the rows": (log_prob_and_entropy, half),
        "ours, over the logits": (partial(log_prob_and_entropy, overwrite_logits=True), targets),
        "megatron-core, log-prob only": (partial(megatron, fused=False), targets),
        "same, fused": (partial(megatron, fused=True), targets),
    }
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    for dtype in (torch.float32, torch.bfloat16):
        leaf = (torch.randn(rows, columns, device=device) * 3).to(dtype).requires_grad_()
        want = exact(leaf[some], targets[some], (g[0, some].double(), g[1, some].double()))
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        extra, error = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, "")
        for turn in range(runs + 1):  # the first one warms up
            for name, (way, goals) in ways.items():
                x = leaf * 1  # as a model hands them over: not a leaf, and nobody else's
                time.sleep(0.1)  # torch's threads spin after a copy
                if not turn:
                    _cpu.forget()  # memory is counted in the first turn, time in the others
                before = peak_memory(device, reset=True)
                start = time.perf_counter()
                got = way(x, goals)
                (gradient,) = torch.autograd.grad(got, x, [*g[: len(got)]])
                peak = peak_memory(device)
                if turn:
                    seconds[name].append(time.perf_counter() - start)
                else:
                    extra[name] = (peak - before) / (rows * columns * 4)
                    pairs = zip((*got, gradient)[: 3 if len(got) == 2 else 1], want, strict=False)
                    found = [(a[some] - b.to(a.dtype)).abs().max().item() for a, b in pairs]
                    error[name] = "" if goals is half else " ".join(f"{e:9.1e}" for e in found)
                del got, gradient, x
        print(f"\n{where}, logits [{rows}, {columns}] in {dtype}, median of {runs} in turn, forward and backward")
        print(f"{'':30}{'ms':>8}{'faster':>8}{'at best':>9}{'buffers':>9}  error: log-prob, entropy, gradient")
        for name, measured in seconds.items():
            middle = statistics.median(measured)
            ratio, best = (f(seconds["plain autograd"]) / f(measured) for f in (statistics.median, min))
            print(f"{name:30}{middle * 1e3:8.1f}{ratio:8.1f}{best:9.1f}{extra[name]:9.2f}  {error[name]}")
        if device.type == "cuda":
            start, other = time.perf_counter(), torch.empty_like(leaf)
            for _ in range(10):
                other.copy_(leaf.detach())
            torch.cuda.synchronize()
            rate = 20 * leaf.nbytes / (time.perf_counter() - start)
            moved = 3 * leaf.nbytes / statistics.median(seconds["ours"])
            print(f"ours moves {moved / 1e9:.0f} GB/s (2 reads, 1 write), a copy {rate / 1e9:.0f}: {moved / rate:.0%}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m refimpl.bench", description=__doc__)
    parser.add_argument("what", choices=["ranks", "entropy", "redistribute"])
    parser.add_argument("--runs", type=int, default=0, help="how often, in turn (ranks 3, others 7)")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=151_936)
    options = parser.parse_args()
    if options.what == "ranks":
        return bench_ranks(options.runs or 3)
    if options.what == "redistribute":
        return bench_redistribute(options.runs or 7, options.samples, options.cp)
    with tempfile.TemporaryDirectory() as folder:
        from megatron.core import parallel_state

        backend = "nccl" if options.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        bench_entropy(options.runs or 7, options.rows, options.columns, options.device)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
