"""What a rank asks of the others: a record of its collectives, and the first one in which the ranks differ.

Contract C6: every rank issues the same collectives in the same order, forward and backward, whatever data it holds.
"""

import contextlib
import json
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

SPELT = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
KEY = "ADInplaceOrView"  # in the dispatcher below autograd and above every device, in forward and backward
UNEVEN = {"all_to_all": 1, "gather": None, "scatter": None}  # from which dimension on the shapes must agree, if any
KNOWN = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "barrier", "monitored_barrier", *UNEVEN}
_LABEL: ContextVar[str] = ContextVar("label", default="")


class Call(NamedTuple):
    """One collective of one rank: what (``how``: reduction, root), of which tensor, over which group, when."""

    operation: str
    how: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    members: tuple[int, ...]
    phase: str
    label: str
    name: str = ""

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.operation, self.how)))
        named = f", {self.label}" if self.label else ""
        return f"{self.phase:8} {what} over {self.group}: {list(self.shape)} {self.dtype}{named}"

    @classmethod
    def loads(cls, text: str | bytes) -> "Call":
        """From a line of JSON."""
        fields: Any = [tuple(v) if isinstance(v, list) else v for v in json.loads(text)]
        return cls(*fields)

    @property
    def meant(self) -> tuple[object, ...]:
        """Equal where two ranks mean the same collective. Only the label tells apart two reduces of the same size."""
        start = UNEVEN.get(self.operation, 0)
        tensor = () if start is None else (self.dtype, len(self.shape), self.shape[start:])
        return self.operation, self.how, self.phase, self.label, self.name, tensor


@dataclass(frozen=True)
class Record:
    """All that one rank issued, in order, and how it ended."""

    calls: tuple[Call, ...]
    end: str = "returned"


def read(file: Path) -> tuple[Call, ...]:
    """What a ``Recorder`` wrote; a last line cut short by a kill is left out."""
    return tuple(map(Call.loads, file.read_text().split("\n")[:-1]))


class Difference(NamedTuple):
    """The first collective of a group in which its members differ: which of each one's own calls it is, from 0."""

    group: str
    steps: dict[int, int]  # rank -> index; one past its last call if it issued nothing there


def first_difference(records: Sequence[Record]) -> Difference | None:
    """Compare each group's members, call by call; of several differing groups the one that differed first."""
    found = []
    for members in dict.fromkeys(call.members for record in records for call in record.calls):
        own = {rank: [i for i, c in enumerate(records[rank].calls) if c.members == members] for rank in members}
        for n in range(max(map(len, own.values()))):
            calls = [records[rank].calls[own[rank][n]] if n < len(own[rank]) else None for rank in members]
            if len({call and call.meant for call in calls}) > 1:
                steps = {r: own[r][n] if n < len(own[r]) else len(records[r].calls) for r in members}
                found.append(Difference(next(call.group for call in calls if call), steps))
                break
    return min(found, key=lambda difference: min(difference.steps.values()), default=None)


def table(records: Sequence[Record]) -> str:
    """Step by step what the ranks issued, ranks alike on one line; of equal steps only the last few."""
    difference, steps = first_difference(records), max(len(record.calls) for record in records)
    shown = window(records)
    lines = [f"{f'1-{shown.start}':>5}  left out: no difference"] if shown.start else []
    for step in shown:
        texts = [str(record.calls[step]) if step < len(record.calls) else "nothing" for record in records]
        if difference:
            mark = f"   <- first difference, over {difference.group}"
            texts = [text + mark * (difference.steps.get(rank) == step) for rank, text in enumerate(texts)]
        lines += _together(str(step + 1), texts)
    lines += [f"{'':5}  and so on, up to {steps}"] if shown.stop < steps else []
    return "\n".join([*lines, *_together("end", [textwrap.shorten(r.end, 100) for r in records])])


def window(records: Sequence[Record]) -> range:
    """The steps to show: some before the first difference and some after it, or else the last ones."""
    difference, steps = first_difference(records), max(len(record.calls) for record in records)
    if difference is None:
        return range(max(0, steps - 12), steps)
    return range(max(0, min(difference.steps.values()) - 6), min(steps, max(difference.steps.values()) + 7))


def _together(head: str, texts: Sequence[str]) -> Iterator[str]:
    """One line for each different text, with the ranks that have it."""
    width = 9 + 3 * max(0, len(texts) - 2)
    for number, text in enumerate(dict.fromkeys(texts)):
        who = [str(rank) for rank, other in enumerate(texts) if other == text]
        names = "all ranks" if len(who) == len(texts) else f"rank{'s' * (len(who) > 1)} {', '.join(who)}"
        yield f"{head if number == 0 else '':>5}  {names:{width}}  {text}"


