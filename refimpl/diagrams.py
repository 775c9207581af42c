"""Pictures of layouts and of what ranks hold, each with a text twin that says the same.

The *position strip*: one lane per rank, one box per row of its buffer. The letter names the sample, the number is the
position, hatching marks the prompt, a thick frame a predicting row with the token that it scores below, white padding.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from refimpl.layout import Layout
from refimpl.recorder import Record, first_difference, table, window

if TYPE_CHECKING:  # else where something is drawn: the import takes 0.3 s, and ranks never draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7")  # Okabe and Ito's, apart for colour-blind readers too
GREY, RED, LANE = "#666666", "#C0392B", 1.5
STYLE: dict[Any, Any] = {"svg.hashsalt": "refimpl", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
PICTURE_KEY = (
    "letter: sample   number: position   hatched: prompt   framed: predicting row   →: what it scores   empty: padding"
)
TIMELINE_KEY = "blue: forward   orange, hatched: backward   thick red: the first difference"
TEXT_KEY = "a0: prompt    A2: response    [A2]: predicting row, scores the next position    . : padding"


class Box(NamedTuple):
    """One row of a rank's buffer that holds a token."""

    sample: int
    position: int
    prompt: bool
    predicting: bool

    def __str__(self) -> str:
        letter = _letter(self.sample).lower() if self.prompt else _letter(self.sample)
        return f"[{letter}{self.position}]" if self.predicting else f" {letter}{self.position} "


@dataclass(frozen=True)
class Drawing:
    """A picture and its text twin. As the last line of a notebook cell it shows the one above the other."""

    figure: "Figure"
    text: str

    def __str__(self) -> str:
        return self.text

    def bytes(self, kind: str) -> bytes:
        """The picture as ``"png"`` or ``"svg"`` on opaque white; the same drawing gives the same bytes."""
        from matplotlib import rc_context

        buffer = io.BytesIO()
        with rc_context(STYLE):
            options = {"metadata": {"Date": None}} if kind == "svg" else {"pil_kwargs": {"optimize": True}}
            self.figure.savefig(buffer, format=kind, dpi=120, facecolor="white", **options)
        return buffer.getvalue()

    def _ipython_display_(self) -> None:
        from IPython.display import Image, display

        width = round(self.figure.get_size_inches()[0] * 104)
        display(Image(self.bytes("png"), width=width, alt=self.text.splitlines()[0]))  # type: ignore[no-untyped-call]
        print(self.text)


def boxes(layout: Layout, cp_rank: int) -> list[Box | None]:
    """What each row of one rank holds, in row order, ``None`` for padding. Both twins are made from it."""
    rows: list[Box | None] = [None] * layout.rows
    for sample, spans in enumerate(layout.spans(cp_rank)):
        first, last = layout.batch.first_predicting(sample), layout.batch.total_lengths[sample] - 1
        for span in spans:
            for row, position in enumerate(range(span.position, span.position + span.length), span.row):
                rows[row] = Box(sample, position, position <= first, first <= position < last)
    return rows


def strips(layout: Layout) -> Drawing:
    """The position strips of all ranks: which row of which rank holds which position of which sample."""
    lanes = [boxes(layout, rank) for rank in range(layout.cp_size)]
    wide = max((len(str(box)) for lane in lanes for box in lane if box), default=0)
    texts = ["".join(str(box or " . ").ljust(wide) for box in lane).rstrip() for lane in lanes]
    lines = [str(layout), *(f"rank {rank} |{text}" for rank, text in enumerate(texts)), TEXT_KEY]
    figure, axes = canvas(len(lanes), layout.rows, str(layout))
    for row in range(layout.rows):
        axes.text(row + 0.5, -0.1, str(row), ha="center", va="bottom", fontsize=6.5, color=GREY)
    axes.text(-0.3, -0.1, "row", ha="right", va="bottom", fontsize=6.5, color=GREY)
    for rank, lane in enumerate(lanes):
        for row, box in enumerate(lane):
            if box is None:
                draw_box(axes, row, rank, 1, "", "white", False, False)
                continue
            letter, colour = _letter(box.sample), COLOURS[box.sample % len(COLOURS)]
            draw_box(axes, row, rank, 1, f"{letter}{box.position}", colour, box.prompt, box.predicting)
            if box.predicting:
                target = f"→{letter}{box.position + 1}"
                axes.text(row + 0.5, rank * LANE + 1.06, target, ha="center", va="top", fontsize=6.5, color=GREY)
    axes.text(0, len(lanes) * LANE + 0.1, PICTURE_KEY, fontsize=6.5, va="top", color=GREY)
    return Drawing(figure, "\n".join(lines))


def describe(piece: Tensor | None) -> str:
    """``None``, or its number of rows and whether it is part of a graph."""
    if piece is None:
        return "None"
    return f"{len(piece)} row{'s' * (len(piece) != 1)}, {'grad' if piece.requires_grad else 'no grad'}"


def pieces(lists: Sequence[Sequence[Tensor | None]], title: str) -> Drawing:
    """The list that each rank holds, one entry per sample; ``None`` and pieces outside the graph stand out."""
    figure, axes = canvas(len(lists), 3 * max((len(entries) for entries in lists), default=1), title)
    lines = [title]
    for rank, entries in enumerate(lists):
        texts = [f"{_letter(sample)}: {describe(piece)}" for sample, piece in enumerate(entries)] or ["(an empty list)"]
        lines.append(f"rank {rank} | {'  '.join(text.ljust(18) for text in texts)}".rstrip())
        for sample, text in enumerate(texts):
            piece = entries[sample] if entries else None
            face = "#D55E00" if piece is None else "#56B4E9" if piece.requires_grad else "#DDDDDD"
            draw_box(axes, 3 * sample, rank, 3, text, face, piece is None, False)
    key = "blue: a tensor in the graph   grey: a tensor outside the graph   red, hatched: not a tensor"
    axes.text(0, len(lists) * LANE + 0.1, key, fontsize=6.5, va="top", color=GREY)
    return Drawing(figure, "\n".join(lines))


