"""Draw the figures of the notebooks and the README as SVG: ``make figures``. The same code gives the same bytes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refimpl import history, slicing
from refimpl.diagrams import Drawing, pieces, strips
from refimpl.layout import Batch, Layout

BATCH = Batch([5, 2, 7], [3, 1, 4])
LATE = Layout(Batch([8, 8], [2, 2]), cp_split="contiguous", cp_size=4)


def entropy_lists(extract: Callable[..., Any], title: str) -> Drawing:
    """What an extraction puts in each rank's entropy list."""
    held = [extract(*history.buffers(LATE, rank), LATE, rank)[1] for rank in range(LATE.cp_size)]
    return pieces(held, title)


def gallery() -> dict[str, Drawing]:
    """Every figure by its file name."""
    return {
        "thd.svg": strips(Layout(BATCH)),
        "bshd.svg": strips(Layout(BATCH, "bshd")),
        "zigzag_cp2.svg": strips(Layout(BATCH, cp_size=2)),
        "allgather_cp2.svg": strips(Layout(BATCH, cp_split="contiguous", cp_size=2)),
        "allgather_cp4.svg": strips(Layout(BATCH, cp_split="contiguous", cp_size=4)),
        "bshd_zigzag_cp2.svg": strips(Layout(BATCH, "bshd", cp_size=2)),
        "empty_ranks.svg": strips(LATE),
        "entropy_before_1846.svg": entropy_lists(history.extract_before_1846, "entropy lists before #1846"),
        "entropy_after_1846.svg": entropy_lists(history.extract_after_1846, "entropy lists after #1846"),
        "entropy_aligned.svg": entropy_lists(slicing.extract, "entropy lists, aligned"),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    for name, drawing in gallery().items():
        (folder / name).write_bytes(drawing.bytes("svg"))
        print(folder / name)
