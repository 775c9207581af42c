"""Hygiene of the notebooks, which nbval cannot see: a notebook without counts would pass it with nothing compared."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refresh import run

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
        tags = set(cell["metadata"].get("tags", []))
        assert tags <= {"gpu", "interactive", "nbval-ignore-output"}
        assert "interactive" not in tags or (cell["outputs"] == [] and "nbval-ignore-output" in tags)


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


# ---------------------------------------------------------------- twice in one kernel, and where nobody may write

FAST = ("00_map", "01_layouts", "03_context_parallel", "09_puzzles")
RERUN = [pytest.param(path, id=path.stem, marks=[] if path.stem in FAST else pytest.mark.nightly) for path in PATHS]


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    """What a cell printed, joined as nbval joins it, and the text of its value and of its pictures."""
    printed = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    shown = ["".join(output["data"].get("text/plain", "")) for output in outputs if "data" in output]
    return [printed, *shown]


@pytest.mark.parametrize("path", RERUN)
def test_a_second_run_in_the_same_kernel_shows_the_same(path: Path) -> None:
    """Every code cell, and then every code cell once more: no cell may lean on what a first run has not yet changed."""
    cells = code(load(path)) * 2
    for number, (cell, (count, outputs)) in enumerate(zip(cells, run(map(source, cells), path.parent), strict=True), 1):
        assert count == number
        if number > len(cells) / 2 and "nbval-ignore-output" not in cell["metadata"].get("tags", []):
            assert texts(outputs) == texts(cell["outputs"]), source(cell)


READ_ONLY = """
import ctypes, os, sys
capabilities = 1, 2, 3  # to write, read and change whatever the permissions say: root's
if os.geteuid() == 0 and sys.platform == "linux":
    assert not any(ctypes.CDLL(None).prctl(24, number, 0, 0, 0) for number in capabilities)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, "-c", '''
import os, sys, pytest
for folder, _, names in os.walk("."):
    assert not os.access(folder, os.W_OK), folder
    assert not any(os.access(os.path.join(folder, name), os.W_OK) for name in names), folder
import refimpl
assert refimpl.__file__.startswith(os.getcwd()), refimpl.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
''', *sys.argv[1:]])
"""


def test_restart_and_run_all_from_a_read_only_checkout(tmp_path: Path) -> None:
    """Real ranks (00 and 02) and compiled C kernels (02), through nbval, by a user who may write nothing there."""
    checkout, home = tmp_path / "checkout", tempfile.mkdtemp()  # short: a socket's path has room for 107 characters
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=TOP, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TOP / name, checkout / name)
    folders = [checkout, *(path for path in checkout.rglob("*") if path.is_dir())]
    environment = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("COVERAGE", "IPYTHON", "JUPYTER", "XDG"))
    }
    environment |= {"HOME": home, "TMPDIR": home, "PYTHONPATH": str(checkout)}
    try:
        for path in checkout.rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        checkout.chmod(0o555)
        notebooks = [f"notebooks/{name}.ipynb" for name in ("00_map", "02_log_prob_and_entropy")]
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, *notebooks],
            cwd=checkout, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        cells = sum(len(code(load(TOP / name))) for name in notebooks)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"\n{cells} passed" in done.stdout
    finally:
        shutil.rmtree(home)
        for folder in folders:
            folder.chmod(0o755)
