"""Every notebook as a reader meets it: the server of ``make lab``, Chromium, Run All Cells, what the page shows.

The copy that the server sees holds no outputs, so what is on the page comes from this run. Pictures of both themes are
left in ``build/screenshots``.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, end, free_port

TOP = Path(__file__).parent.parent
NOTEBOOKS = sorted((TOP / "notebooks").glob("*.ipynb"))
SHOTS = TOP / "build/screenshots"
TALLEST = 12_000
"""Pixels of one screenshot; a longer notebook takes several."""

SETTINGS: dict[str, dict[str, Any]] = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "apputils-extension/themes": {"theme": "JupyterLab Light", "adaptive-theme": False},
}
SHOWN = """async () => {
    const cells = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')];
    await Promise.allSettled([...document.images].map(image => image.decode()));
    return cells.map(cell => {
        const outputs = [...cell.querySelectorAll('.jp-OutputArea-output')];
        const text = stream => outputs.filter(o => o.dataset.mimeType === 'application/vnd.jupyter.' + stream)
            .map(o => o.textContent).join('');
        const pictures = [...cell.querySelectorAll('.jp-OutputArea-output img')].filter(i => i.naturalWidth > 0);
        const count = cell.querySelector('.jp-InputPrompt').textContent;
        return {count, stdout: text('stdout'), stderr: text('stderr'), pictures: pictures.length};
    });
}"""
FINISHED = """() => {
    const counts = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')].map(p => p.textContent);
    const idle = document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle';
    const raised = document.querySelector("[data-mime-type='application/vnd.jupyter.stderr']");
    return idle && counts.every(count => raised ? !count.includes('*') : /\\d/.test(count));
}"""
Lab = Callable[..., Any]


def code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def faults(notebook: dict[str, Any], shown: list[dict[str, Any]]) -> list[str]:
    """What a page shows otherwise than the stored notebook does, a line for each; a tagged cell's text may differ."""
    found = [] if len(shown) == len(code(notebook)) else [f"{len(shown)} cells of {len(code(notebook))}"]
    for number, (cell, seen) in enumerate(zip(code(notebook), shown, strict=False), 1):
        outputs = cell["outputs"]
        text = "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")
        pictures = sum("image/png" in output.get("data", {}) for output in outputs)
        if seen["count"] != f"[{number}]:":
            found.append(f"{cell['id']}: the count is {seen['count']}, not [{number}]:")
        if seen["stderr"]:
            found.append(f"{cell['id']}: an error or a warning: {seen['stderr']}")
        if "interactive" in cell["metadata"].get("tags", []):
            pictures += 1  # of the widget, which is not stored
        if seen["pictures"] != pictures:
            found.append(f"{cell['id']}: {seen['pictures']} pictures are drawn, not {pictures}")
        if seen["stdout"].rstrip() != text.rstrip() and "nbval-ignore-output" not in cell["metadata"].get("tags", []):
            found.append(f"{cell['id']}: the text is\n{seen['stdout']}\nnot\n{text}")
    return found


