"""One rank's tokens, targets and response pieces: each a copy or a slice of the layout's spans.

``tokens`` is, for each sample, its whole prompt and response, ``[L]`` integers. ``T_local`` is ``layout.rows``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from refimpl.layout import Layout

NO_TARGET = -100  # of a row that scores nothing: torch's own default ignore_index


def local_tokens(tokens: Sequence[Tensor], layout: Layout, cp_rank: int, pad_id: int = 0) -> Tensor:
    """The token ids that ``cp_rank`` feeds to the model, ``[T_local]`` in the dtype and on the device of ``tokens``.

    Padding rows hold ``pad_id``.

    Raises:
        ValueError: ``tokens`` are no integers of one dtype, or differ from the layout in number or in a length.
    """
    local = _rows_like(tokens, layout, pad_id)
    for sample, spans in zip(tokens, layout.spans(cp_rank), strict=True):
        for span in spans:
            local[span.rows] = sample[span.position : span.position + span.length]
    return local


def targets(tokens: Sequence[Tensor], layout: Layout, cp_rank: int, *, response_only: bool = False) -> Tensor:
    """The token that each row of ``cp_rank`` scores, ``[T_local]`` int64: the token at position + 1 of its sample.

    It comes from the whole sample and never from a roll of the local buffer, whose next row may hold another chunk,
    another sample or padding. The last position of a sample and padding rows have ``NO_TARGET``; with
    ``response_only``, so has the prompt before P-1.

    Raises:
        ValueError: ``tokens`` are no integers of one dtype, or differ from the layout in number or in a length.
    """
    local = _rows_like(tokens, layout, NO_TARGET, torch.int64)
    held = layout.response_spans(cp_rank) if response_only else layout.spans(cp_rank)
    for sample, spans in zip(tokens, held, strict=True):
        for span in (span.clip(0, len(sample) - 1) for span in spans):
            local[span.rows] = sample[span.position + 1 : span.position + 1 + span.length]
    return local


def response_pieces(buffer: Tensor, layout: Layout, cp_rank: int) -> list[Tensor]:
    """The values of each sample's response that ``cp_rank`` holds: one tensor per sample, never ``None``.

    Where the rank holds nothing of a response the piece is a zero-row slice of ``buffer``: same dtype, same device, and
    with a path to ``buffer``, so that backward gives this rank a gradient of zeros instead of none.

    Args:
        buffer: one value (or one vector) per row, ``[T_local, ...]``.
        layout: how the batch is laid out.
        cp_rank: which rank.

    Returns:
        ``[R_local, ...]`` each, in batch order; over all ranks the value of every response token exactly once.

    Raises:
        ValueError: ``buffer`` does not have the rows that the layout says.
    """
    if buffer.dim() == 0 or len(buffer) != layout.rows:
        got = f"the buffer has shape {list(buffer.shape)}, the layout says {layout.rows} rows"
        raise ValueError(f"cp rank {cp_rank} of {layout.cp_size}: {got}")
    slices = [[buffer[span.rows] for span in spans] for spans in layout.response_spans(cp_rank)]
    return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in slices]


def extract(
    log_prob: Tensor, entropy: Tensor | None, layout: Layout, cp_rank: int
) -> tuple[list[Tensor], list[Tensor] | None]:
    """``response_pieces`` of the log-probs, and aligned with them those of the entropy; no list where it is absent."""
    pieces = response_pieces(log_prob, layout, cp_rank)
    return pieces, None if entropy is None else response_pieces(entropy, layout, cp_rank)


def _rows_like(tokens: Sequence[Tensor], layout: Layout, fill: int, dtype: torch.dtype | None = None) -> Tensor:
    """``[T_local]`` filled with ``fill``, after a check that ``tokens`` is what the layout describes."""
    if len(tokens) != len(layout.batch):
        raise ValueError(f"tokens of {len(tokens)} samples, the layout has {len(layout.batch)}")
    for i, (sample, total) in enumerate(zip(tokens, layout.batch.total_lengths, strict=True)):
        if sample.shape != (total,):
            raise ValueError(f"sample {i}: tokens of shape {list(sample.shape)}, total_length is {total}")
        if sample.dtype != tokens[0].dtype or sample.is_floating_point():
            raise ValueError(f"sample {i}: {sample.dtype} tokens, not integers of one dtype ({tokens[0].dtype})")
    return (tokens[0] if tokens else torch.arange(0)).new_full((layout.rows,), fill, dtype=dtype)
