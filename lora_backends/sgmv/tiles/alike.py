"""Tables of another card: which cards are alike, and the sizes of one on the other.

Two cards are alike if they have one compute capability, or architecture of AMD, and numbers of
multiprocessors whose ratio is below `MOST_RATIO`.

- **Capability.** It fixes what a kernel compiles to, and the shared memory and registers of a
  multiprocessor. So sizes that ran on one card fit on the other, with as many programs on each
  multiprocessor.
- **Multiprocessors.** A grid with as many programs for each of them takes as many rounds. The parts
  of the inputs follow their number (`scaled`). Other sizes are powers of two: below a ratio of the
  root of two, the nearest one is the measured one.
- **Bandwidth** does not count. It decides how many bytes have to be in flight. A table of faster
  memory has enough of them for slower memory; the other way around there may be too few.

H200, H100 SXM and GH200 (9.0, 132 multiprocessors) and H100 PCIe (114) are alike; H20 (78) is not.
L40S (8.9, 142) and RTX 4090 (128) are alike; L4 (58) is not. A100 (8.0, 108) is unlike A30 (56).
"""

from __future__ import annotations

import math
from dataclasses import replace

from lora_backends.sgmv.tiles.gpu import Gpu
from lora_backends.sgmv.tiles.sizes import LayerShape, TileConfig, part_waste

MOST_RATIO = math.sqrt(2)
"""Between the multiprocessors of cards that are alike."""

MOST_PARTS = 64
"""The largest split_k that `tile_faults` allows."""


def are_alike(capability: str, multiprocessors: int, others: str, other_count: int) -> bool:
    """Return whether a card takes sizes measured on another, see the top of this file.

    >>> are_alike("9.0", 132, "9.0", 114), are_alike("9.0", 132, "9.0", 78)
    (True, False)
    >>> are_alike("8.9", 128, "8.6", 128), are_alike("none", 132, "none", 132)
    (False, False)
    """
    few, many = sorted((multiprocessors, other_count))
    return capability == others != "none" and many < MOST_RATIO * few


def scaled(tiles: TileConfig, layer: LayerShape, measured: int, gpu: Gpu) -> TileConfig:
    """Return measured sizes with parts of the inputs for another number of multiprocessors.

    Args:
        tiles: measured sizes.
        layer: that they were measured for.
        measured: multiprocessors of the card that they were measured on.
        gpu: the card that takes them.

    Returns:
        The sizes with the split_k nearest in ratio to ``split_k * gpu.multiprocessors / measured``,
        where steps that parts waste count as distance; the same sizes on as many multiprocessors.
    """
    shrink, wanted = tiles.shrink, tiles.shrink.split_k * gpu.multiprocessors / measured
    if gpu.multiprocessors == measured:
        return tiles

    def distance(split: int) -> float:
        ratio = max(split, wanted) / min(split, wanted)
        # rounded: of equal ones, the fewest parts
        return round(ratio * part_waste(layer.in_features, shrink.block_k, split), 6)

    most = min(MOST_PARTS, -(-layer.in_features // shrink.block_k))
    split_k = min(range(1, most + 1), key=distance)
    return replace(tiles, shrink=replace(shrink, split_k=split_k))
