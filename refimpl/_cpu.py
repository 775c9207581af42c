"""``kernels.c``, compiled by the machine's C compiler on first use (it takes half a second), on torch's threads."""

import ctypes
import functools
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
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


def forward(x: Tensor, target: Tensor, out: Tensor, scale: float) -> None:
    """Write m, s, w and the target's logit of each row that has a target into ``out``, ``[4, T]`` fp32."""
    _share("forward", x, target, out, *x.shape, scale)


def backward(x: Tensor, target: Tensor, gradient: Tensor, constants: Tensor, scale: float) -> None:
    """Write the gradient, in the dtype of ``x``; ``constants`` ``[5, T]``: m, log s, entropy, incoming gradients."""
    _share("backward", x, target, gradient, gradient.stride(0), constants, *x.shape, scale)


def _share(name: str, x: Tensor, *others: Tensor | int | float) -> None:
    """Call a kernel on several threads, which share the rows; ctypes lets go of the interpreter during a call."""
    kernel, types = getattr(library(x.dtype), name), {float: ctypes.c_float, int: ctypes.c_int64}
    held: list[Any] = [x, x.stride(0), *others]  # the tensors live as long as a thread may still run
    given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else types[type(a)](a) for a in held]
    counter = ctypes.c_int64(0)

    def work(_held: object = held) -> None:
        kernel(*given, ctypes.byref(counter))

    helpers = [_helpers().submit(work) for _ in range(torch.get_num_threads() - 1)]
    work()
    for helper in helpers:  # who has not begun, on a busy machine, is not waited for
        if not helper.cancel():
            helper.result()
    held.clear()  # a thread that has just done its work may hold ``work`` a moment longer


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    """Threads that stay: to start one takes longer than a small kernel."""
    return ThreadPoolExecutor(thread_name_prefix="refimpl")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # a fork takes no threads along
