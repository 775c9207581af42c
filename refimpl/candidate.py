"""Somebody else's function, called: what it breaks, what it raises, and how long it may take."""

import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

Candidate = Callable[..., Any]
LIMIT = 2.0  # seconds for one call of a candidate


@dataclass(frozen=True)
class Finding:
    """One clause broken in one case: what was expected, and what came."""

    clause: str
    where: str
    expected: str
    got: str
    hung: bool = False

    def __str__(self) -> str:
        return f"{self.clause} broken: {self.where}\n  expected {self.expected}\n  got      {self.got}"


@dataclass(frozen=True)
class Kind:
    """What is called and how; which clauses are looked at; the inputs by name, smallest first; and who judges.

    Without ``run`` ranks are simulated: ``judge(fn, given, rank)``. With it they are real ones on ``grid(given)``: each
    runs ``run(me, fn, given)``, and ``judge(value, given, rank)`` looks at what it brought back.
    """

    signature: str
    clauses: str
    inputs: Callable[[], dict[str, Any]]
    judge: Callable[..., Iterator[Finding]]
    run: Callable[..., Any] | None = None
    grid: Callable[[Any], dict[str, int]] = lambda given: {}


class Broken(Exception):  # noqa: N818  (a finding in the making)
    """Expected, got: the candidate gave nothing that could be looked at."""


def call(fn: Candidate, *args: Any) -> Any:
    """What the candidate returns; whatever it raises becomes ``Broken``."""
    try:
        return fn(*args)
    except (KeyboardInterrupt, Late):
        raise
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise Broken("an answer", f"{what} (line {last.lineno}, in {last.name})") from None


class Late(BaseException):
    """No answer in time. Not an ``Exception``: a candidate that catches those must not catch it."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise ``Late`` after ``LIMIT`` seconds, and again and again should it be caught. In the main thread only."""

    def late(_: int, __: FrameType | None) -> None:
        raise Late

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
