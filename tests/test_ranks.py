"""Real ranks: values, groups, faults. Each fault must be named, in time, with nothing left over."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from refimpl import ranks
from refimpl.ranks import Rank, RankError


def server_children() -> list[psutil.Process]:
    """Ranks that are alive: the fork server's children."""
    mine = psutil.Process().children()
    return [child for server in mine for child in server.children()]


def open_handles() -> list[int]:
    """Files, sockets and pipes that are open here and in the fork server."""
    mine = psutil.Process()
    servers = [child for child in mine.children() if "forkserver" in " ".join(child.cmdline())]
    return [process.num_fds() for process in (mine, *servers)]


@pytest.fixture(autouse=True)
def nothing_left_over(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Around every test: no rank alive, an empty temp folder, no open handle and no thread more than before."""
    ranks.run(who, cp=1)  # the fork server is up before anyone counts
    folder, handles, threads = tmp_path_factory.mktemp("temp"), open_handles(), threading.active_count()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert server_children() == []
    left = [
        name for name in os.listdir(folder) if not name.startswith("pymp-")
    ]  # multiprocessing's, of a killed parent
    assert left == []
    assert threading.active_count() <= threads
    deadline = time.monotonic() + 5  # the server hears of a rank's end a moment after us
    while (now := open_handles()) and any(a > b for a, b in zip(now, handles, strict=True)):
        assert time.monotonic() < deadline, (now, handles)
        time.sleep(0.01)


def who(me: Rank) -> tuple[int, int, int]:
    return me.rank, me.tp_rank, me.cp_rank


def all_reduce(me: Rank) -> float:
    x = torch.full((2,), float(me.rank + 1), device=me.device)
    dist.all_reduce(x, group=me.cp_group)
    return float(x[0])


# ---------------------------------------------------------------- values and groups


def test_values_come_back_in_rank_order() -> None:
    assert ranks.run(lambda me, x, y: (me.cp_rank, x + y), 10, 5, cp=4) == [(0, 15), (1, 15), (2, 15), (3, 15)]


def test_groups_are_megatrons() -> None:
    def groups(me: Rank) -> Any:
        from megatron.core import parallel_state as mpu

        same = mpu.get_context_parallel_group() is me.cp_group and mpu.get_tensor_model_parallel_group() is me.tp_group
        return same, dist.get_process_group_ranks(me.tp_group), dist.get_process_group_ranks(me.cp_group)

    # tensor parallelism is the innermost: neighbours 0 1 and 2 3; context parallelism crosses: 0 2 and 1 3
    assert ranks.run(groups, tp=2, cp=2) == [
        (True, [0, 1], [0, 2]),
        (True, [0, 1], [1, 3]),
        (True, [2, 3], [0, 2]),
        (True, [2, 3], [1, 3]),
    ]
    assert ranks.run(who, tp=2, cp=3) == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (4, 0, 2), (5, 1, 2)]


def test_collectives_work_on_the_groups() -> None:
    assert ranks.run(all_reduce, tp=2, cp=2) == [4.0, 6.0, 4.0, 6.0]


def test_tensors_come_back_as_leaves() -> None:
    def graph(me: Rank) -> torch.Tensor:
        return torch.ones(3, requires_grad=True) * (me.rank + 1)

    values = ranks.run(graph, cp=2)
    assert [value.tolist() for value in values] == [[1, 1, 1], [2, 2, 2]]
    assert all(value.grad_fn is None and value.device.type == "cpu" for value in values)


def test_what_ranks_print_is_printed_here_in_rank_order(capsys: pytest.CaptureFixture[str]) -> None:
    def talk(me: Rank) -> None:
        time.sleep(0.2 * (1 - me.rank))
        print("hello from", me.rank)
        os.system("echo from a child process")

    ranks.run(talk, cp=2)
    said = ["hello from 0", "from a child process"]
    assert capsys.readouterr().out.splitlines() == [
        *(f"[rank 0] {line}" for line in said),
        *(f"[rank 1] {line.replace('0', '1')}" for line in said),
    ]


def test_a_function_from_main_travels() -> None:
    """As a notebook's does: defined in __main__, with a class and a global of __main__'s own, in no file."""
    program = """
        from dataclasses import dataclass
        from refimpl import ranks

        @dataclass
        class Point:
            x: int

        OFFSET = 5

        def body(me):
            return Point(me.rank + OFFSET)

        values = ranks.run(body, cp=2)
        print(values, all(type(v) is Point for v in values))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[Point(x=5), Point(x=6)] True\n"
    assert done.stderr == ""


def test_a_huge_result_and_a_long_error() -> None:
    values = ranks.run(lambda me: torch.full((150_000_000,), me.rank + 1, dtype=torch.uint8), cp=2)
    assert [(len(value), int(value.min()), int(value.max())) for value in values] == [
        (150_000_000, 1, 1),
        (150_000_000, 2, 2),
    ]

    def long_error(me: Rank) -> None:
        raise ValueError("x" * 1_000_000)

    with pytest.raises(RankError, match="rank 0 raised: ValueError: xxx"):
        ranks.run(long_error, cp=2)


@pytest.mark.parametrize(("tp", "cp", "timeout"), [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1.5, 1, 1), (1, "2", 1)])
def test_bad_sizes(tp: Any, cp: Any, timeout: float) -> None:
    with pytest.raises(ValueError, match="must be positive integers"):
        ranks.run(who, tp=tp, cp=cp, timeout=timeout)


