"""The sliders: what they show for values that a reader may choose, and that a change is drawn at once."""

from typing import Any

import ipywidgets
import pytest

import interactive
from refimpl.layout import Batch, Layout
from refimpl.recorder import Call, Record


def test_what_a_rank_holds() -> None:
    layout = Layout(Batch([8], [4]), cp_size=2)  # rank 0 holds 0 1 6 7, of which 3 to 6 score
    assert interactive.holds(layout, 0) == "rank 0 holds 4 tokens in 4 rows; scoring a response: A6"
    assert interactive.holds(layout, 1) == "rank 1 holds 4 tokens in 4 rows; scoring a response: A3 A4 A5"
    late = Layout(Batch([8, 8], [2, 2]), cp_split="contiguous", cp_size=4)
    assert interactive.holds(late, 0) == "rank 0 holds 4 tokens in 4 rows; scoring a response: none"


@pytest.mark.parametrize("layout", interactive.LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [[(2, 5), (1, 2), (3, 7)], [(1, 1), (0, 0), (1, 10)], [(10, 10)] * 3])
def test_any_choice_is_drawn(layout: str, cp_size: int, lengths: Any, capsys: pytest.CaptureFixture[str]) -> None:
    interactive.view(layout, cp_size, cp_size - 1, **dict(zip("ABC", lengths, strict=True)))
    said = capsys.readouterr().out
    assert f"rank {cp_size - 1} |" in said
    assert said.splitlines()[-1].startswith(f"rank {cp_size - 1} holds ")


def test_a_sample_without_a_prompt_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    interactive.view("thd, zigzag", 2, 0, A=(0, 3))
    assert capsys.readouterr().out.startswith("ValueError: sample 0: total_length 3, response_length 3: no prompt")


def by_name(box: ipywidgets.VBox, name: str) -> Any:
    return next(child for child in box.children if getattr(child, "description", "") == name)


def test_the_sliders_redraw(capsys: pytest.CaptureFixture[str]) -> None:
    box = interactive.explore()
    assert "thd, zigzag CP, cp_size 2" in capsys.readouterr().out
    by_name(box, "layout").value = "bshd, contiguous"
    by_name(box, "cp_size").value = 4
    by_name(box, "rank").value = 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("rank 3 holds ")
    by_name(box, "cp_size").value = 2  # the rank goes with it
    assert by_name(box, "rank").value == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("rank 1 holds ")


def test_the_stepper(capsys: pytest.CaptureFixture[str]) -> None:
    one = Call("all_reduce", "sum", (3,), "float32", "cp", (0, 1), "forward", "log-prob")
    two = Call("all_reduce", "sum", (3,), "float32", "cp", (0, 1), "backward", "entropy")
    records = [Record((one,)), Record((one, two), "unfinished: in all_reduce")]
    box = interactive.stepper(records, "two ranks")
    said = capsys.readouterr().out
    assert "two ranks: after 1" in said
    assert "first difference" not in said
    assert "goes on" in said
    by_name(box, "collectives").value = 2
    said = capsys.readouterr().out
    assert "first difference" in said
    assert "unfinished" in said
