"""Headless Chromium for the tests that look at pages, and how to end what they started."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser that is closed at the end, so that no event loop is left to the tests that follow."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("no browser: Playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no browser: Chromium is not installed")
    flags = ["--disable-gpu", "--disable-dev-shm-usage"] + ["--no-sandbox"] * (os.getuid() == 0)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


def free_port() -> int:
    """A port that nobody listens on, of those that the system gives nobody who asks for just any, as ranks do."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(15)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
