"""The record of collectives: what it sees, how ranks are compared, and the mode that fails at the first difference."""

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from refimpl import collectives, ranks
from refimpl.diagrams import timeline
from refimpl.ranks import Rank, RankError
from refimpl.recorder import Call, Record, Recorder, current_label, first_difference, label, read, table


def call(name: str = "all_reduce", label: str = "", members: tuple[int, ...] = (0, 1), **other: Any) -> Call:
    fields = {"how": "sum", "shape": (4,), "dtype": "float32", "group": "cp", "phase": "forward"} | other
    return Call(operation=name, label=label, members=members, **fields)


def brief(calls: tuple[Call, ...]) -> list[tuple[Any, ...]]:
    return [(c.operation, c.how, c.shape, c.dtype, c.group, c.members, c.phase) for c in calls]


def test_it_sees_c10d() -> None:
    outcomes = ranks.observe(every_kind, cp=2)
    assert [o.summary for o in outcomes] == ["returned", "returned"]
    for outcome in outcomes:
        assert brief(outcome.calls) == [
            ("all_reduce", "max", (2,), "float32", "cp", (0, 1), "forward"),
            ("all_gather", "", (2,), "float32", "cp", (0, 1), "forward"),
            ("all_to_all", "", (2,), "float32", "cp", (0, 1), "forward"),
            ("reduce_scatter", "sum", (2,), "float32", "cp", (0, 1), "forward"),
            ("broadcast", "root 0", (2,), "float32", "cp", (0, 1), "forward"),
            ("barrier", "", (), "", "cp", (0, 1), "forward"),
        ]


def every_kind(me: Rank) -> None:
    one, group = torch.ones(2), me.cp_group
    dist.all_reduce(one, op=dist.ReduceOp.MAX, group=group)
    dist.all_gather([torch.empty(2) for _ in range(2)], one, group=group)
    dist.all_to_all_single(torch.empty(2), one, group=group)
    dist.reduce_scatter(torch.empty(2), [one, one], group=group)
    dist.broadcast(one, 0, group=group)
    dist.barrier(group=group)


def test_it_sees_functional_collectives_and_backward() -> None:
    def body(me: Rank) -> None:
        x = torch.ones(2, 3, requires_grad=True)
        gathered = functional.all_gather_tensor_autograd(x * 1, 0, me.cp_group)
        gathered.sum().backward()

    for outcome in ranks.observe(body, cp=2):
        assert brief(outcome.calls) == [
            ("all_gather", "", (2, 3), "float32", "cp", (0, 1), "forward"),
            ("reduce_scatter", "sum", (4, 3), "float32", "cp", (0, 1), "backward"),
        ]


def test_groups_by_role_members_in_the_world_and_labels_kept_in_backward() -> None:
    def body(me: Rank) -> None:
        x = torch.ones(3, requires_grad=True)
        with label("logits"):
            y = collectives.all_reduce(x, me.tp_group, loss="own slice")
        collectives.all_gather(y, me.cp_group, loss="own slice").sum().backward()  # type: ignore[no-untyped-call]

    for rank, outcome in enumerate(ranks.observe(body, tp=2, cp=2)):
        tp, cp = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        assert [(c.operation, c.group, c.members, c.phase, c.label) for c in outcome.calls] == [
            ("all_reduce", "tp", tp, "forward", "logits"),
            ("all_gather", "cp", cp, "forward", ""),
            ("all_to_all", "cp", cp, "backward", ""),
            ("all_reduce", "tp", tp, "backward", "logits"),
        ]


# ---------------------------------------------------------------- comparison


@pytest.mark.parametrize(
    "other",
    [
        call("all_gather"),
        call(how="max"),
        call(shape=(5,)),
        call(dtype="float64"),
        call(phase="backward"),
        call(label="entropy"),
    ],
)
def test_each_property_makes_a_difference(other: Call) -> None:
    difference = first_difference([Record((call(), call())), Record((call(), other))])
    assert difference is not None
    assert (difference.group, difference.steps) == ("cp", {0: 1, 1: 1})