def without_outputs(notebook: dict[str, Any]) -> str:
    blank = json.loads(json.dumps(notebook))
    for cell in code(blank):
        cell |= {"outputs": [], "execution_count": None}
    return json.dumps(blank)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A function that opens a stored notebook, without its outputs, in the JupyterLab that ``make lab`` starts."""
    home = tmp_path_factory.mktemp("lab")
    tree, settings = home / "tree", home / "settings/@jupyterlab"
    unwanted = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info")
    shutil.copytree(TOP, tree, ignore=unwanted)
    port, token, sockets = free_port(), secrets.token_hex(16), tempfile.mkdtemp("", "lab-", "/tmp")  # of short names
    address = f"http://127.0.0.1:{port}"
    flags = f"--no-browser --ip=127.0.0.1 --port={port} --ServerApp.port_retries=0 --IdentityProvider.token={token}"
    flags += f" --KernelManager.transport=ipc --KernelManager.ip={sockets}/kernel"  # no port that others may get first
    make = ["make", "-o", ".venv/ready", "lab", f"BIN={Path(sys.executable).parent}", f"ARGS={flags}"]
    folders = {"JUPYTERLAB_SETTINGS_DIR": home / "settings", "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces"}
    folders |= {"JUPYTER_CONFIG_DIR": home / "config", "IPYTHONDIR": home / "ipython", "PYTHONPATH": tree}
    environment = os.environ | {name: str(folder) for name, folder in folders.items()}
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(make, cwd=tree, env=environment, stdout=log, stderr=log, start_new_session=True)

    def ask(path: str, method: str = "GET") -> Any:
        headers = {"Authorization": f"token {token}"}
        with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers, method=method)) as answer:
            return json.loads(answer.read() or "null")

    def end_kernel(name: str) -> None:
        with contextlib.suppress(OSError):  # it may be at its end already, and so may the server
            ask(f"/api/kernels/{name}", "DELETE")

    def wait() -> None:
        for _ in range(240):
            try:
                return ask("/api")
            except OSError:
                assert server.poll() is None, (home / "log").read_text()
                time.sleep(0.25)
        raise AssertionError((home / "log").read_text())

    pages: list[Any] = []

    def open_(path: Path) -> Any:
        while pages:
            pages.pop().close()
        for kernel in ask("/api/kernels"):  # in the background: it takes up to three seconds
            threading.Thread(target=end_kernel, args=(kernel["id"],)).start()
        for name, value in SETTINGS.items():
            (settings / name).parent.mkdir(parents=True, exist_ok=True)
            (settings / f"{name}.jupyterlab-settings").write_text(json.dumps(value))
        copy = tree / "notebooks" / path.name
        copy.write_text(without_outputs(json.loads(path.read_text(encoding="utf-8"))))
        pages.append(page := browser.new_page(viewport={"width": 1200, "height": 1000}))
        page.goto(f"{address}/lab/tree/notebooks/{path.name}?token={token}&reset")
        page.wait_for_selector(".jp-StatusBar-TextItem:has-text('| Idle')", timeout=60_000)
        menu(page, "Run", "Run All Cells")
        page.wait_for_function(FINISHED, timeout=120_000, polling=250)
        return page

    try:
        wait()
        yield open_
    finally:
        end(server)
        shutil.rmtree(sockets)


def menu(page: Any, *names: str) -> None:
    """Choose an entry of a menu, by the words that a reader sees."""
    page.locator(".lm-MenuBar-item", has_text=re.compile(f"^{names[0]}$")).click()
    for name in names[1:]:
        page.locator(".lm-Menu-item", has=page.get_by_text(name, exact=True)).last.click()


def resize(page: Any, height: int, done: str) -> None:
    """Give the page another height, and wait until the notebook has followed."""
    page.set_viewport_size({"width": 1200, "height": height})
    panel = page.locator(".jp-Notebook .jp-WindowedPanel-outer").element_handle()
    page.wait_for_function(done, arg=panel, timeout=10_000)


def photograph(page: Any, stem: str) -> None:
    """The whole notebook from top to bottom, in as few pictures as may be."""
    panel = page.locator(".jp-Notebook .jp-WindowedPanel-outer")
    resize(page, 1000, "e => e.clientHeight < 1000")
    full, window = panel.evaluate("e => [e.scrollHeight, e.clientHeight]")
    resize(page, min(full, TALLEST) + 1000 - window, f"e => e.clientHeight >= {min(full, TALLEST)}")
    SHOTS.mkdir(parents=True, exist_ok=True)
    for part, offset in enumerate(range(0, full, TALLEST), 1):
        panel.evaluate("(e, y) => { e.scrollTop = y }", offset)
        page.screenshot(path=SHOTS / f"{stem}-{part}.png")


def by_keys(page: Any, slider: int, key: str, shows: str) -> str:
    """What the page says in the widget after a key is pressed on one of its handles, once ``shows`` is part of it."""
    handle = page.locator(".jupyter-widgets .noUi-handle").nth(slider)
    handle.focus()
    handle.press(key)
    output = page.locator(".jupyter-widgets .jp-OutputArea", has_text=shows).last
    output.wait_for(timeout=30_000)
    return str(output.inner_text())


def move_the_sliders(page: Any) -> None:
    """Lengths, layout, cp_size and rank, each moved as a reader would: handles 0 to 5 are the samples' lengths."""
    said = by_keys(page, 1, "ArrowRight", "A5")  # sample A one token longer: 6 of them, in 8 rows with its padding
    assert "B2" not in said
    by_keys(page, 6, "ArrowRight", "cp_size 3")
    by_keys(page, 7, "ArrowRight", "rank 1 holds")
    by_keys(page, 7, "ArrowRight", "rank 2 holds")  # which was not there with cp_size 2
    page.locator(".jupyter-widgets button", has_text="bshd, contiguous").click()
    page.wait_for_selector(".jupyter-widgets .jp-OutputArea:has-text('bshd, contiguous CP, cp_size 3')")
    by_keys(page, 2, "ArrowLeft", "ValueError: sample 1: total_length 2, response_length 2: no prompt")


