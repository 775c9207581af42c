"""The site of ``make site``: Sphinx reads the README, the notebooks with the outputs they hold, and the code itself."""

import json
from pathlib import Path
from shutil import copyfile
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.parsers import Parser

TOP = Path(__file__).parent.parent
CONTENTS = """
```{toctree}
:hidden:
:caption: Notebooks
:glob:

notebooks/0*
```

```{toctree}
:hidden:
:caption: The code
:glob:

refimpl/*
```

```{toctree}
:hidden:
:caption: Beside the notebooks
:glob:

notebooks/[a-z]*
tests/*
```

```{toctree}
:hidden:
:caption: Carrying on

CONTRIBUTING
```
"""
HEAD = """
<link rel="icon" href="data:,">
<style>
    .bd-header { display: none !important; }
    .bd-main .bd-content .bd-article-container:only-child { max-width: 72rem; }
    .bd-content pre { font-size: 0.72rem; }
    .bd-content .cell_output pre { white-space: pre-wrap; overflow-wrap: anywhere; }
    html[data-theme] .bd-content img { background: #fff !important; padding: 0 !important; }
</style>
"""
"""No request for an icon; a page of code takes the whole width; long outputs are wrapped, as in JupyterLab; pictures
have no frame in the dark."""

project = "Log-probs and entropy over ranks"
author = "the authors of refimpl"
root_doc = "README"
include_patterns = ["*.md", "notebooks/*", "refimpl/*.py", "tests/test_model.py"]
exclude_patterns = ["notebooks/conf.py", "**/.*", "**/__pycache__"]
extensions = ["myst_nb"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".py": "python"}
html_use_index = False
html_domain_indices = False
nb_execution_mode = "off"
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_title = "Log-probs and entropy over ranks"
html_copy_source = False
html_context = {"default_mode": "auto", "head": HEAD}  # here, so that all pages are written anew if it changes
html_theme_options = {
    "content_footer_items": [],
    "navbar_persistent": [],
    "use_download_button": False,
    "use_fullscreen_button": False,
}


class PythonFile(Parser):
    """A page for a file of code, so that a link to the file leads to it."""

    supported = ("python",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """A title, and the file in colours."""
        name = Path(document["source"]).relative_to(TOP).as_posix()
        page = nodes.section(ids=["file"], names=["file"])
        page += nodes.title(text=name)
        page += nodes.literal_block(inputstring, inputstring, language="python")
        document += page


def _add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == root_doc:
        source[0] += CONTENTS


def _name_pictures(app: Sphinx, docname: str, source: list[str]) -> None:
    """A picture's text is kept with the output; myst-nb looks for it with the cell."""
    if app.env.doc2path(docname).suffix == ".ipynb":
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    cell["metadata"]["mystnb"] = {"image": {"alt": output["metadata"]["image/png"]["alt"]}}
        source[0] = json.dumps(notebook)


def _add_head(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    context["metatags"] = context.get("metatags", "") + context["head"]


def _add_index(app: Sphinx, exception: Exception | None) -> None:
    if exception is None:
        copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """What Sphinx calls first."""
    app.add_source_parser(PythonFile)
    app.connect("source-read", _add_contents)
    app.connect("source-read", _name_pictures)
    app.connect("html-page-context", _add_head)
    app.connect("build-finished", _add_index)