class DivergenceError(RuntimeError):
    """Raised on a rank in place of a collective, where another member of the group issues another one or none."""


@contextlib.contextmanager
def label(name: str) -> Iterator[None]:
    """Name the collectives issued inside; those of ``refimpl.collectives`` keep the name in backward."""
    token = _LABEL.set(name)
    try:
        yield
    finally:
        _LABEL.reset(token)


current_label = _LABEL.get  # the name that ``label`` gave, or an empty one


class Recorder:
    """Within ``with``, writes every collective to ``file``, of forward or backward, before it is issued.

    It stands in the dispatcher before torch's operators for collectives, c10d's and the functional ones; all others are
    as fast as ever. Point-to-point calls are not recorded, nor are tensors of inference mode. ``roles`` names groups.
    With a ``store`` those who would meet first agree, or raise ``DivergenceError``: none pairs wrongly or in vain.
    """

    def __init__(self, rank: int, file: TextIO, roles: Mapping[str, str], store: Any = None) -> None:
        self.rank, self.file, self.roles, self.store = rank, file, roles, store
        self.issued: Counter[tuple[int, ...]] = Counter()
        self.hooks: list[Any] = []
        self.inside = False  # of an operator that is made of others

    def __enter__(self) -> "Recorder":
        for space, names in operators().items():
            self.hooks.append(hook := torch.library.Library(space, "IMPL", KEY))  # type: ignore[no-untyped-call]
            for name in names:
                operator = getattr(getattr(torch.ops, space), name).default
                hook.impl(name, partial(self._issue, operator), KEY, with_keyset=True)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        while self.hooks:
            self.hooks.pop()._destroy()
        if self.store is not None:  # nothing more will come
            self.store.set(f"end/{self.rank}", f"raised {kind.__name__}" if kind else "returned")

    def _issue(self, operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a collective, then let it happen."""
        outermost, self.inside = not self.inside, True
        try:
            if outermost:
                given = {a.name: value for a, value in zip(operator._schema.arguments, args, strict=False)}
                call = self._read(operator._opname, given | kwargs)
                print(json.dumps(call), file=self.file, flush=True)
                self.issued[call.members] += 1
                if self.store is not None:
                    self._agree(call, f"{call.members}/{self.issued[call.members]}", self.store)
            return operator.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
        finally:
            self.inside = not outermost

    def _read(self, operator: str, given: Mapping[str, Any]) -> Call:
        names = ("input", "inputs", "input_tensor", "input_tensors", "tensors")
        tensors = [x for x in tree_leaves([given.get(name) for name in names]) if isinstance(x, torch.Tensor)]
        group: Any = given.get("group_name")  # of a functional collective
        if group is None:
            group = dist.ProcessGroup.unbox(given["process_group"])
        elif isinstance(group, str):
            group = torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        how = given.get("reduce_op", "")
        how = how if isinstance(how, str) else dist.ReduceOp.RedOpType(how.op()).name.lower()
        root = given.get("root_rank", given.get("src"))
        how += "" if root is None else f" root {root}"
        alike = "coalesced" not in operator and len({tensor.shape for tensor in tensors}) == 1
        shape = tuple(tensors[0].shape) if alike else tuple(tensor.numel() for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        name, members = group.group_name, tuple(dist.get_process_group_ranks(group))
        what = (_operation(operator), how.strip(), shape, dtype, self.roles.get(name, name))
        return Call(*what, members, phase, current_label(), name)

    def _agree(self, call: Call, key: str, store: Any) -> None:
        """Wait until every member has issued something here, or has ended; raise unless it is the same."""
        store.set(f"{key}/{self.rank}", json.dumps(call))
        for other in set(call.members) - {self.rank}:
            theirs, end = [f"{key}/{other}"], [f"end/{other}"]
            while not store.check(theirs):
                if store.check(end) and not store.check(theirs):  # what was issued before the end is there by then
                    how = store.get(*end).decode()
                    raise DivergenceError(f"rank {self.rank} issues {call}; rank {other} issues nothing more, it {how}")
                time.sleep(0.001)
            issues = Call.loads(store.get(*theirs))
            if call.meant != issues.meant:
                raise DivergenceError(f"rank {self.rank} issues {call}; rank {other} issues {issues}")


@cache
def operators() -> dict[str, set[str]]:
    """Torch's operators for collectives. Listing them takes 0.2 s; the fork server does it for all ranks."""
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    return {s: {n for o, n in names if o == s and _operation(n) in KNOWN} for s in ("c10d", "_c10d_functional")}


def _operation(operator: str) -> str:
    """The name that people call an operator by: all_gather for ``_allgather_base_``."""
    name = operator.strip("_")
    for end in ("_out", "_coalesced", "_base", "_tensor", "_into", "_single"):
        name = name.removesuffix(end)
    return SPELT.get(name, name)