# ---------------------------------------------------------------- faults


def fails(me: Rank, fault: str) -> float:
    """Rank 1 has the fault, the others wait for it in a collective."""
    if me.rank == 1:
        if fault == "raise":
            raise KeyError("the first error")
        if fault == "sys.exit":
            sys.exit(3)
        if fault == "os._exit":
            os._exit(3)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "loop":
            while True:
                pass
        if fault == "skip the collective":
            return 0.0
        if fault == "unpicklable":
            return threading.Lock()  # type: ignore[return-value]
    return all_reduce(me)


@pytest.mark.parametrize(
    ("fault", "message", "at_once"),
    [
        ("raise", "rank 1 raised: KeyError: 'the first error'", True),
        ("sys.exit", "rank 1 raised: SystemExit: 3", True),
        ("os._exit", "rank 1 died: exited with code 3", True),
        ("kill", "rank 1 died: killed by SIGKILL", True),
        ("segfault", "rank 1 died: killed by SIGSEGV", True),
        ("unpicklable", "rank 1 raised: TypeError: cannot pickle '_thread.lock' object", True),
        ("skip the collective", "rank 0 unfinished: in all_reduce, called by all_reduce", True),
        ("loop", "rank 0 unfinished: in all_reduce, called by all_reduce", False),
        ("stop", "rank 0 unfinished: in all_reduce, called by all_reduce", False),
    ],
)
def test_a_fault_is_named_in_time(fault: str, message: str, at_once: bool) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(fails, fault, cp=3, timeout=60 if at_once else 2)
    assert time.monotonic() - started < 20
    assert str(caught.value).startswith(message + "\n")
    outcomes = caught.value.outcomes
    assert [o.rank for o in outcomes] == [0, 1, 2]
    assert caught.value.first is outcomes[0 if message.startswith("rank 0") else 1]
    assert outcomes[1].summary == {
        "skip the collective": "returned",
        "loop": "unfinished: in fails",
        "stop": "unfinished: gave no sign of where it is",
    }.get(fault, message.removeprefix("rank 1 "))
    if fault in ("raise", "skip the collective", "stop", "loop"):
        assert outcomes[2].summary == "unfinished: in all_reduce, called by all_reduce"
    if fault == "raise":
        assert 'raise KeyError("the first error")' in str(caught.value)


def all_reduce_later(x: torch.Tensor, group: Any) -> None:
    dist.all_reduce(x, group=group, async_op=True)
    time.sleep(3 * ranks.GRACE)


def returns_before(me: Rank, what: str) -> float:
    """Rank 1 returns at once, rank 0 a good second later."""
    x = torch.ones(1)
    if what == "shares a collective":
        dist.all_reduce(x, group=me.cp_group)
    if me.rank == 0 and what == "waits for nothing":
        all_reduce_later(x, me.cp_group)
    elif me.rank == 0:
        time.sleep(3 * ranks.GRACE)
    return me.rank


@pytest.mark.parametrize("what", ["works alone", "shares a collective", "waits for nothing"])
def test_a_rank_that_still_works_is_not_taken_for_one_that_waits(what: str) -> None:
    assert ranks.run(returns_before, what, cp=2) == [0, 1]


def test_a_wait_in_vain_is_named_where_it_is() -> None:
    """Rank 3 leaves out the second sum of its own pair; ranks 0 and 2, whose pair is whole, are still at work.

    The headline is the rank that waits, not one that has done nothing wrong.
    """

    def body(me: Rank) -> None:
        x = torch.ones(1)
        dist.all_reduce(x, group=me.cp_group)
        if me.rank != 3:
            dist.all_reduce(x, group=me.cp_group)
        if me.rank in (0, 2):
            time.sleep(60)

    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(body, tp=2, cp=2)
    assert time.monotonic() - started < 30
    assert str(caught.value).startswith("rank 1 unfinished: in all_reduce, called by body\n")
    outcomes = caught.value.outcomes
    waits = "unfinished: in all_reduce, called by body"
    assert [o.summary for o in outcomes] == ["unfinished: in body", waits, "unfinished: in body", "returned"]


