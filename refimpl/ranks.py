"""Start real ranks, run a function on each, bring back what it returned or how it failed.

    def body(me, x):                       # defined anywhere, a notebook cell included
        return me.cp_rank * x

    ranks.run(body, 10, cp=4)              # [0, 10, 20, 30]

Ranks return values and the parent prints. A rank that is done stays alive until all are, as in training: a collective
that one rank skipped leaves the others waiting, and the report says where. Linux or macOS; scripts need the usual
``if __name__ == "__main__":``, without which Python stops every rank at the script's first line.
"""

import contextlib
import itertools
import math
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle
import torch.multiprocessing

from refimpl import _rank, _server, recorder
from refimpl._rank import Outcome as Outcome
from refimpl._rank import Rank as Rank

Function = Callable[..., Any]  # called with a Rank, and what else is passed on
HIDDEN = ("recorder.py", "collectives.py")  # whose frames tell nobody where a rank is
POLL = 0.1  # seconds without news, after which the parent looks whether some wait in vain
GRACE = 0.5  # seconds that the other ranks get, once one has failed, to report their own end
START_METHOD = "forkserver"  # "spawn" works too, but every rank then imports torch and megatron-core anew


class RankError(RuntimeError):
    """At least one rank did not return. ``outcomes`` has one entry per rank, ``first`` is the failure to look at.

    The message says how each ended, which collectives they issued up to the first difference, and where they are.
    """

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        self.first = min((o for o in outcomes if o.status != "returned"), key=lambda o: (o.when, o.rank))
        lines = [f"rank {o.rank} {o.summary}" for o in outcomes]
        details = ["", f"rank {self.first.rank}, details:", self.first.details]
        issued = ["", "collectives:", recorder.table(records(outcomes))] if any(o.calls for o in outcomes) else []
        super().__init__("\n".join([lines[self.first.rank], "", *lines, *issued, *details]))


def records(outcomes: Sequence[Outcome]) -> list[recorder.Record]:
    """Which collectives each rank issued, and how it ended, for ``recorder.table`` and ``diagrams.timeline``."""
    return [recorder.Record(outcome.calls, outcome.summary) for outcome in outcomes]


@dataclass
class _Child:
    """The parent's side of one rank."""

    rank: int
    process: BaseProcess
    pipe: Connection
    outcome: Outcome | None = None
    ready: bool = False  # it has met the others
    stuck: float = math.inf  # since when it is known to wait in vain

    @property
    def status(self) -> str:
        return self.outcome.status if self.outcome else "unfinished"

    def hear(self) -> None:
        """Take the word that it is ready, or its report, or notice that none will come."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self.pipe.poll():
                if (said := self.pipe.recv()) == "ready":
                    self.ready = True
                else:
                    self.outcome = said
                return
        self.process.join(GRACE)
        code = self.process.exitcode or 0
        name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
        reason = f"killed by {name}" if code < 0 else f"exited with code {code}"
        self.outcome = Outcome(self.rank, "died", reason, when=-math.inf)

    def tell(self, folder: Path) -> Outcome:
        """The outcome, complete with what lies in ``folder``."""
        if self.outcome is None and self.pipe.poll():
            self.hear()  # it came while others were looked at
        value, output, errors, stack = (folder / f"rank-{self.rank}.{end}" for end in ("value", "out", "err", "stack"))
        outcome = self.outcome or Outcome(self.rank, "unfinished", *self.where(stack), self.stuck)
        if outcome.status == "died":
            outcome = replace(outcome, details="\n".join(errors.read_text(errors="replace").splitlines()[-20:]))
        if outcome.status == "returned":
            try:
                outcome = replace(outcome, value=torch.load(value, "cpu", weights_only=False))
            except Exception as error:
                outcome = replace(outcome, status="raised", reason=f"its value cannot be read here: {error!r}")
        calls = recorder.read(folder / f"rank-{self.rank}.calls")
        return replace(outcome, output=output.read_text(errors="replace"), calls=calls)

    def where(self, file: Path) -> tuple[str, str]:
        """Where an unfinished rank is, and its stack. The rank answers itself, even from within a collective."""
        asked, before = time.monotonic(), file.read_text()
        early = "" if self.ready else "had not met the others, "
        with contextlib.suppress(ProcessLookupError):
            if before and self.process.pid is not None:
                os.kill(self.process.pid, signal.SIGUSR1)
            while time.monotonic() < asked + GRACE:
                stack = file.read_text()[len(before) :]
                if stack.endswith(("in <module>\n", "...\n")):
                    frames = re.findall(r'File "(.*)", line \d+ in (\w+)\n', stack)
                    frames = list(itertools.takewhile(lambda f: Path(f[0]).name != "_rank.py", frames))
                    frames = [f for f in frames if f[1] != "wrapper" and Path(f[0]).name not in HIDDEN]
                    (_, here), *callers = frames or [("", "start")]
                    ours = [name for source, name in callers if f"{os.sep}torch{os.sep}" not in source]
                    backward = ", in backward" if "_engine_run_backward" in [name for _, name in callers] else ""
                    return f"{early}in {here}" + (f", called by {ours[0]}" if ours else "") + backward, stack
                time.sleep(0.01)
        return f"{early}gave no sign of where it is", ""

    def kill(self) -> None:
        """Kill the rank and what it started, which is in a process group of its own unless it took care not to be."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        self.pipe.close()


