"""What the ranks must hold, derived by cutting plain lists: it knows no spans and shares no code with refimpl."""

from functools import lru_cache

from refimpl.layout import Layout

Cell = tuple[int, int] | None  # (sample, position), or None for padding


def cut(line: list[Cell], parts: int) -> list[list[Cell]]:
    """Pad a list to a multiple of ``parts`` and cut it in equal parts."""
    while len(line) % parts:
        line = [*line, None]
    size = len(line) // parts
    return [line[k * size : (k + 1) * size] for k in range(parts)]


@lru_cache(maxsize=64)
def rows(layout: Layout) -> list[list[Cell]]:
    """For each rank, what each row of its buffer holds."""
    cp = layout.cp_size
    samples: list[list[Cell]] = [[(i, p) for p in range(n)] for i, n in enumerate(layout.batch.total_lengths)]
    if layout.qkv_format == "bshd":
        width = max(map(len, samples), default=0) if layout.max_seq_len is None else layout.max_seq_len
        samples = [sample + [None] * (width - len(sample)) for sample in samples]
    per_rank: list[list[Cell]] = [[] for _ in range(cp)]
    if layout.cp_split == "zigzag" and cp > 1:
        for sample in samples:
            chunks = cut(sample, 2 * cp)
            for rank in range(cp):
                per_rank[rank] += chunks[rank] + chunks[2 * cp - 1 - rank]
    elif layout.qkv_format == "thd":
        stream = [cell for sample in samples for cell in sample]
        while len(stream) % (cp * layout.pad_multiple):
            stream.append(None)
        per_rank = cut(stream, cp)
    else:
        for sample in samples:
            for rank, part in enumerate(cut(sample, cp)):
                per_rank[rank] += part
    for lane in per_rank:
        while len(lane) % layout.pad_multiple:
            lane.append(None)
    return per_rank


def response(layout: Layout, rank: int, sample: int) -> list[tuple[int, int]]:
    """(row, position) of the rows of one rank that score a response token of one sample, in rising position."""
    total, count = layout.batch.total_lengths[sample], layout.batch.response_lengths[sample]
    scored_by = [token - 1 for token in range(total - count, total)]
    held = [(cell[1], row) for row, cell in enumerate(rows(layout)[rank]) if cell and cell[0] == sample]
    return [(row, position) for position, row in sorted(held) if position in scored_by]
