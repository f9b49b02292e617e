"""Tables of another card: which cards are alike, and how sizes of one are used on the other.

Two cards are alike if they have the same compute capability (on ROCm, the same architecture) and
their numbers of multiprocessors differ by less than a factor of `MOST_RATIO`.

- **Capability** fixes the machine code of a kernel, and the shared memory and registers of a
  multiprocessor. So sizes that ran on one card fit on the other, with as many programs on each
  multiprocessor.
- **Multiprocessors.** A grid takes as many rounds on both cards if each multiprocessor has as many
  programs. `scaled` therefore changes the parts of the inputs by the ratio. Other sizes are powers
  of two, and for a ratio below the root of two the nearest power is the measured size itself.
- **Bandwidth** is ignored. It decides how many bytes have to be in flight. Sizes measured with
  faster memory have enough loads in flight for slower memory; the other way around they may have
  too few.

H200, H100 SXM and GH200 (9.0, 132 multiprocessors) and H100 PCIe (114) are alike; H20 (78) is not.
L40S (8.9, 142) and RTX 4090 (128) are alike; L4 (58) is not. A100 (8.0, 108) is unlike A30 (56).
"""

from __future__ import annotations

import math
from dataclasses import replace

from lora_backends.sgmv.tiles.gpu import Gpu
from lora_backends.sgmv.tiles.sizes import LayerShape, TileConfig, part_waste

MOST_RATIO = math.sqrt(2)
"""Numbers of multiprocessors of cards that are alike have a ratio below this."""

MOST_PARTS = 64
"""The largest split_k that `tile_faults` allows."""


def are_alike(capability: str, multiprocessors: int, others: str, other_count: int) -> bool:
    """Return whether two cards are alike, as the top of this file defines it.

    >>> are_alike("9.0", 132, "9.0", 114), are_alike("9.0", 132, "9.0", 78)
    (True, False)
    >>> are_alike("8.9", 128, "8.6", 128), are_alike("none", 132, "none", 132)
    (False, False)
    """
    few, many = sorted((multiprocessors, other_count))
    return capability == others != "none" and many < MOST_RATIO * few


def scaled(tiles: TileConfig, layer: LayerShape, measured: int, gpu: Gpu) -> TileConfig:
    """Return measured sizes with `split_k` changed for another number of multiprocessors.

    They were `measured` for a layer on a card with as many. The new split_k is the one nearest in
    ratio to ``split_k * gpu.multiprocessors / measured``; the distance is multiplied by
    `part_waste`.
    """
    shrink, wanted = tiles.shrink, tiles.shrink.split_k * gpu.multiprocessors / measured
    if gpu.multiprocessors == measured:
        return tiles

    def distance(split: int) -> float:
        ratio = max(split, wanted) / min(split, wanted)
        # rounded, so that of equal distances the fewest parts win
        return round(ratio * part_waste(layer.in_features, shrink.block_k, split), 6)

    most = min(MOST_PARTS, -(-layer.in_features // shrink.block_k))
    split_k = min(range(1, most + 1), key=distance)
    return replace(tiles, shrink=replace(shrink, split_k=split_k))
