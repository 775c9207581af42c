"""Run the notebooks and store their outputs: ``make refresh``. The only way in which outputs are written.

``--check`` writes nothing and says which notebooks are stale. Names of notebooks may follow.
"""

import argparse
import copy
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy with fresh outputs, without times or traces of the machine."""
    fresh = copy.deepcopy(notebook)
    fresh.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in fresh.cells:
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if cell.metadata.get("tags") else {})
    NotebookClient(
        fresh,
        timeout=120,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.capture_fd_output=False"],
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    ).execute()
    fresh.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
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
