"""Run the notebooks and store their outputs: ``make refresh``. The only way in which outputs are written.

``--check`` writes nothing and says which notebooks are stale. Names of notebooks may follow.
"""

import argparse
import copy
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import run_kernel

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def run(sources: Iterable[str], folder: Path) -> Iterator[tuple[int, list[nbformat.NotebookNode]]]:
    """The count and the outputs of each cell, one after another in a fresh kernel; ``RuntimeError`` if one raises.

    Not by nbclient: beside widgets it misses a reply now and then, and waits for it until the timeout.
    """
    arguments: dict[str, Any] = {"cwd": str(folder), "extra_arguments": ["--IPKernelApp.capture_fd_output=False"]}
    with run_kernel(**arguments) as client:
        for source in sources:
            outputs: list[nbformat.NotebookNode] = []
            hear = partial(_hear, outputs)
            reply = client.execute_interactive(source, output_hook=hear, allow_stdin=False, timeout=240)["content"]
            if reply["status"] != "ok":
                raise RuntimeError("\n".join([source, *reply["traceback"]]))
            yield reply["execution_count"], outputs


def _hear(outputs: list[nbformat.NotebookNode], message: dict[str, Any]) -> None:
    """Keep what a message shows; what is printed piece by piece in one piece."""
    if message["msg_type"] in ("stream", "display_data", "execute_result"):
        output = nbformat.v4.output_from_msg(message)
        if outputs and output.output_type == "stream" and output.name == outputs[-1].get("name"):
            outputs[-1].text += output.text
        else:
            outputs.append(output)


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy with fresh outputs, without times or traces of the machine."""
    fresh = copy.deepcopy(notebook)
    fresh.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in fresh.cells:
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if cell.metadata.get("tags") else {})
    code = [cell for cell in fresh.cells if cell.cell_type == "code"]
    for cell, (count, outputs) in zip(code, run([cell.source for cell in code], NOTEBOOKS), strict=True):
        cell.execution_count, cell.outputs = count, outputs
    for cell in fresh.cells:
        if "interactive" in cell.metadata.get("tags", []):
            cell.outputs = []  # a widget is alive or it is nothing
    nbformat.validate(fresh)
    return fresh


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", help="all of them if none is named")
    options = parser.parse_args()
    stale = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if options.names and path.name not in {Path(name).name for name in options.names}:
            continue
        stored = path.read_text(encoding="utf-8")
        text = nbformat.writes(execute(nbformat.reads(stored, as_version=4))) + "\n"
        if text != stored:
            stale.append(path.name)
            if not options.check:
                path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {'same' if text == stored else 'stale' if options.check else 'written'}")
    sys.exit(options.check and bool(stale))