def test_who_waits_for_a_root_may_wait_for_it_alone() -> None:
    """Rank 1 leaves out the broadcast; rank 2 gets it all the same, from a root that is late."""

    def body(me: Rank) -> float:
        x = torch.full((1,), float(me.rank))
        if me.rank == 0:
            time.sleep(3 * ranks.GRACE)
        if me.rank != 1:
            dist.broadcast(x, 0, group=me.cp_group)
        return float(x)

    assert ranks.observe(body, cp=3, timeout=20)[2].value == 0.0


class SlowToArrive:
    """A function that takes a second to be read on each rank, before the ranks meet."""

    def __reduce__(self) -> Any:
        return eval, ("__import__('time').sleep(1) or (lambda me: me.rank)",)


def test_the_clock_begins_when_all_have_met() -> None:
    assert ranks.run(SlowToArrive(), cp=2, timeout=0.5) == [0, 1]  # type: ignore[arg-type]


def test_the_first_error_is_the_one_that_came_first() -> None:
    def two_errors(me: Rank) -> None:
        time.sleep(0.3 if me.rank == 0 else 0.0)
        raise ValueError(f"from {me.rank}")

    with pytest.raises(RankError) as caught:
        ranks.run(two_errors, cp=2)
    assert str(caught.value).startswith("rank 1 raised: ValueError: from 1\n")


def test_observe_returns_what_run_raises() -> None:
    outcomes = ranks.observe(fails, "raise", cp=2, timeout=30)
    assert [o.status for o in outcomes] == ["unfinished", "raised"]
    assert [o.status for o in ranks.observe(who, cp=2)] == ["returned", "returned"]


def test_the_last_words_of_a_rank_that_died() -> None:
    def last_words(me: Rank) -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        os._exit(1)

    (outcome,) = ranks.observe(last_words)
    assert (outcome.output, outcome.details) == ("to stdout\n", "to stderr")


def test_a_rank_that_dies_after_it_returned() -> None:
    """Its value is there, but it left while another still worked: in training that is a dead rank."""

    def leave_late(me: Rank) -> int:
        if me.rank == 1:
            threading.Timer(0.5, os._exit, (7,)).start()
            return 1
        time.sleep(1.5)
        return 0

    outcomes = ranks.observe(leave_late, cp=2)
    assert [o.summary for o in outcomes] == ["unfinished: in leave_late", "died: exited with code 7"]


def test_a_signal_without_a_name() -> None:
    (outcome,) = ranks.observe(lambda me: os.kill(os.getpid(), 40))
    assert outcome.summary == "died: killed by signal 40"


def test_a_value_that_cannot_be_read_back() -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return eval, ("1 / 0",)

    (outcome,) = ranks.observe(lambda me: Bad())
    assert outcome.summary == "raised: its value cannot be read here: ZeroDivisionError('division by zero')"


def test_ranks_see_todays_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIMPL_TEST", "set after the fork server started")
    assert ranks.run(lambda me: os.environ["REFIMPL_TEST"]) == ["set after the fork server started"]


def test_an_odd_temp_folder_and_a_far_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "with #, ? and a space"
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    assert ranks.run(all_reduce, cp=2, timeout=float("inf")) == [3.0, 3.0]
    assert os.listdir(odd) == []


def test_a_call_that_cannot_be_read_is_an_error_on_the_rank() -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return eval, ("1 / 0",)

    with pytest.raises(RankError, match="rank 0 raised: ZeroDivisionError"):
        ranks.run(who, Bad(), cp=1)


def test_what_a_rank_started_ends_with_it() -> None:
    def start_child(me: Rank) -> int:
        child = subprocess.Popen(["sleep", "600"])
        if me.rank == 1:
            raise ValueError(child.pid)
        return child.pid

    outcomes = ranks.observe(start_child, cp=2)
    pids = [outcomes[0].value, int(outcomes[1].reason.split()[-1])]
    ranks.run(start_child)  # and when all is well
    deadline = time.monotonic() + 5
    alive = lambda pid: psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # noqa: E731
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


