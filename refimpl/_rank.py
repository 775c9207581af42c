"""The life of one rank, inside its own process. ``refimpl.ranks`` is the parent's side."""

import faulthandler
import math
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from refimpl.recorder import Call, Recorder

STARTUP = 120.0  # seconds that all ranks together have to start and meet, before the clock of a run begins


@dataclass(frozen=True)
class Rank:
    """What a function that runs on a rank is given: who it is, its device, and megatron-core's groups."""

    rank: int
    device: torch.device
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup
    cp_rank: int
    cp_size: int
    cp_group: dist.ProcessGroup


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: ``returned``, ``raised``, ``died`` (exited or was killed without a word) or ``unfinished``.

    ``reason`` is one line. ``details`` helps to find the place: a traceback, the stack of a rank that waits, the last
    words on stderr of one that died. ``calls`` are the collectives that it issued. ``output`` is what it printed.
    ``when`` orders failures: seconds on the monotonic clock for an error, before all others for a death (it causes
    errors elsewhere), last if unfinished, unless it was seen to wait in vain.
    """

    rank: int
    status: Literal["returned", "raised", "died", "unfinished"]
    reason: str = ""
    details: str = ""
    when: float = math.inf
    value: Any = None
    output: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def summary(self) -> str:
        """Status and reason in one line."""
        return f"{self.status}: {self.reason}" if self.reason else self.status


def main(pipe: Connection, folder: str, rank: int, tp: int, cp: int, timeout: float, check: bool) -> None:
    """Run the call that lies in ``folder``, leave its value there, report, and wait until all ranks have."""
    os.setsid()  # a process group of its own: what this rank starts ends with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    for stream, end in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(f"{folder}/rank-{rank}.{end}", os.O_WRONLY | os.O_CREAT), 1 if end == "out" else 2)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stack = open(f"{folder}/rank-{rank}.stack", "w")  # noqa: SIM115  (open for the life of the process)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    faulthandler.dump_traceback_later(STARTUP + 5, exit=True, file=stack)  # if the parent cannot end us
    print("from here on the parent may ask where this rank is", file=stack, flush=True)
    released = threading.Event()
    threading.Thread(target=_heed, args=(pipe, folder, released), daemon=True).start()
    try:
        fn, args, environment = pickle.loads(Path(folder, "call").read_bytes())
        os.environ.update(environment)  # the fork server's is that of its own start
        me = _join(folder, rank, tp, cp)
        roles: dict[str, str] = {me.tp_group.group_name: "tp", me.cp_group.group_name: "cp"}
        store = FileStore(f"{folder}/check", tp * cp) if check else None
        pipe.send("ready")
        faulthandler.dump_traceback_later(min(timeout, 1e6) + 5, exit=True, file=stack)
        with Recorder(rank, open(f"{folder}/rank-{rank}.calls", "w"), roles, store):
            value = fn(me, *args)
        path = f"{folder}/rank-{rank}.value"  # a stream, not a zip file, whose errors do not say that a disk is full
        torch.save(value, path, pickle_module=cloudpickle, _use_new_zipfile_serialization=False)
        outcome = Outcome(rank, "returned")
    except BaseException as error:  # SystemExit too: whatever ends the function is reported
        when, first_line = time.monotonic(), str(error).strip().partition("\n")[0][:2000]
        reason = f"{type(error).__name__}: {first_line}".removesuffix(": ")
        details = traceback.format_exc()[-20_000:]  # a pipe takes 64 KiB before anyone reads
        outcome = Outcome(rank, "raised", reason, details, when)
    pipe.send(outcome)
    released.wait()
    if dist.is_initialized():
        dist.destroy_process_group()


def _heed(pipe: Connection, folder: str, released: threading.Event) -> None:
    """Wait for the parent's word. If the parent goes away without it, so does this rank, wherever it is."""
    try:
        pipe.recv_bytes()
        released.set()
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _join(folder: str, rank: int, tp: int, cp: int) -> Rank:
    """Meet the other ranks and make megatron-core's groups; NCCL only where each rank has a GPU of its own."""
    from refimpl._megatron import parallel_state as mpu  # not at the top: the parent never needs megatron-core

    world, gpus = tp * cp, torch.cuda.device_count()
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", next(n for _, n in socket.if_nameindex() if n.startswith("lo")))
    backend, store = "nccl" if gpus >= world else "gloo", FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    mpu.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    tp_rank, tp_group = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_group()
    cp_rank, cp_group = mpu.get_context_parallel_rank(), mpu.get_context_parallel_group()
    return Rank(rank, device, tp_rank, tp, tp_group, cp_rank, cp, cp_group)
