"""The house: lint, types, sizes, which file may import which, and versions that agree."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
FILES = sorted((TOP / "refimpl").glob("*.py"))
MAY_IMPORT = {
    "__init__": set(),
    "layout": set(),
    "slicing": {"layout"},
    "kernels": set(),
    "_cpu": set(),
    "entropy": {"_cpu", "kernels", "slicing"},
    "recorder": set(),
    "collectives": {"layout", "recorder"},
    "loss": {"layout"},
    "_server": set(),
    "_megatron": {"recorder"},
    "_rank": {"_megatron", "recorder"},
    "ranks": {"_rank", "_server", "recorder"},
    "model": {"_megatron", "collectives", "entropy", "layout", "ranks", "recorder", "slicing"},
    "history": {"collectives", "entropy", "layout", "ranks", "recorder", "slicing"},
    "diagrams": {"layout", "recorder"},
    "candidate": set(),
    "cases": {"candidate", "diagrams", "history", "layout", "slicing"},
    "check": {"candidate", "cases", "diagrams", "history", "layout", "ranks", "recorder", "slicing"},
    "bench": {"_cpu", "cases", "entropy", "history", "layout", "ranks", "slicing"},
    "__main__": {"_server", "check", "diagrams", "history", "layout", "ranks"},
}
"""A file imports only files above it: no cycles. Nothing imports tests."""


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_lint_format_and_types(command: str) -> None:
    program, *arguments = command.split()
    done = subprocess.run([sys.executable, "-m", program, *arguments], cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def imports(path: Path) -> set[str]:
    """Which of our own files a file imports, and ``tests`` if it does that."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "refimpl":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module}
            found |= {n.split(".")[1] for n in names if n.startswith("refimpl.")} | {n for n in names if "tests" in n}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("refimpl.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_arrows(path: Path) -> None:
    assert imports(path) <= MAY_IMPORT[path.stem]
    above = list(MAY_IMPORT)[: list(MAY_IMPORT).index(path.stem)]
    assert MAY_IMPORT[path.stem] <= set(above)


def test_layout_needs_no_torch() -> None:
    text = (TOP / "refimpl/layout.py").read_text()
    modules = {n.module or "" for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
    modules |= {a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names}
    assert {module.split(".")[0] for module in modules} <= set(sys.stdlib_module_names)


def test_no_branch_on_a_layout_outside_layout() -> None:
    """The format and the split are decided in one file; titles of pictures may name them."""
    for path in FILES:
        if path.stem != "layout":
            tests = [
                n.test for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.If | ast.IfExp | ast.While)
            ]
            for test in tests:
                assert not re.search(r"qkv_format|cp_split|'(zigzag|contiguous|thd|bshd)'", ast.unparse(test)), path


def test_the_package_is_compact() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in FILES}
    assert max(lengths.values()) <= 250, lengths
    assert sum(lengths.values()) <= 2980, lengths  # DESIGN promises 2,500: to be paid back, never raised


def names(path: Path) -> set[str]:
    """The public names that a file defines: functions, classes, their methods, constants."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else []
        found |= {part.name for part in [node, *inside] if isinstance(part, ast.FunctionDef | ast.ClassDef)}
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def test_every_public_name_is_used() -> None:
    """In the package, a notebook, a figure or the README, besides where it is defined. Docstrings are ruff's matter."""
    readers = [*FILES, *(TOP / "notebooks").glob("*.py"), *(TOP / "notebooks").glob("*.ipynb"), TOP / "README.md"]
    words = Counter(word for path in readers for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))
    assert [f"{path.stem}.{name}" for path in FILES for name in sorted(names(path)) if words[name] < 2] == []


def pins() -> dict[str, str]:
    return dict(line.split("==", 1) for line in (TOP / "pins.txt").read_text().splitlines())


def test_environment_yml_is_in_step_with_the_pins() -> None:
    lines = [line.strip() for line in (TOP / "environment.yml").read_text().splitlines()]
    listed = lines[lines.index("- pip:") + 1 :]
    assert listed == [*(f"- {name}=={version}" for name, version in pins().items()), "- -e ."], "run: make pins"
    assert "- python=3.11" in lines


def test_every_dependency_is_pinned_within_its_range() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    exact = {name.lower().replace("_", "-"): version.split(";")[0] for name, version in pins().items()}
    for requirement in map(Requirement, wanted):
        if requirement.name != "refimpl":
            assert requirement.specifier.contains(exact[requirement.name]), requirement
    for package in {name for path in FILES for name in outside(path)}:
        assert package in {Requirement(r).name.replace("-", "_") for r in wanted} | {"megatron", "IPython"}, package


def outside(path: Path) -> set[str]:
    """Third-party packages that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    names |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"refimpl", ""}


def test_no_path_of_one_machine() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True).stdout.split()
    for name in tracked:
        path = TOP / name
        if path.suffix != ".svg" and path.exists():
            text = path.read_text(encoding="utf-8")
            assert str(TOP) not in text, name
            assert str(Path.home()) + "/" not in text, name


def test_the_demo_shows_both_sides() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "refimpl"], capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("raised: TypeError: expected Tensor as element 0 in argument 0, but got NoneType") == 2
    assert done.stdout.count("unfinished: in all_reduce, called by sum_and_cut") == 2
    assert done.stdout.count("returned") == 4


def test_the_benchmark_says_what_it_can_measure() -> None:
    done = subprocess.run([sys.executable, "-m", "refimpl.bench"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "{ranks,entropy,redistribute}" in done.stderr


def test_the_benchmark_runs_on_something_small() -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "refimpl.bench",
        "entropy",
        "--runs",
        "1",
        "--rows",
        "64",
        "--columns",
        "64",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ours, over the logits +\d", done.stdout, re.MULTILINE)) == 2


def test_the_benchmark_counts_collectives() -> None:
    command = [sys.executable, "-m", "refimpl.bench", "redistribute", "--runs", "1", "--cp", "2", "--samples", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^one all-reduce for each key +2 +2 +16 ", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^ours: one all-to-all +1 +1 +8 ", done.stdout, re.MULTILINE), done.stdout