HANGS = """
    import signal, sys, time
    from refimpl import ranks

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored

    def hang(me):
        open(sys.argv[1] + f"/{me.rank}", "w").write("here")
        time.sleep(600) if me.rank else sum(range(10**12))  # rank 0 keeps the interpreter to itself

    try:
        ranks.run(hang, cp=2, timeout=3)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_interrupting_or_killing_the_parent_stops_the_ranks(sent: signal.Signals, tmp_path: Path) -> None:
    """SIGINT goes to the whole process group, as a terminal and Jupyter send it."""
    command = [sys.executable, "-c", textwrap.dedent(HANGS), str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while len(os.listdir(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) >= 3  # the server and two ranks
        os.killpg(parent.pid, sent) if sent == signal.SIGINT else parent.send_signal(sent)
        assert parent.communicate(timeout=40)[0] == ("interrupted\n" if sent == signal.SIGINT else "")
    finally:
        parent.kill()
    _, alive = psutil.wait_procs(family, timeout=40)  # a rank that never lets go of the interpreter: at its deadline
    assert alive == []


def test_a_hundred_runs_in_a_row_leave_nothing() -> None:
    """What may be left is counted by the fixture. Where both ranks fail, or rank 1 alone and rank 0 waits for it."""

    def body(me: Rank, fault: str, alone: bool) -> float:
        return fails(replace(me, rank=1) if fault and not alone else me, fault)

    for i in range(100):
        fault = {3: "raise", 6: "kill", 9: "os._exit"}.get(i % 10, "")
        outcomes = ranks.observe(body, fault, i % 50 == 3, cp=2, timeout=30)
        expected = {"": ["returned"] * 2, "raise": ["raised"] * 2}.get(fault, ["died"] * 2)
        assert [o.status for o in outcomes] == (["unfinished", "raised"] if i % 50 == 3 else expected)


FULL = """
    import json, os, resource, sys, tempfile
    import psutil, torch
    from refimpl import ranks

    def how(fn, *args):
        try:
            return [outcome.summary for outcome in ranks.observe(fn, *args, cp=2, timeout=30)]
        except OSError as error:
            return os.strerror(error.errno)

    def prints(me):
        for _ in range(me.rank * 10_000):
            print("x" * 99)

    os.makedirs(sys.argv[1], exist_ok=True)
    if sys.argv[2] == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))
    ranks.run(lambda me: 0)
    tempfile.tempdir, mine = sys.argv[1], psutil.Process()
    before = mine.num_fds()
    found = {
        "nothing large": how(lambda me: 0),
        "a huge argument": how(lambda me, x: 0, b"x" * 5_000_000),
        "a huge result": how(lambda me: torch.ones(5_000_000)),
        "much output": how(prints)[1],
        "nothing large again": how(lambda me: 0),
        "left": [os.listdir(sys.argv[1]), mine.num_fds() - before, sum(len(s.children()) for s in mine.children())],
    }
    print("FOUND", json.dumps(found))
"""


def test_a_full_temp_folder(tmp_path: Path) -> None:
    """A file system of 512 KiB where we may mount one, else files that may not grow beyond that."""
    mount = 'mkdir "$1" && mount -t tmpfs -o size=512k tmpfs "$1" && shift && exec "$@"'
    own = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", mount, "sh"]
    folder = str(tmp_path / "small")
    may = shutil.which("unshare") and subprocess.run([*own, folder, "true"], capture_output=True).returncode == 0
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-c", textwrap.dedent(FULL), folder, "full" if may else "limit"]
    done = subprocess.run([*own, folder, *command] if may else command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1].removeprefix("FOUND"))
    full = "No space left on device" if may else "File too large"
    for summary in found.pop("a huge result"):
        assert summary.startswith("raised: "), summary
        assert summary.endswith(full), summary
    assert found.pop("much output").endswith(full)
    fine = ["returned", "returned"]
    assert found == {
        "nothing large": fine, "a huge argument": full, "nothing large again": fine, "left": [[], 0, 0]
    }  # fmt: skip


def test_a_fork_server_that_was_killed_is_started_again() -> None:
    for server in psutil.Process().children():
        if "forkserver" in " ".join(server.cmdline()):
            server.kill()
            while server.status() != psutil.STATUS_ZOMBIE:  # its parent, this process, has not asked after it yet
                time.sleep(0.01)
    assert ranks.run(who) == [(0, 0, 0)]


def test_two_runs_at_once_do_not_disturb_each_other() -> None:
    """Two threads whose runs return, each with its own numbers, and one whose runs fail."""
    results: dict[Any, list[Any]] = {}

    def together(number: Any) -> None:
        if isinstance(number, str):
            results[number] = [ranks.observe(fails, number, cp=2)[1].summary for _ in range(2)]
        else:
            results[number] = [ranks.run(lambda me, n: n * all_reduce(me), number, cp=2) for _ in range(3)]

    threads = [threading.Thread(target=together, args=(n,)) for n in (1, 100, "kill")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [[3.0, 3.0]] * 3, 100: [[300.0, 300.0]] * 3, "kill": ["died: killed by SIGKILL"] * 2}
