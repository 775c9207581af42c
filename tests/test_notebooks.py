"""Hygiene of the notebooks, which nbval cannot see: a notebook without counts would pass it with nothing compared."""

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parent.parent
PATHS = sorted((TOP / "notebooks").glob("*.ipynb"))
FORBIDDEN_TEXT = {
    "a bare tensor": r"tensor\([\[\d-]",
    "a path": r"/(root|home|tmp|usr|work|Users)/|site-packages|\.venv",
    "an address": r"0x[0-9a-f]{6,}",
    "a time": r"\d(\.\d+)? ?(ms|µs|sec|seconds)\b",
}


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def lines(cell: dict[str, Any]) -> list[str]:
    return [line for line in source(cell).splitlines() if line.strip()]


def stored_texts(cell: dict[str, Any]) -> Iterator[str]:
    for output in cell["outputs"]:
        yield "".join(output.get("text", ""))
        yield "".join(output.get("data", {}).get("text/plain", ""))


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


def test_the_notebooks_are_there() -> None:
    assert [path.stem[:2] for path in PATHS] == sorted({path.stem[:2] for path in PATHS})
    assert {"00_map", "01_layouts", "03_context_parallel", "04_the_none_bug"} <= {path.stem for path in PATHS}


def test_it_was_run_from_top_to_bottom(path: Path) -> None:
    notebook = load(path)
    assert [cell["execution_count"] for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def test_outputs_are_text_and_png(path: Path) -> None:
    for cell in code(load(path)):
        for output in cell["outputs"]:
            assert output["output_type"] != "error", source(cell)
            assert output.get("name") != "stderr", source(cell)
            assert set(output.get("data", {})) <= {"text/plain", "image/png"}, source(cell)
        for text in stored_texts(cell):
            for what, pattern in FORBIDDEN_TEXT.items():
                assert not re.search(pattern, text), f"{what} in the output of: {source(cell)}"


def test_ids_are_readable_and_unique(path: Path) -> None:
    ids = [cell["id"] for cell in load(path)["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(
        re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) and not re.fullmatch("[0-9a-f]{8}", name) for name in ids
    ), ids


def test_it_is_small_and_calls_the_package(path: Path) -> None:
    cells = code(load(path))
    assert path.stat().st_size < 400_000
    assert sum(len(lines(cell)) for cell in cells) <= 200
    assert max(len(lines(cell)) for cell in cells) <= 20
    assert statistics.median(len(lines(cell)) for cell in cells) <= 5


def test_code_and_prose_take_turns(path: Path) -> None:
    kinds = "".join(cell["cell_type"][0] for cell in load(path)["cells"])
    assert kinds.startswith("m")
    assert "ccccc" not in kinds


def test_the_first_screen_says_what_and_how_long(path: Path) -> None:
    first = source(load(path)["cells"][0])
    assert first.startswith(f"# {path.stem[:2]} ")
    assert re.search(r"\*\*You will\b", first)
    assert re.search(r"about \d+ minutes", first)


def test_tags_are_known(path: Path) -> None:
    for cell in load(path)["cells"]:
        assert set(cell["metadata"]) <= {"tags"}
        assert set(cell["metadata"].get("tags", [])) <= {"gpu", "nbval-ignore-output"}


def test_links_lead_somewhere_and_pictures_have_a_text(path: Path) -> None:
    for cell in load(path)["cells"]:
        if cell["cell_type"] == "markdown":
            for image, text, target in re.findall(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", source(cell)):
                assert text or not image, f"a picture without a text: {target}"
                if not target.startswith(("https://", "#")):
                    assert (path.parent / target.split("#")[0]).exists(), target


def test_predictions_are_not_answered(path: Path) -> None:
    """A reader's guess stays theirs: the stored notebook asks, and its check says so."""
    text = "\n".join(source(cell) for cell in code(load(path)))
    assert all(value == "None" for value in re.findall(r"^prediction = (\w+)", text, re.MULTILINE))
