"""One summary of what was skipped, and a red run if the reason is not on the list; how many cases the sweeps saw."""

import os
import signal

import pytest
from hypothesis import settings
from sweeps import CASES

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

ALLOWED_SKIPS = ("no browser", "no GPU", "no Triton outside Linux")
"""The only reasons for which a check may be skipped; anything else fails the run."""


def pytest_configure() -> None:
    """``timeout`` or CI may end a run: servers, kernels and browsers that it started must end too."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM"))


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
    if any(not reason.startswith(ALLOWED_SKIPS) for _, reason in _skips(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
