"""What holds for the test run itself."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
LONG = """
    import pathlib, time
    import pytest

    HERE = pathlib.Path(__file__).parent

    @pytest.fixture
    def server():
        (HERE / "started").touch()
        yield
        (HERE / "ended").touch()

    def test_long(server):
        time.sleep(60)
"""


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_that_is_ended_ends_what_it_started(tmp_path: Path, processes: str) -> None:
    """As ``timeout`` and CI do it; a server of JupyterLab would go on for ever."""
    (tmp_path / "test_long.py").write_text(textwrap.dedent(LONG))
    options = ["-c", str(TOP / "pyproject.toml"), "-p", "conftest", "-n", processes]
    paths = os.pathsep.join([str(TOP), str(TOP / "tests"), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "-m", "pytest", *options, str(tmp_path)], os.environ | {"PYTHONPATH": paths}
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=30)
    assert (tmp_path / "ended").exists(), said
    assert "ended by SIGTERM" in said