def run(fn: Function, *args: Any, tp: int = 1, cp: int = 1, timeout: float = 60.0, check: bool = False) -> list[Any]:
    """What ``fn(me, *args)`` returns on each of ``tp * cp`` ranks, in rank order.

    Args:
        fn: called on every rank with its ``Rank`` and ``args``, which travel with cloudpickle. Tensors that it returns
            come back on the CPU as leaves; what it prints is printed here, in rank order.
        *args: passed on to ``fn``.
        tp: tensor-parallel size.
        cp: context-parallel size; both groups are megatron-core's ``parallel_state``.
        timeout: seconds for ``fn``, counted from when all ranks have met; for that they have two minutes.
        check: before each collective the ranks of its group agree that all of them issue it. Where they differ each
            one raises ``recorder.DivergenceError`` at once, also where unlike collectives would have paired in silence.
            Costs some milliseconds a collective, and is strict: groups of the same ranks count as one.

    Raises:
        RankError: a rank raised, died, or had not finished by the deadline. It comes ``GRACE`` seconds after the first
            failure, sooner if all others wait in vain: in a collective of which a member has ended without issuing it.
            That is a failure, too. No process is left.
        ValueError: a size or the timeout is not positive.
    """
    outcomes = observe(fn, *args, tp=tp, cp=cp, timeout=timeout, check=check)
    if any(outcome.status != "returned" for outcome in outcomes):
        raise RankError(outcomes)
    return [outcome.value for outcome in outcomes]


def observe(
    fn: Function, *args: Any, tp: int = 1, cp: int = 1, timeout: float = 60.0, check: bool = False
) -> list[Outcome]:
    """Like ``run``, but a rank's failure is what you get, not an exception: one ``Outcome`` per rank."""
    if not (isinstance(tp, int) and isinstance(cp, int) and min(tp, cp) > 0 and timeout > 0):
        raise ValueError(f"tp {tp!r} and cp {cp!r} must be positive integers, timeout {timeout!r} a positive number")
    context: Any = torch.multiprocessing.get_context(START_METHOD)
    if START_METHOD == "forkserver":
        _server.start()
    children: list[_Child] = []
    with tempfile.TemporaryDirectory(prefix="refimpl-ranks-") as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((fn, args, dict(os.environ))))
        try:
            for rank in range(tp * cp):
                for end in ("out", "err", "stack", "calls"):
                    Path(folder, f"rank-{rank}.{end}").touch()
                ours, theirs = context.Pipe()
                call = (theirs, folder, rank, tp, cp, timeout, check)
                process = context.Process(target=_rank.main, args=call, daemon=True)
                children.append(_Child(rank, process, ours))
                process.start()
                theirs.close()
            _listen(children, timeout, Path(folder))
            if all(child.status == "returned" for child in children):
                for child in children:
                    with contextlib.suppress(OSError):
                        child.pipe.send_bytes(b"all done")
                for child in children:
                    child.process.join(2.0)
            outcomes = [child.tell(Path(folder)) for child in children]
        finally:
            for child in children:  # all of them first: a second interrupt may come while we wait
                child.kill()
            for child in children:
                if child.process.pid is not None:
                    child.process.join()
                child.process.close()
    for outcome in outcomes:
        for line in outcome.output.splitlines():
            print(f"[rank {outcome.rank}] {line}")
    return outcomes


def _listen(children: list[_Child], timeout: float, folder: Path) -> None:
    """Wait for every rank's report: until the deadline, ``GRACE`` after a failure, or until all wait in vain."""
    deadline, started, pause = time.monotonic() + _rank.STARTUP, False, POLL
    while (open_ := [c for c in children if c.status == "unfinished"]) and (now := time.monotonic()) < deadline:
        pipes: list[Any] = [*(c.pipe for c in open_), *(c.process.sentinel for c in children if c.status != "died")]
        ready = wait(pipes, min(pause, deadline - now))
        for child in children:
            if child.pipe in ready or child.process.sentinel in ready:
                child.hear()
        looked = time.monotonic()
        for child in [] if ready else _in_vain(children, folder):
            child.stuck = min(child.stuck, looked)
        pause = min(1.0, max(POLL, 10 * (time.monotonic() - looked)))  # records may be long
        if not ready and all(child.stuck < math.inf for child in open_):
            return
        if any(child.stuck < math.inf or child.status in ("raised", "died") for child in children):
            deadline = min(deadline, looked + GRACE)
        if not started and all(child.ready for child in children):
            started, deadline = True, time.monotonic() + timeout


def _in_vain(children: list[_Child], folder: Path) -> list[_Child]:
    """Who stands in a collective for good, since a member of its group has ended without issuing it.

    Collectives with a root are left out: there some wait for the root alone.
    """
    ended = {child.rank for child in children if child.status in ("returned", "raised")}
    calls = [recorder.read(folder / f"rank-{child.rank}.calls") for child in children] if ended else []
    times = [Counter(call.members for call in issued) for issued in calls]  # of each rank, how often over which group

    def stands(child: _Child) -> bool:
        *_, last = calls[child.rank]
        ahead = any(times[child.rank][last.members] > times[rank][last.members] for rank in ended & {*last.members})
        stack = child.where(folder / f"rank-{child.rank}.stack")[1] if ahead and "root" not in last.how else ""
        inner = re.search(r'File "(.*)", line', stack)
        return inner is not None and f"torch{os.sep}distributed{os.sep}" in inner[1]

    return [c for c in children if ended and c.status == "unfinished" and calls[c.rank] and stands(c)]
