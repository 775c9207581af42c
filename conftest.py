"""One summary of what was skipped, and a red run if the reason is not on the list; how many cases the sweeps saw."""

import os
import signal
from typing import Any

import pytest
from browser import free_port
from hypothesis import settings
from jupyter_client.connect import LocalPortCache
from sweeps import CASES

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

ALLOWED_SKIPS = ("no browser", "no GPU", "no Triton outside Linux")
"""The only reasons for which a check may be skipped; anything else fails the run."""


def pytest_configure() -> None:
    """``timeout`` or CI may end a run: servers, kernels and browsers that it started must end too."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough, and a whole process group may get several
        pytest.exit("ended by SIGTERM")  # where others run the tests, this interrupts them

    signal.signal(signal.SIGTERM, end)
    # A kernel listens only a second after its ports were chosen: ranks of other tests must not get them meanwhile.
    LocalPortCache.find_available_port = lambda *_: free_port()  # type: ignore[method-assign]


def _skips(config: pytest.Config) -> list[tuple[str, str]]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) + reporter.stats.get("xfailed", [])
    return [
        (r.nodeid, r.longrepr[2].removeprefix("Skipped: ") if isinstance(r.longrepr, tuple) else "expected failure")
        for r in reports
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """nbval gives up on a cell's output after 5 s of silence; ranks may take longer on a busy machine."""
    for item in items:
        if hasattr(item, "output_timeout"):
            item.output_timeout = 60


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cases"] = dict(CASES)
    elif any(not reason.startswith(ALLOWED_SKIPS) for _, reason in _skips(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of two processes that share the tests has ended: what it counted is ours."""
    CASES.update(getattr(node, "workeroutput", {}).get("cases", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if CASES:
        counts = ", ".join(f"{name} {count:,}" for name, count in CASES.items())
        terminalreporter.section(f"cases of the sweeps: {sum(CASES.values()):,}")
        terminalreporter.line(counts)
    skips = _skips(config)
    terminalreporter.section(f"skipped: {len(skips)}")
    for where, reason in skips:
        verdict = "" if reason.startswith(ALLOWED_SKIPS) else "   NOT ON THE LIST OF ALLOWED REASONS: the run fails"
        terminalreporter.line(f"{where}: {reason}{verdict}")
