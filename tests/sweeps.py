"""What the sweeps draw, and how many cases they have looked at; ``HYPOTHESIS_PROFILE=nightly`` draws many more."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from refimpl.layout import Batch, Layout

CASES: Counter[str] = Counter()

settings.register_profile("default", max_examples=300, deadline=None, derandomize=True)  # the same ones in each run
settings.register_profile("nightly", max_examples=4_000, deadline=None, print_blob=True)  # others each time


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Up to five samples, many of them shorter than the ranks are many."""
    totals = draw(st.lists(st.integers(0, 3) | st.integers(0, 23), max_size=5))
    return Batch(totals, [draw(st.integers(0, max(0, total - 1))) for total in totals])


@st.composite
def layouts(draw: st.DrawFn, of: Batch | None = None, cp_size: int | None = None) -> Layout:
    """Any way to lay out a batch; of a given one, over a given number of ranks, if these are named."""
    batch = draw(batches()) if of is None else of
    options: dict[str, Any] = {}
    qkv_format = draw(st.sampled_from(["thd", "bshd"]))
    if qkv_format == "thd":
        options["pad_multiple"] = draw(st.integers(1, 4))
    elif draw(st.booleans()):
        options["max_seq_len"] = max(batch.total_lengths, default=0) + draw(st.integers(0, 5))
    cp_split = draw(st.sampled_from(["zigzag", "contiguous"]))
    return Layout(batch, qkv_format, cp_split, draw(st.integers(1, 5)) if cp_size is None else cp_size, **options)
