"""For ``make coverage``: a rank saves what it has measured before each word to its parent, who may then kill it."""

from multiprocessing.connection import Connection
from typing import Any

from coverage import Coverage
from coverage.plugin_support import Plugins


def coverage_init(plugins: Plugins, options: dict[str, Any]) -> None:
    """Coverage calls this in each process that it measures; the fork server's children inherit what it does there."""
    send = Connection.send

    def save_and_send(self: Connection, word: Any) -> None:
        if (measured := Coverage.current()) is not None:
            measured.save()
        send(self, word)

    if send.__name__ != save_and_send.__name__:
        Connection.send = save_and_send  # type: ignore[method-assign]
