"""The bounds at which the rules for tile sizes change, and how they split inputs and columns."""

from __future__ import annotations

from lora_backends.sgmv.tiles.sizes import BatchShape, parts

PREFILL_TOKENS = {16: 512, 32: 2048, 64: 300}  # fewest tokens of a prefill, by tokens per tile
LONE_TOKENS = 512  # from so many tokens on, none counts as alone in its slot
FEW_ROWS = 8  # of the grid: fewer leave most of an H200 idle
MANY_ROWS = 32  # of the grid: about a quarter of an H200's multiprocessors
SHORT_INPUT = 2048  # in_features below which most small batches sum in one order
LONG_INPUT = 8192  # in_features from which more parts are faster
WIDE_OUTPUT = 16384  # out_features from which reading another plane of h costs too much
SHARED_BYTES = 128 * 1024  # shared memory for the loads in flight
_MOST_PLANES = 32  # of h: the expand reads them all back


def is_prefill(batch: BatchShape) -> bool:
    """Return whether a batch takes the sizes of a prefill."""
    return batch.num_tokens >= PREFILL_TOKENS[max(16, min(64, batch.tile_tokens))]


def chunks_up_to(most: int) -> int:
    """Return the largest power of two from 1 to 8 that does not exceed `most`."""
    return next((chunks for chunks in (8, 4, 2) if chunks <= most), 1)


def planes_of(in_features: int, most: int) -> int:
    """Return the number of parts of the inputs, up to `most`: the planes of h."""
    steps, most = max(1, in_features // 256), min(most, _MOST_PLANES)
    # the largest number of equal parts, in steps of 256, if that is more than half of `most`
    equal = max(split for split in range(1, max(1, most) + 1) if steps % split == 0)
    if 2 * equal > most or in_features < SHORT_INPUT:
        return equal
    # unequal, as for 11008: 43 steps, a prime
    return parts(in_features, 256, most)
