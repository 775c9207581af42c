"""The fork server that ranks come from. Needs neither torch nor megatron-core in this process."""

from multiprocessing import forkserver


def start() -> None:
    """Start the server unless it runs, and do not wait for it: it imports while the caller goes on."""
    forkserver.set_forkserver_preload(["refimpl._rank", "refimpl._megatron"])
    forkserver.ensure_running()
