"""Start real ranks, run a function on each, bring back what it returned or how it failed.

    def body(me, x):                       # defined anywhere, a notebook cell included
        return me.cp_rank * x

    ranks.run(body, 10, cp=4)              # [0, 10, 20, 30]

Ranks return values and the parent prints. A rank that is done stays alive until all are, as in training: a collective
that one rank skipped leaves the others waiting, and the report says where.
"""

import contextlib
import math
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.multiprocessing

from refimpl import _rank, _server
from refimpl._rank import Outcome as Outcome
from refimpl._rank import Rank as Rank

GRACE = 0.5  # seconds that the other ranks get, once one has failed, to report their own end
START_METHOD = "forkserver"  # "spawn" works too, but every rank then imports torch and megatron-core anew


class RankError(RuntimeError):
    """At least one rank did not return. ``outcomes`` has one entry per rank, ``first`` is the failure to look at."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        self.first = min((o for o in outcomes if o.status != "returned"), key=lambda o: (o.when, o.rank))
        lines = [f"rank {o.rank} {o.summary}" for o in outcomes]
        details = ["", f"rank {self.first.rank}, details:", self.first.details]
        super().__init__("\n".join([lines[self.first.rank], "", *lines, *details]))


@dataclass
class _Child:
    """The parent's side of one rank."""

    rank: int
    process: BaseProcess
    pipe: Connection
    outcome: Outcome | None = None

    @property
    def returned(self) -> bool:
        return self.outcome is not None and self.outcome.status == "returned"

    def hear(self) -> None:
        """Take the report, or notice that none will come."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self.pipe.poll():
                self.outcome = self.pipe.recv()
                return
        self.process.join(GRACE)
        code = self.process.exitcode
        reason = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        self.outcome = Outcome(self.rank, "died", reason, when=-math.inf)

    def tell(self, folder: Path) -> Outcome:
        """The outcome, complete with what lies in ``folder``."""
        value, output, errors, stack = (folder / f"rank-{self.rank}.{end}" for end in ("value", "out", "err", "stack"))
        outcome = self.outcome or Outcome(self.rank, "unfinished", *self.where(stack))
        if outcome.status == "died":
            outcome = replace(outcome, details="\n".join(_read(errors).splitlines()[-20:]))
        if outcome.status == "returned":
            outcome = replace(outcome, value=torch.load(value, "cpu", weights_only=False))
        return replace(outcome, output=_read(output))

    def where(self, file: Path) -> tuple[str, str]:
        """Where an unfinished rank is, and its stack. The rank answers itself, even from within a collective."""
        before = _read(file)
        if before and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)
            asked = time.monotonic()
            while time.monotonic() < asked + GRACE:
                time.sleep(0.02)
                stack = _read(file)[len(before) :]
                frames = [f for f in re.findall(r'File "(.*)", line \d+ in (\w+)\n', stack) if f[1] != "wrapper"]
                if frames:
                    ours = [name for source, name in frames[1:] if f"{os.sep}torch{os.sep}" not in source]
                    return f"in {frames[0][1]}" + f", called by {ours[0]}" * (ours[0] != "main"), stack
        return "gave no sign of where it is", ""

    def end(self) -> None:
        """Kill the rank and whatever it started: it leads a process group of its own."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()
        self.process.close()
        self.pipe.close()


def run(fn: Callable[..., Any], *args: Any, tp: int = 1, cp: int = 1, timeout: float = 60.0) -> list[Any]:
    """What ``fn(me, *args)`` returns on each of ``tp * cp`` ranks, in rank order.

    Args:
        fn: called on every rank with its ``Rank`` and ``args``, which travel with cloudpickle. Tensors that it returns
            come back on the CPU as leaves; what it prints is printed here, in rank order.
        *args: passed on to ``fn``.
        tp: tensor-parallel size.
        cp: context-parallel size; both groups are megatron-core's ``parallel_state``.
        timeout: seconds for the whole run once the processes are started.

    Raises:
        RankError: a rank raised, died, or had not finished by the deadline. It comes ``GRACE`` seconds after the first
            failure, or at the deadline. Either way no process is left.
        ValueError: a size or the timeout is not positive.
    """
    outcomes = observe(fn, *args, tp=tp, cp=cp, timeout=timeout)
    if any(outcome.status != "returned" for outcome in outcomes):
        raise RankError(outcomes)
    return [outcome.value for outcome in outcomes]


def observe(fn: Callable[..., Any], *args: Any, tp: int = 1, cp: int = 1, timeout: float = 60.0) -> list[Outcome]:
    """Like ``run``, but a rank's failure is what you get, not an exception: one ``Outcome`` per rank."""
    for name, value in (("tp", tp), ("cp", cp), ("timeout", timeout)):
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be positive")
    context: Any = torch.multiprocessing.get_context(START_METHOD)
    if START_METHOD == "forkserver":
        _server.start()
    children: list[_Child] = []
    with tempfile.TemporaryDirectory(prefix="refimpl-ranks-") as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((fn, args)))
        try:
            for rank in range(tp * cp):
                ours, theirs = context.Pipe()
                process = context.Process(target=_rank.main, args=(theirs, folder, rank, tp, cp), daemon=True)
                children.append(_Child(rank, process, ours))
                process.start()
                theirs.close()
            _listen(children, time.monotonic() + timeout)
            if all(child.returned for child in children):
                for child in children:
                    child.pipe.send_bytes(b"all done")
                for child in children:
                    child.process.join(2.0)
            outcomes = [child.tell(Path(folder)) for child in children]
        finally:
            for child in children:
                child.end()
    for outcome in outcomes:
        for line in outcome.output.splitlines():
            print(f"[rank {outcome.rank}] {line}")
    return outcomes


def _listen(children: list[_Child], deadline: float) -> None:
    """Wait for every rank's report, until the deadline or shortly after the first failure."""
    pending = list(children)
    while pending and (left := deadline - time.monotonic()) > 0:
        ready = wait([source for child in pending for source in (child.pipe, child.process.sentinel)], left)
        for child in [c for c in pending if c.pipe in ready or c.process.sentinel in ready]:
            child.hear()
            pending.remove(child)
            if not child.returned:
                deadline = min(deadline, time.monotonic() + GRACE)


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
