"""Sliders over the strips, and a stepper over a timeline: below the static pictures, and never saved in a notebook."""

from collections.abc import Sequence
from typing import Any

import ipywidgets
from IPython.display import display

from refimpl.diagrams import Drawing, boxes, strips, timeline
from refimpl.layout import Batch, Layout
from refimpl.recorder import Record

LAYOUTS = {
    "thd, zigzag": ("thd", "zigzag"),
    "thd, allgather": ("thd", "contiguous"),
    "bshd, zigzag": ("bshd", "zigzag"),
    "bshd, contiguous": ("bshd", "contiguous"),
}
WIDE = {"style": {"description_width": "7em"}, "layout": {"width": "34em"}, "continuous_update": False}


def holds(layout: Layout, rank: int) -> str:
    """What a rank holds, in one sentence."""
    rows = [box for box in boxes(layout, rank) if box]
    scoring = [f"{'ABC'[box.sample]}{box.position}" for box in rows if box.predicting]
    return (
        f"rank {rank} holds {len(rows)} tokens in {layout.rows} rows; scoring a response: {' '.join(scoring) or 'none'}"
    )


def view(layout: str, cp_size: int, rank: int, **samples: tuple[int, int]) -> None:
    """The strips of such a batch, each sample given by its prompt and total length, and a sentence on one rank."""
    lengths = [(total, total - prompt) for prompt, total in samples.values()]
    try:
        laid: Any = Layout(Batch(*zip(*lengths, strict=True)), *LAYOUTS[layout], cp_size=cp_size)  # type: ignore[arg-type]
    except ValueError as error:
        print(f"ValueError: {error}")
        return
    display(strips(laid))  # type: ignore[no-untyped-call]
    print(holds(laid, rank))


def explore() -> ipywidgets.VBox:
    """Sliders for three samples (left handle: the prompt, right one: the end), the layout, cp_size and a rank."""
    controls: dict[str, Any] = {
        letter: ipywidgets.IntRangeSlider(value=value, min=0, max=10, description=f"sample {letter}", **WIDE)
        for letter, value in {"A": (2, 5), "B": (1, 2), "C": (3, 7)}.items()
    }
    controls["layout"] = ipywidgets.ToggleButtons(options=list(LAYOUTS), description="layout")
    controls["cp_size"] = ipywidgets.IntSlider(value=2, min=1, max=4, description="cp_size", **WIDE)
    controls["rank"] = ipywidgets.IntSlider(value=0, min=0, max=1, description="rank", **WIDE)

    def limit(change: Any) -> None:
        controls["rank"].max = change["new"] - 1

    controls["cp_size"].observe(limit, "value")
    return ipywidgets.VBox([*controls.values(), ipywidgets.interactive_output(view, controls)])


def until(records: Sequence[Record], title: str, step: int) -> Drawing:
    """The timeline after ``step`` calls of each rank; who has issued all of its calls shows how it ends."""
    cut = [record if step >= len(record.calls) else Record(record.calls[:step], "goes on") for record in records]
    return timeline(cut, f"{title}: after {step}")


def stepper(records: Sequence[Record], title: str) -> ipywidgets.VBox:
    """A slider that lets the ranks issue one collective after the other."""
    last = max(len(record.calls) for record in records)
    slider = ipywidgets.IntSlider(value=1, min=1, max=last, description="collectives", **WIDE)

    def draw(step: int) -> None:
        display(until(records, title, step))  # type: ignore[no-untyped-call]

    return ipywidgets.VBox([slider, ipywidgets.interactive_output(draw, {"step": slider})])
