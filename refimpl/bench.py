"""Side-by-side measurements: ``python -m refimpl.bench ranks``. They print ratios; no test depends on a time."""

import statistics
import sys
import time
from unittest import mock

from refimpl import ranks


def start_seconds(start_method: str) -> float:
    """Seconds until megatron-core's groups have stood on 4 ranks and all processes are gone again."""
    start = time.perf_counter()
    with mock.patch.object(ranks, "START_METHOD", start_method):
        ranks.run(lambda me: me.rank, tp=2, cp=2, timeout=300)
    return time.perf_counter() - start


def bench_ranks(runs: int = 3) -> None:
    """The fork server against ``spawn``, in turn; its first start happens once and is measured once."""
    seconds = {"forkserver, first start": [start_seconds("forkserver")], "forkserver, later": [], "spawn": []}
    for name in ("forkserver, later", "spawn") * runs:
        seconds[name].append(start_seconds(name.partition(",")[0]))
    print(f"start and end of 4 ranks with megatron-core's groups (tp 2, cp 2), median of {runs} in turn")
    for name, measured in seconds.items():
        ratio = statistics.median(seconds["spawn"]) / statistics.median(measured)
        print(f"{name:28}{statistics.median(measured):7.2f} s{ratio:7.1f} times as fast as spawn")


if __name__ == "__main__":
    if sys.argv[1:] != ["ranks"]:
        sys.exit("usage: python -m refimpl.bench ranks")
    bench_ranks()
