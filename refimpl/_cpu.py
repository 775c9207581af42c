"""``kernels.c``, compiled by the machine's C compiler on first use (it takes half a second), on torch's threads."""

import ctypes
import functools
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {  # what stands for TYPE, LOAD and STORE
    torch.float32: ("float", "", ""),
    torch.bfloat16: ("uint16_t", "load_bf16", "store_bf16"),
    torch.float16: ("_Float16", "", "(_Float16)"),
}
FAST = ["-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
OPTIONS = ["-O3", "-fopenmp-simd", *FAST, "-shared", "-fPIC"]
"""Not -ffast-math, which would make the whole process flush subnormals."""
MACHINE: tuple[list[str], ...] = ["-march=native", "-mprefer-vector-width=512"], ["-mcpu=native"], []
"""The first that the compiler knows."""

KEPT_FROM = 1 << 24  # bytes; smaller gradients come from memory that malloc keeps itself
_kept: list[mmap.mmap] = []
_lock = threading.Lock()


@functools.cache
def library(dtype: torch.dtype) -> Any:
    """The kernels for one type of logits; ``None`` where there is no C compiler, or none that knows our options."""
    source = Path(__file__).with_name("kernels.c")
    defined = [f"-D{name}={text}" for name, text in zip(("TYPE", "LOAD", "STORE"), TYPES[dtype], strict=True)]
    with tempfile.TemporaryDirectory(prefix="refimpl-c-") as folder:
        for options in MACHINE:
            out = f"{folder}/kernels.so"
            command = [os.environ.get("CC", "cc"), *OPTIONS, *options, *defined, str(source), "-o", out, "-lm"]
            try:
                subprocess.run(command, check=True, capture_output=True)
                return ctypes.CDLL(out)
            except (OSError, subprocess.CalledProcessError):
                continue
    return None


def usable(x: Tensor) -> bool:
    """Whether these kernels take such logits: on the CPU and of a dtype they know."""
    return x.device.type == "cpu" and x.dtype in TYPES and library(x.dtype) is not None


def empty_like(x: Tensor) -> Tensor:
    """Memory for a gradient; on the CPU that of the last one, if nobody holds it any more (``forget`` gives it back).

    Fresh pages would cost more than all the arithmetic. It is what torch's allocator does on CUDA, for one buffer.
    """
    if x.device.type != "cpu" or x.nbytes < KEPT_FROM:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with _lock:
        free = _kept and sys.getrefcount(_kept[0]) == 2  # the list's reference and the call's: no tensor has one
        if not free or len(_kept[0]) < x.nbytes:
            _kept[:] = [mmap.mmap(-1, x.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]
        return torch.frombuffer(_kept[0], dtype=x.dtype, count=x.numel()).view(x.shape)


def forget() -> None:
    """Give back the memory that is kept for the next gradient."""
    with _lock:
        _kept.clear()


def forward(x: Tensor, target: Tensor, scale: float) -> Tensor:
    """m, s, w and the target's logit of each row, ``[4, T]`` fp32; rows without a target hold zeros."""
    rows, columns = x.shape
    out = torch.zeros(4, rows)
    _share(library(x.dtype).forward, x, x.stride(0), target, out, rows, columns, scale)
    return out


def backward(x: Tensor, target: Tensor, gradient: Tensor, constants: Tensor, scale: float) -> None:
    """Write the gradient, in the dtype of ``x``; ``constants`` ``[5, T]``: m, log s, entropy, incoming gradients."""
    rows, columns = x.shape
    into = (gradient, gradient.stride(0), constants)
    _share(library(x.dtype).backward, x, x.stride(0), target, *into, rows, columns, scale)


def _share(kernel: Callable[..., None], *arguments: Tensor | int | float) -> None:
    """Call a kernel on several threads, which share the rows; ctypes lets go of the interpreter during a call."""
    types: dict[Any, Any] = {float: ctypes.c_float, int: ctypes.c_int64}
    given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else types[type(a)](a) for a in arguments]
    counter, held = ctypes.c_int64(0), list(arguments)

    def work(_held: object = held) -> None:  # the tensors live as long as a thread may still run
        kernel(*given, ctypes.byref(counter))

    others: list[Future[None]] = []
    try:
        others += [_helpers().submit(work) for _ in range(torch.get_num_threads() - 1)]
        work()
    finally:  # who has not begun, on a busy machine, is not waited for
        for other in others:
            if not other.cancel():
                other.result()
    held.clear()  # a thread that has just done its work may hold ``work`` a moment longer


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    """Threads that stay: to start one takes longer than a small kernel."""
    return ThreadPoolExecutor(thread_name_prefix="refimpl")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # a fork takes no threads along
