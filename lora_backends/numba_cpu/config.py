"""Sizes of blocks and thresholds, each with its source.

The figures were measured on two cores of an Intel Xeon with AVX-512 (2.6 GHz, 2 MiB of L2 cache
a core), where nothing else is said; benchmarks/cpu_cells.py measures what they add up to.
"""

from __future__ import annotations

from typing import NamedTuple

SHRINK_RANKS = 4
"""Rows of A per pass over x: with 4 tokens 16 sums, which leaves 16 of 32 registers to loads."""

MAX_SEGMENT = 64
"""Tokens of a longer run of one slot are cut into segments of this many, so that threads can share
them and a column of y spans no more pages than the first-level TLB holds (64 to 96)."""

FETCH_COST = 6
"""Cost of fetching a block of weights, in units of one token's arithmetic on it: 64 bytes take
1.5 to 4 ns from memory, 16 multiply-adds 0.25 to 0.4 ns. It only balances threads."""

EXPAND_COST = 8
"""Cost of updating 16 elements of y, in columns of B. It only balances threads."""

EXPAND_TILES = 16
"""Groups of 16 rows of B that all tokens of a segment meet before the next: 16 to 64 KiB of B at
rank 16 to 64, which stays in the second-level cache."""

BLEND_BYTES = 1 << 16
"""Bytes of a block's rows of y, as float32, to which a thread adds all adapters before it takes the
next columns."""

BLEND_LONG, BLEND_PIECE = 32, 8
"""Segments of LONG_SEGMENT pairs or more, but fewer than BLEND_LONG, are cut into pieces of at most
BLEND_PIECE; blends have many such. On one core of an AMD EPYC, a segment of 16 pairs took 1.1 to
1.6 times as long as two of 8, and one of 32 1.0 to 1.3 times as long as four."""

LONG_SEGMENT = 16
"""From this many tokens on a segment is long: weights are widened once, into a scratch buffer, not
again for every few tokens."""

LONG_RANKS = 8
"""Rows of A per pass over x in a long segment: with 3 tokens 24 sums. Each vector that is loaded
feeds 3 or 8 of them, and a chunk of 8 rows, 24 KiB, stays in the first-level cache."""

LONG_CHUNK = 768
"""Inputs of A that a long segment widens at a time, a multiple of 32. On an AMD EPYC (Zen 5, 48 KiB
of first-level cache) shrink over 576 and 1536 inputs took 1.01 to 1.1 times as long with 512, and
as long with 1024."""

LONG_PANEL = 64
"""Rows of A whose sums wait in the scratch buffer between chunks."""

LONG_TILES = 4
"""Groups of 16 rows of B per pass over a long segment: with 3 tokens 24 sums, and 64 columns of y,
whole cache lines, are updated at once."""

SHRINK_AHEAD = 2048
"""Prefetch distance in A, in bytes, in a segment of one pass; past the end of a row, prefetches go
to the row 4 further on. On two cores of an AMD EPYC, the shrink took 1.05 to 1.2 times as long with
prefetches into the second-level cache, and 0.8 to 1.4 times as long without prefetches. On the
Intel Xeon, it took 1.1 times as long without them."""


class DotBlocks(NamedTuple):
    """The blocks of a shrink of int8 by bfloat16."""

    inputs: int  # per chunk, a multiple of 64
    ahead: int  # prefetch distance in A, in bytes, at least `inputs`
    in_order: bool  # prefetch the first rows while x is copied, then the rows in the order of use


PAIR_BLOCKS = DotBlocks(2048, 4096, in_order=False)
"""Where pairs of bfloat16 are multiplied. 8 rows of x take 32 KiB, which stay in the first-level
cache of the AMD EPYC while A is read. There, half the distance took 1.03 to 1.15 times as long."""

FLOAT32_BLOCKS = DotBlocks(512, 1024, in_order=True)
"""Where int8 and x are multiplied as float32. On an Intel Xeon (Sapphire Rapids), the shrink took
1.04 to 1.12 times as long with 1024 inputs and 4096 bytes, not in order."""

EXPAND_AHEAD = 8192
"""Prefetch distance in B, in bytes; each vector of columns issues four prefetches. On the AMD EPYC,
half and twice this distance took 1.0 to 1.15 times as long. Prefetches of 16 whole rows at once
took 1.4 to 2.2 times as long: a core waits for its oldest requests."""

SERIAL_BYTES = 150_000
"""Bytes below which one thread does all: the weights of all segments, and an eighth of a segment's
weights per token. Starting a thread takes 2 us; from 135 kB on two threads are as fast as one."""

SEGMENTS_PER_THREAD = 4
"""Segments per thread from which a thread does both halves of whole segments, so that threads meet
once: 1 to 4% less time at 8 segments of 2 tokens. With fewer, one would wait for another."""

SCRATCH_BYTES = 1 << 18
"""Bytes of h up to which the calls of a thread use one buffer in turn; a larger h is allocated."""
