"""The terminal demo, ``python -m refimpl``: the None bug and its fix, side by side on four real ranks.

``python -m refimpl check module:function --kind extraction`` grades a function of yours; see ``refimpl.check``.
"""

import argparse
import importlib
import sys

from refimpl import _server

_server.start()  # the fork server imports torch and megatron-core while this process imports torch

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from refimpl import history, ranks  # noqa: E402
from refimpl.diagrams import describe, strips  # noqa: E402
from refimpl.layout import Batch, Layout  # noqa: E402

LAYOUT = Layout(Batch([8, 8], [2, 2]), cp_split="contiguous", cp_size=4)
VERSIONS = history.LINE["#1822"], history.LINE["now"]
TEXT = f"""\
Two samples, A and B, of 8 tokens each; the last 2 tokens of each are its response. They are packed end to end and cut
in 4 windows of 4 rows, one per rank (allgather context parallelism). A row in [ ] scores the token after it:

{strips(LAYOUT)}
Ranks 0 and 2 hold no such row, and so nothing of any response. Each rank makes a list with the entropy of each sample's
response, then all ranks exchange these lists, so that each one has its share of the loss.
"""
LESSON = """\
Before: None makes ranks 0 and 2 skip the all-reduce, and then crashes them. Ranks 1 and 3 wait in it for ever.
After:  a piece of no rows is a piece like any other. Every rank takes part, whatever it holds.
The whole story: make lab, then notebooks/04_the_none_bug.ipynb"""


def main() -> None:
    """Run both, print the table."""
    columns = [[str(rank) for rank in range(4)]]
    for step in VERSIONS:
        lists = [step.extract(*history.buffers(LAYOUT, rank), LAYOUT, rank)[1] or [] for rank in range(4)]
        columns.append(["\n".join(map(describe, entropy)) for entropy in lists])
        outcomes = ranks.observe(history.train, step, LAYOUT, cp=4, timeout=20)
        columns.append([outcome.summary for outcome in outcomes])
    table = Table("rank", "before: entropy of A, B", "what happens", "after: entropy of A, B", "what happens")
    for row in zip(*columns, strict=True):
        table.add_row(*row, end_section=True)
    print(TEXT)
    Console().print(table)
    print(LESSON)


def grade(arguments: list[str]) -> bool:
    """The command line of the grader: prints the report, and says whether all was held."""
    from refimpl import check

    kinds = {name: kind for name, kind in check.KINDS.items() if name != "step"}  # that is no function
    listed = "\n".join(f"  {name:17} {kind.signature}" for name, kind in kinds.items())
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m refimpl check", epilog=f"kinds:\n{listed}", formatter_class=raw)
    parser.add_argument("candidate", metavar="module:function")
    parser.add_argument("--kind", choices=kinds, default="extraction")
    options = parser.parse_args(arguments)
    module, _, name = options.candidate.partition(":")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        parser.error(f"{options.candidate!r} is no function that can be imported: {error}")
    print(report := check.grade(options.kind, function))
    return report.ok


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        sys.exit(not grade(sys.argv[2:]))
    main()
