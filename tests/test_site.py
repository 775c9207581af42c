"""The site of ``make site``: links lead somewhere, pages follow each other, nothing comes from another host."""

import functools
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from browser import chromium
from bs4 import BeautifulSoup

TOP = Path(__file__).parent.parent
NOTEBOOKS = sorted((TOP / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as ``make site`` does, elsewhere."""
    out = tmp_path_factory.mktemp("site")
    where = f"-d {out / 'doctrees'} . {out / 'site'}"
    recipe = next(line for line in (TOP / "Makefile").read_text().splitlines() if "-m sphinx" in line)
    options = recipe.split("-m sphinx")[1].replace("-d build/doctrees . build/site", where).split()
    done = subprocess.run([sys.executable, "-m", "sphinx", *options], cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, BeautifulSoup]:
    return {path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in own(site)}


def own(site: Path) -> list[Path]:
    """Our pages; the theme's templates lie in ``_static``."""
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


def targets(page: BeautifulSoup) -> Iterator[str]:
    for name, attribute in (("a", "href"), ("img", "src"), ("link", "href"), ("script", "src")):
        yield from (tag[attribute] for tag in page.find_all(name) if tag.get(attribute))


def test_every_link_and_picture_leads_somewhere(pages: dict[Path, BeautifulSoup]) -> None:
    names = {path: {tag["id"] for tag in page.find_all(id=True)} for path, page in pages.items()}
    checked = 0
    for path, page in pages.items():
        for target in targets(page):
            address, fragment = urldefrag(target)
            if urlsplit(target).scheme or target == "#":
                continue
            file = (path.parent / unquote(urlsplit(address).path)).resolve() if address else path
            assert file.is_file(), f"{path.name}: {target}"
            assert not fragment or file not in names or unquote(fragment) in names[file], f"{path.name}: {target}"
            checked += 1
    assert checked > 1000


def test_no_link_of_the_prose_was_lost(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    """A link to a notebook or to a file of code leads to its page; only C, which shares its name, is handed out."""
    links = {tag["href"] for tag in pages[site / "README.html"].find("article").find_all("a")}
    assert {f"notebooks/{path.stem}.html" for path in NOTEBOOKS} <= links
    assert {"refimpl/layout.html", "notebooks/adapters.html", "CONTRIBUTING.html"} <= links
    handed_out = [link for page in pages.values() for link in targets(page) if "_downloads" in link]
    assert handed_out
    assert {link.rsplit("/", 1)[1] for link in handed_out} == {"kernels.c"}


def test_the_notebooks_follow_each_other(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    order = ["../README.html", *(f"{path.stem}.html" for path in NOTEBOOKS)]
    for before, path, after in zip(order, NOTEBOOKS, [*order[2:], None], strict=False):
        page = pages[site / "notebooks" / f"{path.stem}.html"]
        assert page.find("a", class_="left-prev")["href"] == before
        assert after is None or page.find("a", class_="right-next")["href"] == after


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_holds_the_stored_outputs(site: Path, pages: dict[Path, BeautifulSoup], path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    page = pages[site / "notebooks" / f"{path.stem}.html"]
    texts = [tag.get_text().rstrip() for tag in page.select(".cell_output .stream pre, .cell_output .stream")]
    for output in outputs:
        if output["output_type"] == "stream":
            assert "".join(output["text"]).rstrip().lstrip("\n") in [text.lstrip("\n") for text in texts]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    names = [output["metadata"]["image/png"]["alt"] for output in pictures]
    assert [image["alt"] for image in page.select(".cell_output img")] == names


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.browser
def test_pages_open_without_an_error_and_ask_no_other_host(site: Path, address: str) -> None:
    with chromium() as browser:
        page = browser.new_page()
        errors: list[str] = []
        asked: set[str] = set()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.add(request.url))
        for path in own(site):
            page.goto(address + path.relative_to(site).as_posix())
            sizes = page.evaluate(
                "[...document.querySelectorAll('article img')].map(i => i.complete && i.naturalWidth)"
            )
            assert all(sizes), path.name
            wide = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
            assert not wide, f"{path.name} is wider than the window"
            cut_off = "[...document.querySelectorAll('.cell_output pre')].some(e => e.scrollWidth > e.clientWidth)"
            assert not page.evaluate(cut_off), f"{path.name}: an output is cut off"
        page.goto(address + "search.html?q=zigzag")
        page.wait_for_selector("#search-results li a")
        found = page.locator("#search-results li a").evaluate_all("links => links.map(link => link.href)")
        assert any("03_context_parallel.html" in link for link in found)
        for mode in ("dark", "light"):
            page.locator(".theme-switch-button:visible").first.click()
            page.locator(f".theme-change-button[data-mode={mode}]:visible").first.click()
            assert page.evaluate("document.documentElement.dataset.theme") == mode
    assert errors == []
    assert {url for url in asked if not url.startswith((address, "data:"))} == set()
