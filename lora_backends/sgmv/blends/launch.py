"""The two kernels of a layer for several adapters per token, and their launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from lora_backends.common.devices import is_capturing
from lora_backends.eight_bit import b_row_groups
from lora_backends.sgmv.blends import kernels, pair_kernels
from lora_backends.sgmv.blends.plan import Blend
from lora_backends.sgmv.launch import (
    EMPTY_ROW,
    Options,
    Stacks,
    _shrink_kernel,
    choose_sizes,
    layer_shape,
    shrink_arguments,
    stacks_of,
)
from lora_backends.sgmv.launching.kernel import (
    ABSENT,
    Arguments,
    SpecializedKernel,
    specialized,
)
from lora_backends.sgmv.launching.sizes import expand_sizes, shrink_sizes
from lora_backends.sgmv.launching.tma import MAX_GRID_ROWS, descriptor
from lora_backends.sgmv.layout import RowSizes
from lora_backends.sgmv.storage import PLAIN, Storage, storage_kind, stored_bytes
from lora_backends.sgmv.tiles.rules import ends_beyond_ranks
from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    MIN_DOT,
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    column_programs,
    padded_rank,
)
from lora_backends.sgmv.tiles.source import rules_for
from lora_backends.weights import LoRAWeights

MAX_STACKED = 4 * MAX_BLOCK_R
"""The most ranks, of all entries, that one product takes."""


MOST_H_VALUES = 16384
"""The values of h, of all planes, that a program of the expand adds up, but for 4 planes."""


class BlendKernels(NamedTuple):
    """Both kernels of a layer for one shape of batch."""

    shrink: SpecializedKernel
    expand: SpecializedKernel
    split_k: int  # planes of h


class BlendShape(NamedTuple):
    """What kernels depend on besides a batch and a layer."""

    entries: int  # of a tile, at most
    merged: bool  # whether tokens of a tile may have other adapters than their neighbours
    folds: bool  # whether factors may multiply h: not in the narrow exponents of float16
    pairs: BatchShape | None = None  # of the shrink, if it goes by pair
    row: RowSizes | None = None  # by which that finds its row
    tma: bool = False  # whether B can be loaded through TMA


class BlendTiles(NamedTuple):
    """Sizes of both kernels."""

    shrink: ShrinkTiles
    expand: ExpandTiles
    together: int  # entries of a product; 0: one, its factors applied behind it
    rows: bool = False  # without a matrix product, by the expand of `pair_kernels`
    max_registers: int = 0  # of a thread of the expand; 0 leaves it to the compiler


@dataclass(eq=False, slots=True)
class BlendedCall:
    """A call of one layer: the `CachedCall` of a blend."""

    options: Options
    device: torch.device
    stacks: Stacks

    def run(self, x: torch.Tensor, weights: LoRAWeights, blend: Blend, y: torch.Tensor) -> bool:
        """Launch both kernels."""
        capturing = is_capturing(self.device)
        blend.is_captured |= capturing
        add(x, weights, self.stacks, blend, y, self.options, capturing)
        return True


def run(
    x: torch.Tensor, weights: LoRAWeights, blend: Blend, y: torch.Tensor, options: Options
) -> BlendedCall | bool:
    """Add all adapters to y; return the call if it can be repeated as it is, else True."""
    stacks = stacks_of(weights)
    call = BlendedCall(options, x.device, stacks)
    call.run(x, weights, blend, y)
    return call if stacks.in_place else True


def add(
    x: torch.Tensor,
    weights: LoRAWeights,
    stacks: Stacks,
    blend: Blend,
    y: torch.Tensor,
    options: Options,
    capturing: bool,
) -> None:
    """Launch the shrink and the expand."""
    assert stacks.b is not None
    tokens = x.shape[0]
    rows = blend.grid_rows(capturing, tokens) or EMPTY_ROW
    if not rows:
        return
    kernels = kernels_of(weights, stacks, blend, tokens, x.dtype, options)
    slices, h_rows = weights.num_slices, tokens
    if blend.merged and not blend.by_pair:
        slices *= blend.entries
    else:
        h_rows = -(-tokens * blend.width // 16) * 16
    shape = (kernels.split_k, slices, h_rows, weights.max_rank)
    h = torch.empty(shape, dtype=torch.float32, device=x.device)
    *tables, factors = blend.tables
    if blend.by_pair:
        of_a = shrink_arguments(x, stacks, (*blend.pair_tables(), ABSENT), h)
        kernels.shrink.launch(blend.pair_rows(capturing, tokens) or EMPTY_ROW, of_a)
    else:
        tensors, _, numbers = shrink_arguments(x, stacks, tuple(tables), h)
        kernels.shrink.launch(rows, Arguments(tensors, (), (*numbers, rows)))
    b, b_scales, bias = stacks.b, stacks.b_scales, stacks.bias
    # also passed for tensors that the layer lacks, which the kernel does not read
    stored = b.base if stacks.is_plain else stored_bytes(b.base)
    of_b = (
        h,
        stored,
        y,
        stored if bias is None else bias,
        stacks.ranks,
        stacks.scalings,
        b.table,
        stored if b_scales is None else b_scales,
        *tables,
        factors,
    )
    descriptors: tuple[Any, ...] = ()
    if kernels.expand.kernel is pair_kernels.pair_expand_kernel:
        ids = blend.ids if blend.by_pair else blend.tables[3]  # read where tokens are unlike
        of_b = (*of_b, ids)
        sizes, tma = kernels.expand.sizes, None
        if kernels.expand.constants["PROGRAMS"] == 0:
            tma = descriptor(
                b._replace(base=stored), weights.max_rank, sizes.BLOCK_C, sizes.BLOCK_R
            )
        descriptors = (tma,)
    numbers_of_b = (
        h_rows,
        *h.stride()[1:3],
        *b.strides,
        y.stride(0),
        0 if bias is None else bias.stride(0),
        *((0, 0) if b_scales is None else b_scales.stride()[:2]),
        rows,
    )
    kernels.expand.launch(rows, Arguments(of_b, descriptors, numbers_of_b))


def kernels_of(
    weights: LoRAWeights,
    stacks: Stacks,
    blend: Blend,
    rows: int,
    dtype: torch.dtype,
    options: Options,
) -> BlendKernels:
    """Return both kernels for a layer, a batch and x of `rows` rows: one cached lookup."""
    tokens = rows if blend.is_captured else blend.num_tokens
    kind = 0 if stacks.is_plain else storage_kind(weights.dtype, options.programmatic)
    folds = not kind and weights.dtype != torch.float16
    of_pairs, row = None, None
    if blend.by_pair:
        num_pairs = rows * blend.adapters if blend.is_captured else blend.num_pairs
        of_pairs = BatchShape(num_pairs, blend.active_slots, blend.run_pairs)
        row = blend.pair_row()
    tma = options.tma and stacks.tma and blend.grid_rows(True, rows) <= MAX_GRID_ROWS
    return kernels_for(
        BatchShape(tokens, blend.tiles_hint, blend.tile_tokens),
        layer_shape(weights, dtype.itemsize),
        weights.output_slices,
        BlendShape(blend.entries, blend.merged, folds, of_pairs, row, tma),
        stacks.bias is not None,
        stacks.aligns,
        Storage(kind, weights.scale_block, dtype) if kind else PLAIN,
        options,
    )


def choose_blend_tiles(
    batch: BatchShape, layer: LayerShape, shape: BlendShape, storage: Storage, options: Options
) -> BlendTiles:
    """Return the sizes of both kernels: those of one adapter of the rank of all entries."""
    # not the tables, which were measured with one adapter per token
    rules = options._replace(source=rules_for(options.gpu))
    rank_pad = padded_rank(layer.max_rank)
    if shape.pairs and shape.merged:
        return _by_pair(shape.pairs, layer, storage, options)
    rank = shape.entries * rank_pad
    if shape.merged or storage.kind or rank > MAX_STACKED:
        # with fewer tokens a tile the rules choose sizes without a matrix product
        batch = replace(batch, num_tokens=max(batch.num_tokens, 2 * batch.active_slots))
    stacked = replace(layer, num_slices=layer.num_slices * shape.entries)
    shrink = choose_sizes(batch, stacked, storage, rules, "linear")[0]
    expand = choose_sizes(batch, layer, storage, rules, "linear")[1]
    is_wide = batch.tile_tokens == 64
    is_half = layer.item_bytes == 2 and not storage.kind
    if shape.merged and is_wide:
        shrink = replace(shrink, split_k=min(shrink.split_k, 4))
        if is_half:
            shrink = replace(shrink, block_n=32, warps_k=1)
        # more columns would spill
        expand = replace(expand, block_c=min(expand.block_c, 32), chunks=1, num_warps=8)
    if expand.num_stages == 0:  # a program keeps as many values of B as with one adapter
        block_c = max(MIN_DOT, min(expand.block_c, 64 * MAX_BLOCK_R // rank))
        return BlendTiles(shrink, replace(expand, block_c=block_c, chunks=1), shape.entries)
    expand = replace(expand, num_stages=1)  # this kernel loads B without TMA
    if not shape.folds:
        return BlendTiles(shrink, expand, 0)
    most = MAX_STACKED if layer.item_bytes == 2 else 2 * MAX_BLOCK_R
    if shape.merged and is_wide:
        most //= 2
    together = max(1, min(shape.entries, most // expand.block_r))
    stacked_ranks = together * expand.block_r
    block_c, chunks = expand.block_c, expand.chunks
    while block_c > MIN_DOT and block_c * stacked_ranks > 128 * MAX_BLOCK_R:
        block_c, chunks = block_c // 2, 2 * chunks
    chunks = min(chunks, max(1, 2 * MAX_STACKED // stacked_ranks))  # the kernel unrolls them
    if together < shape.entries or expand.block_r < rank_pad:
        chunks = 1
    # a program of the expand loads all planes of h [tokens, ranks] at once: more would spill
    h_values = batch.tile_tokens * stacked_ranks
    shrink = replace(shrink, split_k=min(shrink.split_k, max(4, MOST_H_VALUES // h_values)))
    num_warps = 8 if h_values >= 64 * MAX_BLOCK_R else expand.num_warps
    if shape.merged and is_wide:
        chunks = 1
    elif is_wide and is_half and together == shape.entries and expand.block_r == rank_pad:
        # faster on an H200 by 4 to 26%; with two entries and 4096 columns, slower by 5 to 18%
        if layer.out_features > 4096 or shape.entries > 2:
            block_c, num_warps = 64, 8
            chunks = min(chunks, 4 if stacked_ranks < 2 * MAX_BLOCK_R else 2)
    expand = replace(expand, block_c=block_c, chunks=chunks, num_warps=num_warps)
    if shape.pairs:
        shrink = _by_pair(shape.pairs, layer, storage, options).shrink
    return BlendTiles(shrink, expand, together)


def _by_pair(
    batch: BatchShape, layer: LayerShape, storage: Storage, options: Options
) -> BlendTiles:
    """Return the sizes of both kernels where the shrink goes by pair and tokens are unlike."""
    shrink = choose_sizes(batch, layer, storage, options, "linear")[0]
    block_r = min(MAX_BLOCK_R, padded_rank(layer.max_rank))
    # each program of the expand reads all planes of h of all pairs
    shrink = replace(shrink, split_k=min(shrink.split_k, 4))
    return BlendTiles(shrink, ExpandTiles(64, block_r, num_warps=4, num_stages=3), 0)


@lru_cache(maxsize=4096)
def kernels_for(
    batch: BatchShape,
    layer: LayerShape,
    output_slices: tuple[int, ...],
    blend: BlendShape,
    has_bias: bool,
    slice_aligns: tuple[int, int],
    storage: Storage,
    options: Options,
) -> BlendKernels:
    """Return both kernels."""
    shrink, expand, together, by_rows, max_registers = choose_blend_tiles(
        batch, layer, blend, storage, options
    )
    entries = blend.entries
    of_unlike = blend.pairs is not None and blend.merged
    tma = expand.num_stages > 1 and not of_unlike
    if tma and slice_aligns[1]:  # no block may reach beyond the tensor of its slice
        tma = blend.tma and column_programs(output_slices, expand).even
    if tma and not (blend.tma and blend.folds):
        raise ValueError("B cannot be loaded through TMA")
    columns, rank = column_programs(output_slices, expand), layer.max_rank
    of_a = shrink_sizes(
        shrink,
        layer.in_features,
        rank,
        storage,
        PRECISION=options.precision,
        PROGRAMMATIC=options.programmatic,
        NUM_SLICES=layer.num_slices,
        SLICE_ALIGN=slice_aligns[0],
        EVEN_R=8 if rank % 8 == 0 else 0,
        EXITS=blend.pairs is not None and ends_beyond_ranks(blend.pairs, options.gpu),
    )
    of_b = expand_sizes(
        expand,
        columns,
        shrink.split_k,
        rank,
        storage,
        FIRST_GROUPS=tuple(accumulate(b_row_groups(output_slices, storage.block), initial=0)),
        PRECISION=options.precision,
        PROGRAMMATIC=options.programmatic,
        NUM_SLICES=layer.num_slices,
        SLICE_ALIGN=slice_aligns[1],
        HAS_BIAS=has_bias,
    )
    tile: dict[str, Any] = {"TILE": batch.tile_tokens, "ENTRIES": entries}
    is_pairs = blend.pairs is not None or not blend.merged
    if blend.pairs is not None:
        assert blend.row is not None
        of_shrink = _shrink_kernel(layer, shrink, of_a, blend.row, options)
    else:
        of_shrink = specialized(
            kernels.blend_shrink_kernel,
            -(-layer.stacked * entries // shrink.block_n) * shrink.split_k,
            num_warps=shrink.num_warps,
            num_stages=shrink.num_stages,
            programmatic=options.programmatic,
            SIZES=of_a,
            PAIRS=is_pairs,
            **tile,
        )
    if of_unlike or tma or by_rows:
        of_expand = specialized(
            pair_kernels.pair_expand_kernel,
            columns.programs,
            num_warps=expand.num_warps,
            programmatic=options.programmatic,
            max_registers=max_registers,
            PROGRAMS=0 if tma else columns.programs,
            SIZES=of_b,
            WIDTH=blend.row.WIDTH if blend.row else entries,
            MERGED=blend.merged,
            **tile,
        )
    else:
        of_expand = specialized(
            kernels.blend_expand_kernel,
            columns.programs,
            num_warps=expand.num_warps,
            programmatic=options.programmatic,
            SIZES=of_b,
            TOGETHER=together,
            MERGED=blend.merged,
            PAIRS=is_pairs,
            **tile,
        )
    return BlendKernels(of_shrink, of_expand, shrink.split_k)