def test_the_same_collectives_are_no_difference() -> None:
    assert first_difference([Record((call(), call())), Record((call(), call()))]) is None
    assert first_difference([Record(()), Record(())]) is None
    uneven = [Record((call("all_to_all", shape=(n, 2)),)) for n in (0, 7)]
    assert first_difference(uneven) is None  # who sends how much may differ
    assert first_difference([uneven[0], Record((call("all_to_all", shape=(7, 1)),))]) is not None  # but not of what
    assert first_difference([uneven[0], Record((call("all_to_all", shape=(7,)),))]) is not None
    scatter = [Record((call("scatter", shape=shape, dtype=dtype),)) for shape, dtype in (((2,), "float32"), ((), ""))]
    assert first_difference(scatter) is None  # only the root passes something in


def test_two_groups_of_the_same_ranks_are_not_the_same_group() -> None:
    assert first_difference([Record((call(name="1"),)), Record((call(name="2"),))]) is not None


@pytest.mark.parametrize("first", [(0, 1), (2, 3)])
def test_of_two_differing_groups_the_one_that_differed_first(first: tuple[int, ...]) -> None:
    """One pair differs in its first call, the other in its second."""
    second = tuple({0, 1, 2, 3} - set(first))
    calls = {rank: (call(members=first, group="early", shape=(rank,)),) for rank in first}
    calls |= {rank: (call(members=second), call(members=second, label=str(rank))) for rank in second}
    difference = first_difference([Record(calls[rank]) for rank in range(4)])
    assert difference is not None
    assert difference.group == "early"


def test_a_missing_call_is_a_difference() -> None:
    difference = first_difference([Record((call(),)), Record((call(), call()))])
    assert difference is not None
    assert difference.steps == {0: 1, 1: 1}