def move_the_stepper(page: Any) -> None:
    said = [by_keys(page, 0, "ArrowRight", f"after {step}") for step in (2, 3, 4)]
    assert "first difference" not in said[0]
    assert "first difference" in said[1]  # the third call: backward of log-prob beside that of the entropy


def follow_a_link(page: Any) -> None:
    page.get_by_role("link", name="refimpl/layout.py").first.click()
    page.wait_for_selector(".jp-FileEditor .cm-content:has-text('class Layout')")


MOVES = {
    "01_layouts": follow_a_link,
    "03_context_parallel": move_the_sliders,
    "05_collectives_and_autograd": move_the_stepper,
}


@pytest.mark.browser
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_shows_in_jupyterlab_what_is_stored(lab: Lab, path: Path) -> None:
    page = lab(path)
    shown = page.evaluate(SHOWN)
    page.keyboard.press("Control+b")  # the file browser makes room
    photograph(page, f"{path.stem}-light")
    assert faults(json.loads(path.read_text(encoding="utf-8")), shown) == []
    menu(page, "Settings", "Theme", "JupyterLab Dark")
    page.wait_for_selector("body[data-jp-theme-light='false']", state="attached")
    photograph(page, f"{path.stem}-dark")
    assert page.evaluate(SHOWN) == shown
    tags = [tag for cell in json.loads(path.read_text())["cells"] for tag in cell["metadata"].get("tags", [])]
    assert (page.locator(".jupyter-widgets").count() > 0) == ("interactive" in tags)
    assert "interactive" not in tags or path.stem in MOVES
    if path.stem in MOVES:
        MOVES[path.stem](page)


BROKEN = {
    "raises": ("1 / 0", []),
    "draws-nothing": ("pass", [{"output_type": "display_data", "data": {"image/png": ""}, "metadata": {}}]),
    "says-something-else": ("print('no')", [{"output_type": "stream", "name": "stdout", "text": "yes"}]),
    "warns": ("import sys; print('careful', file=sys.stderr)", []),
    "is-right": ("print('as stored')", [{"output_type": "stream", "name": "stdout", "text": "as stored\n"}]),
}


@pytest.mark.browser
def test_what_is_wrong_with_a_notebook_is_seen(lab: Lab, tmp_path: Path) -> None:
    """Each fault in a notebook of its own line: the cells go on after one that raises."""
    cells = [
        {"cell_type": "code", "execution_count": 1, "id": name, "metadata": {}, "outputs": outputs, "source": source}
        for name, (source, outputs) in BROKEN.items()
    ]
    cells[0]["metadata"] = {"tags": ["raises-exception"]}
    path = tmp_path / "broken.ipynb"
    notebook = json.loads(NOTEBOOKS[0].read_text(encoding="utf-8")) | {"cells": cells}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    found = faults(notebook, lab(path).evaluate(SHOWN))
    assert [line.split(":")[0] for line in found] == list(BROKEN)[:-1]
    assert "ZeroDivisionError" in found[0]