def bars(rows: Sequence[tuple[str, Sequence[float]]], title: str, unit: str) -> Drawing:
    """Stacked bars to scale, one row each: what is held at the same time, in ``unit``."""
    figure = _figure(8.4, 0.5 * len(rows) + 1.0)
    axes = figure.add_axes((0.34, 0.16, 0.62, 0.7))
    widest = max(sum(parts) for _, parts in rows)
    lines = [f"{title}, in {unit}"]
    for y, (name, parts) in enumerate(rows):
        start = 0.0
        for part in parts:
            axes.barh(y, part, left=start, height=0.62, color=COLOURS[0], edgecolor="black", linewidth=0.6)
            start += part
        axes.text(start + widest / 80, y, f"{start:g}", va="center", fontsize=8)
        lines.append(f"{name:44} {'#' * round(20 * start / widest):20} {start:g}")
    axes.set(xlim=(0, widest * 1.08), ylim=(len(rows) - 0.4, -0.6), yticks=range(len(rows)))
    axes.set_yticklabels([name for name, _ in rows], fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(lines[0], fontsize=9, weight="bold", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return Drawing(figure, "\n".join(lines))


def timeline(records: Sequence[Record], title: str) -> Drawing:
    """What each rank issued, in order: a lane per rank, a box per collective, those missing or at odds marked.

    The n-th boxes of the ranks stand below each other. With a single group these are the ones that meet.
    """
    shown, difference = window(records), first_difference(records)
    figure, axes = canvas(len(records), 5 * len(shown) + 8, title)
    for rank, record in enumerate(records):
        odd, end = difference.steps.get(rank, -1) if difference else -1, len(record.calls)
        for x, step in enumerate(shown):
            corner = (5 * x + 0.06, rank * LANE + 0.04)
            if step < end:
                backward, call = record.calls[step].phase == "backward", record.calls[step]
                text = f"{call.operation}\n{call.label}".strip()
                draw_box(axes, 5 * x, rank, 5, text, COLOURS[backward], backward, False)
            elif odd >= 0:
                axes.text(5 * x + 2.5, rank * LANE + 0.5, "missing", ha="center", va="center", fontsize=7, color=RED)
                _rectangle(axes, corner, (4.88, 0.92), fill=False, ec=RED, lw=1.2, ls="--")
            if step == odd:
                line = "-" if step < end else "--"
                _rectangle(axes, corner, (4.88, 0.92), fill=False, ec=RED, lw=2.6, ls=line)
        word = record.end.removeprefix("raised: ").partition(":")[0]
        waits = record.calls and record.end.startswith(f"unfinished: in {record.calls[-1].operation}")
        style = {"va": "center", "fontsize": 7, "color": GREY if word in ("returned", "goes on") else RED}
        axes.text(5 * len(shown) + 0.3, rank * LANE + 0.5, "waits in its last one" if waits else word, style)
    key = TIMELINE_KEY + "   boxes below each other meet" * (len({c.members for r in records for c in r.calls}) < 2)
    axes.text(0, len(records) * LANE + 0.1, key, fontsize=6.5, va="top", color=GREY)
    return Drawing(figure, f"{title}\n{table(records)}")


def show_error(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call ``fn`` and print the type and first line of what it raises; an ``AssertionError`` if it raises nothing."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    else:
        raise AssertionError(f"{fn} was expected to raise, and did not")


def _letter(sample: int) -> str:
    """A, B, ..., Z, then A', B', ..."""
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[sample % 26] + "'" * (sample // 26)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure((width, height))


def _rectangle(axes: "Axes", corner: tuple[float, float], size: tuple[float, float], **style: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, *size, **style))


def canvas(lanes: int, columns: int, title: str) -> "tuple[Figure, Axes]":
    """Axes whose unit is one box, with room for the rank names on the left and the key below."""
    unit = min(0.42, 8.4 / (columns + 2.2))
    width, left = max(columns + 2.2, 7.6 / unit), max(1.8, 0.6 / unit)
    figure = _figure(width * unit, (lanes * LANE + 1.7) * 0.42)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-left, width - left), ylim=(lanes * LANE + 0.5, -1.2))
    axes.axis("off")
    axes.text(0, -0.65, title, fontsize=9, va="bottom", weight="bold")
    for rank in range(lanes):
        axes.text(-0.3, rank * LANE + 0.5, f"rank {rank}", ha="right", va="center", fontsize=8)
    return figure, axes


def draw_box(axes: "Axes", x: float, lane: int, width: int, text: str, face: str, hatch: bool, frame: bool) -> None:
    """A box of ``width`` units with its text; a hatched one's text stands on white."""
    corner, size = (x + 0.06, lane * LANE + 0.04), (width - 0.12, 0.92)
    _rectangle(axes, corner, size, fc=face, ec="#444444", lw=0, hatch="////" if hatch else "")
    _rectangle(axes, corner, size, fill=False, ec="black" if frame else "#777777", lw=2.2 if frame else 0.6)
    back = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.85} if hatch else None
    axes.text(x + width / 2, lane * LANE + 0.5, text, ha="center", va="center", fontsize=7, bbox=back if text else None)