def test_groups_are_compared_apart() -> None:
    """Two TP groups with batches of different size are alike, each in itself; a CP group between them is not."""
    tp = [call(group="tp", members=(0, 1), shape=(4,)), call(group="tp", members=(2, 3), shape=(6,))]
    assert first_difference([Record((tp[rank // 2],)) for rank in range(4)]) is None
    cp = [call(members=((0, 2), (1, 3))[rank % 2], label="late" if rank == 3 else "") for rank in range(4)]
    difference = first_difference([Record((tp[rank // 2], cp[rank])) for rank in range(4)])
    assert difference is not None
    assert (difference.group, difference.steps) == ("cp", {1: 1, 3: 1})


def test_the_table() -> None:
    records = [
        Record((call(),)),
        Record((call(), call(label="entropy")), "unfinished: in all_reduce"),
        Record((call(),)),
    ]
    three = [Record(tuple(call(members=(0, 1, 2), label=c.label) for c in r.calls), r.end) for r in records]
    assert table(three).splitlines() == [
        "    1  all ranks     forward  all_reduce sum over cp: [4] float32",
        "    2  ranks 0, 2    nothing   <- first difference, over cp",
        "       rank 1        forward  all_reduce sum over cp: [4] float32, entropy   <- first difference, over cp",
        "  end  ranks 0, 2    returned",
        "       rank 1        unfinished: in all_reduce",
    ]


def test_the_mark_stands_where_each_rank_differs() -> None:
    """Over tp, at the first call of rank 3 and the second of rank 2, which did a cp reduce before."""
    cp, tp = call(members=(0, 2)), [call(group="tp", members=(2, 3), shape=(n,)) for n in (4, 5)]
    lines = table([Record((cp,)), Record(()), Record((cp, tp[0])), Record((tp[1],))]).splitlines()
    marked = [line.strip() for line in lines if "first difference" in line]
    assert len(marked) == 2
    assert marked[0].startswith("rank 3")
    assert marked[1].startswith("rank 2")


def test_a_long_report_stays_short() -> None:
    same = tuple(call() for _ in range(3000))
    records = [Record((call(label="one more"), *same)), Record(same)]
    assert len(table(records).splitlines()) < 25
    assert "and so on, up to 3001" in table(records)
    assert len(timeline(records, "long").figure.axes[0].texts) < 40


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    whole = json.dumps(call(label="whole"))
    (tmp_path / "calls").write_text(f"{whole}\n{whole}\n{whole[:30]}")
    assert read(tmp_path / "calls") == (call(label="whole"), call(label="whole"))


def test_labels_nest() -> None:
    with label("outer"):
        with label("inner"):
            assert current_label() == "inner"
        assert current_label() == "outer"
    assert current_label() == ""


def test_a_long_table_begins_shortly_before_the_difference() -> None:
    same = tuple(call() for _ in range(50))
    lines = table([Record(same), Record((*same, call(label="one more")))]).splitlines()
    assert lines[0] == " 1-44  left out: no difference"
    assert lines[1].startswith("   45  all ranks")
    assert lines[7].startswith("   51  rank 0     nothing   <- first difference")


def test_the_timeline_says_in_text_what_it_draws() -> None:
    drawing = timeline([Record((call(),)), Record((call(), call()), "unfinished: in all_reduce")], "one is missing")
    assert str(drawing).startswith("one is missing\n    1  all ranks")
    texts = [text.get_text() for text in drawing.figure.axes[0].texts]
    assert texts.count("all_reduce") == 3
    assert texts.count("missing") == 1
    assert texts.count("waits in its last one") == 1
    assert drawing.bytes("svg") == drawing.bytes("svg")


# ---------------------------------------------------------------- on ranks that differ


def skips(me: Rank, leave: int = 1) -> float:
    """One rank leaves out the second of three collectives; the later ones then pair one step apart."""
    x = torch.ones(4)
    for number in range(3):
        if number == 1 and me.cp_rank == leave:
            continue
        with label(f"number {number}"):
            dist.all_reduce(x, group=me.cp_group)
    return float(x[0])


def test_a_hang_is_reported_with_the_first_difference() -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(skips, cp=2, timeout=2)
    message = str(caught.value)
    assert message.startswith("rank 0 unfinished: in all_reduce, called by skips\n")
    assert "    2  rank 0     forward  all_reduce sum over cp: [4] float32, number 1   <- first difference" in message
    assert "       rank 1     forward  all_reduce sum over cp: [4] float32, number 2" in message
    assert "    3  rank 0     forward  all_reduce sum over cp: [4] float32, number 2" in message
    assert "       rank 1     nothing" in message


@pytest.mark.parametrize("cp", [2, 3])
def test_the_check_fails_at_the_difference_at_once(cp: int) -> None:
    started = time.monotonic()
    outcomes = ranks.observe(skips, cp=cp, timeout=30, check=True)
    assert time.monotonic() - started < 10
    for outcome in outcomes:
        assert outcome.reason.startswith(f"DivergenceError: rank {outcome.rank} issues forward  all_reduce sum over cp")
        assert len(outcome.calls) == 2


def test_the_check_fails_even_where_nothing_hangs() -> None:
    """Two reduces in another order: same number, same sizes, both pair with the wrong one, all ranks return."""

    def swapped(me: Rank) -> list[float]:
        values = {"log-prob": torch.full((4,), 1.0), "entropy": torch.full((4,), 10.0)}
        for name in sorted(values, reverse=me.cp_rank == 1):
            with label(name):
                dist.all_reduce(values[name], group=me.cp_group)
        return [float(value[0]) for value in values.values()]

    assert ranks.run(swapped, cp=2) == [[11.0, 11.0], [11.0, 11.0]]  # wrong, and nobody says so: 2 and 20 are right
    with pytest.raises(RankError) as caught:
        ranks.run(swapped, cp=2, check=True)
    assert "DivergenceError: rank 0 issues forward  all_reduce sum over cp: [4] float32, entropy" in str(caught.value)
    assert "1  rank 0     forward  all_reduce sum over cp: [4] float32, entropy   <- first diff" in str(caught.value)


def test_the_check_names_a_rank_that_ended() -> None:
    def ends(me: Rank, how: str) -> None:
        if me.rank == 1:
            if how == "raise":
                raise ValueError("first")
            return
        dist.all_reduce(torch.ones(1), group=me.cp_group)

    for how, end in (("raise", "raised ValueError"), ("return", "returned")):
        outcomes = ranks.observe(ends, how, cp=2, timeout=30, check=True)
        assert outcomes[0].reason.endswith(f"rank 1 issues nothing more, it {end}")


def test_a_peer_that_issues_and_ends_between_two_looks_is_no_divergence() -> None:
    """Between the two questions to the store: whether the peer has ended, and whether it has issued."""

    class Store:
        looks = 0

        def set(self, key: str, value: str) -> None: ...

        def check(self, keys: list[str]) -> bool:
            self.looks += 1
            return self.looks > 1  # after the first question the peer issues the same, and ends

        def get(self, key: str) -> bytes:
            return json.dumps(call()).encode() if "end" not in key else b"returned"

    Recorder(0, io.StringIO(), {}, Store())._agree(call(), "key", Store())


def test_each_group_is_agreed_on_by_itself() -> None:
    """One TP pair reduces once more than the other: legal, and the CP reduce after it still finds its partner."""

    def uneven(me: Rank) -> float:
        x = torch.ones(1)
        for _ in range(2 if me.cp_rank == 0 else 1):
            dist.all_reduce(x, group=me.tp_group)
        dist.all_reduce(x, group=me.cp_group)
        return float(x)

    assert ranks.run(uneven, tp=2, cp=2, check=True, timeout=20) == [4.0 + 2.0] * 4


@pytest.mark.parametrize("what", ["group", "root", "columns", "coalesced"])
def test_the_check_sees_other_groups_roots_columns_and_all_tensors(what: str) -> None:
    def body(me: Rank) -> None:
        x = torch.ones(2 + me.rank if what == "coalesced" else 6, 2 - me.rank if what == "columns" else 1)
        if what == "group":
            dist.all_reduce(x, group=me.cp_group if me.rank else None)
        if what == "root":
            dist.broadcast(x, src=me.rank, group=me.cp_group)
        if what == "columns":
            dist.all_to_all_single(torch.empty_like(x), x, group=me.cp_group)
        if what == "coalesced":
            functional.all_reduce_coalesced([torch.ones(2), x], "sum", me.cp_group)

    for outcome in ranks.observe(body, cp=2, timeout=30, check=True):
        assert outcome.reason.startswith("DivergenceError"), outcome.summary


def test_the_check_lets_a_scatter_pass() -> None:
    def body(me: Rank) -> float:
        x = torch.empty(1)
        dist.scatter(x, [torch.ones(1), torch.full((1,), 2.0)] if me.rank == 0 else None, src=0)
        return float(x)

    assert ranks.run(body, cp=2, check=True) == [1.0, 2.0]


def test_a_collective_from_another_thread_is_recorded() -> None:
    def body(me: Rank) -> None:
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=me.cp_group))
        thread.start()
        thread.join()

    for outcome in ranks.observe(body, cp=2):
        assert [c.operation for c in outcome.calls] == ["all_reduce"]


def test_the_check_changes_nothing_where_all_is_well() -> None:
    def sums(me: Rank) -> float:
        x = torch.full((1,), float(me.rank), requires_grad=True)
        y = collectives.all_reduce(x, me.cp_group, loss="own slice")
        y.backward()  # type: ignore[no-untyped-call]
        return float(y) + float(x.grad)  # type: ignore[arg-type]

    assert ranks.run(sums, tp=2, cp=2, check=True) == [2 + 2.0, 4 + 2.0, 2 + 2.0, 4 + 2.0]
