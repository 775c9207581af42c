"""Pictures: their text twins by hand, the drawn text against the oracle, nothing cut off, files in step."""

import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

import rl
from refimpl import diagrams
from refimpl.diagrams import Drawing, pieces, show_error, strips
from refimpl.layout import Batch, Layout

FIGURES = Path(__file__).parent.parent / "figures"
sys.path.insert(0, str(FIGURES))
import draw  # noqa: E402

BATCH = Batch([5, 2, 7], [3, 1, 4])
LAYOUTS = [
    Layout(BATCH, qkv_format, cp_split, cp_size)  # type: ignore[arg-type]
    for qkv_format in ("thd", "bshd")
    for cp_split in ("zigzag", "contiguous")
    for cp_size in (1, 2, 4)
]


def test_bars_and_curves_by_hand() -> None:
    picture = diagrams.bars([("all", [2.0, 1.0, 1.0]), ("half", [2.0])], "memory", "buffers")
    assert str(picture).splitlines() == [
        "memory, in buffers",
        f"all{' ' * 42}{'#' * 20} 4",
        f"half{' ' * 41}{'#' * 10}{' ' * 11}2",
    ]
    (axes,) = picture.figure.axes
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 2), (2, 1), (3, 1), (0, 2)]  # type: ignore[attr-defined]
    picture = rl.curves({"reward": {"ours": [0.0, 1, 2, 3, 4, 5], "theirs": [1.0] * 6}})
    assert str(picture).splitlines() == [
        "reward     ours       first five steps   2.00   last five   3.00",
        "reward     theirs     first five steps   1.00   last five   1.00",
    ]
    assert [list(line.get_ydata()) for line in picture.figure.axes[0].lines] == [[0, 1, 2, 3, 4, 5], [1] * 6]  # type: ignore[arg-type]


def test_a_notebook_shows_the_picture_and_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("IPython.display.display", shown.append)
        strips(Layout(BATCH))._ipython_display_()
    assert shown[0].data.startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("thd, no CP\nrank 0 | a0 [a1]")


def test_text_twins_by_hand() -> None:
    assert str(strips(Layout(BATCH))).splitlines()[:2] == [
        "thd, no CP",
        "rank 0 | a0 [a1][A2][A3] A4 [b0] B1  c0  c1 [c2][C3][C4][C5] C6",
    ]
    assert str(strips(Layout(Batch([3, 11], [2, 1]), "bshd", cp_size=2))).splitlines()[:3] == [
        "bshd, zigzag CP, cp_size 2",
        "rank 0 |[a0] [A1]  A2   .    .    .    b0   b1   b2  [b9]  B10  .",
        "rank 1 | .    .    .    .    .    .    b3   b4   b5   b6   b7   b8",
    ]
    assert str(strips(Layout(Batch([], [])))).splitlines()[:2] == ["thd, no CP", "rank 0 |"]
    held = [[None, torch.ones(2, requires_grad=True)], [torch.ones(1), torch.ones(0)], []]
    assert str(pieces(held, "title")).splitlines() == [
        "title",
        "rank 0 | A: None             B: 2 rows, grad",
        "rank 1 | A: 1 row, no grad   B: 0 rows, no grad",
        "rank 2 | (an empty list)",
    ]


def drawn(drawing: Drawing) -> list[tuple[float, float, str]]:
    return [(text.get_position()[0], text.get_position()[1], text.get_text()) for text in drawing.figure.axes[0].texts]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_picture_shows_what_each_row_holds(layout: Layout) -> None:
    texts = drawn(strips(layout))
    for rank, lane in enumerate(oracle.rows(layout)):
        middle = rank * diagrams.LANE + 0.5
        labels = {x - 0.5: text for x, y, text in texts if y == middle and text and not text.startswith("rank")}
        assert labels == {row: f"{'ABC'[cell[0]]}{cell[1]}" for row, cell in enumerate(lane) if cell}
        below = {x - 0.5: text for x, y, text in texts if y == rank * diagrams.LANE + 1.06}
        scoring = [(i, row, p) for i in range(3) for row, p in oracle.response(layout, rank, i)]
        assert below == {row: f"→{'ABC'[i]}{p + 1}" for i, row, p in scoring}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_hatching_and_frames(layout: Layout) -> None:
    patches = strips(layout).figure.axes[0].patches
    drawn_prompts = {(round(p.get_x() - 0.06), p.get_y()) for p in patches if p.get_hatch()}
    drawn_frames = {(round(p.get_x() - 0.06), p.get_y()) for p in patches if p.get_linewidth() > 2}
    prompts, frames = set(), set()
    for rank, lane in enumerate(oracle.rows(layout)):
        y = rank * diagrams.LANE + 0.04
        prompt = [total - count for total, count in zip(BATCH.total_lengths, BATCH.response_lengths, strict=True)]
        prompts |= {(row, y) for row, cell in enumerate(lane) if cell and cell[1] < prompt[cell[0]]}
        frames |= {(row, y) for i in range(3) for row, _ in oracle.response(layout, rank, i)}
    assert (drawn_prompts, drawn_frames) == (prompts, frames)


@pytest.mark.parametrize("name", draw.gallery())
def test_nothing_is_cut_off_and_no_text_overlaps(name: str) -> None:
    figure = draw.gallery()[name].figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    extents = [t.get_window_extent(renderer) for t in figure.axes[0].texts if t.get_text()]
    for extent in extents:
        assert extent.x0 >= 0
        assert extent.y0 >= 0
        assert extent.x1 <= figure.bbox.width
        assert extent.y1 <= figure.bbox.height
    for i, one in enumerate(extents):
        assert not any(one.overlaps(other) for other in extents[i + 1 :])


@pytest.mark.parametrize("name", draw.gallery())
def test_the_files_are_what_the_code_draws(name: str) -> None:
    assert (FIGURES / name).read_bytes() == draw.gallery()[name].bytes("svg"), "run: make figures"


def test_no_other_figures_lie_about() -> None:
    assert {path.name for path in FIGURES.glob("*.svg")} == set(draw.gallery())


def test_pictures_are_opaque_and_reproducible() -> None:
    one, other = strips(Layout(BATCH)).bytes("png"), strips(Layout(BATCH)).bytes("png")
    assert one == other
    assert one.startswith(b"\x89PNG")


def test_show_error(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(Batch, [3], [4])
    assert capsys.readouterr().out == "ValueError: sample 0: response_length 4 is more than total_length 3\n"
    with pytest.raises(AssertionError, match="was expected to raise"):
        show_error(Batch, [4], [3])
