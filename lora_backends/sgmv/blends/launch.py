"""The kernels of a layer for several adapters per token, and their launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch

from lora_backends.common.devices import is_capturing
from lora_backends.eight_bit import b_row_groups
from lora_backends.sgmv.backward.launch import planes_kernel
from lora_backends.sgmv.blends import kernels
from lora_backends.sgmv.blends.plan import Blend
from lora_backends.sgmv.launch import (
    EMPTY_ROW,
    Options,
    Stacks,
    choose_sizes,
    layer_shape,
    shrink_arguments,
    shrink_kernel_of,
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
from lora_backends.sgmv.tiles.bounds import FEW_ROWS, MANY_ROWS, planes_of
from lora_backends.sgmv.tiles.gpu import H200
from lora_backends.sgmv.tiles.rules import ends_beyond_ranks
from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    MIN_DOT,
    TMA_BYTES,
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    column_programs,
    fitting,
    h_width,
    padded_rank,
    parts,
)
from lora_backends.sgmv.tiles.source import rules_for
from lora_backends.weights import LoRAWeights

MAX_STACKED = 4 * MAX_BLOCK_R
"""The most ranks, of all entries, that one product takes."""

MOST_STACKED_PLANES = 4
"""The most planes of h of a shrink of more than `MAX_BLOCK_R` ranks of like tokens."""

MOST_H_VALUES = 16384
"""The most values of h that a program of the expand adds up in more than 4 planes; it keeps half as
many in registers."""

MOST_ROW_VALUES = 2048
"""Values of h, in all planes, above which a program for one token takes at most 32 columns."""

LONG_INPUT = 8192
"""in_features above which a shrink of many ranks takes longer than the expand."""

SUM_BLOCK = 256
"""Values of h that a program of the third kernel writes: few, as there may be few pairs."""

TMA_COLUMNS = 512
"""Slices that have a tensor each take TMA only if their widths are multiples of this."""


class BlendKernels(NamedTuple):
    """The kernels of a layer for one shape of batch."""

    shrink: SpecializedKernel
    expand: SpecializedKernel
    split_k: int  # planes of h
    sum: SpecializedKernel | None  # adds up the planes of h in between


class BlendShape(NamedTuple):
    """What kernels depend on besides a batch and a layer."""

    entries: int  # of a tile, at most
    width: int  # pairs of a token
    merged: bool  # whether tokens of a tile may have other adapters than their neighbours
    folds: bool  # whether factors may multiply h: not in the narrow exponents of float16
    pairs: BatchShape | None = None  # of the shrink, if it goes by pair
    tma: bool = False  # whether B can be loaded through TMA


How = Literal["tma", "row", "rows", "together", "entries", "each"]
"""How the expand multiplies.

For like tokens: "tma": loads of B by TMA; "rows": without a matrix product; "row": the same for a
single token, with one load for h of all its entries; "together": several entries in one product.
For all: "entries": a product for each entry, h of all pairs in registers; "each": h is loaded for
each product.
"""


class BlendTiles(NamedTuple):
    """Sizes of the shrink and the expand."""

    shrink: ShrinkTiles
    expand: ExpandTiles
    how: How
    together: int = 1  # entries of a product of "together"
    sums: bool = False  # whether a kernel in between adds up the planes of h


@dataclass(eq=False, slots=True)
class BlendedCall:
    """A call of one layer: the `CachedCall` of a blend."""

    options: Options
    device: torch.device
    stacks: Stacks

    def run(self, x: torch.Tensor, weights: LoRAWeights, blend: Blend, y: torch.Tensor) -> bool:
        """Launch the kernels."""
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
    """Launch the kernels."""
    assert stacks.b is not None
    tokens = x.shape[0]
    rows = blend.grid_rows(capturing, tokens) or EMPTY_ROW
    if not rows:
        return
    kernels = kernels_of(weights, stacks, blend, tokens, x.dtype, options)
    h_rows = -(-tokens * blend.width // 16) * 16
    shape = (kernels.split_k, weights.num_slices, h_rows, stacks.h_width)
    h = torch.empty(shape, dtype=torch.float32, device=x.device)
    *tables, factors, ids = blend.tables
    if blend.by_pair:
        of_a = shrink_arguments(x, stacks, (*blend.pair_tables(), ABSENT), h)
        kernels.shrink.launch(blend.pair_rows(capturing, tokens) or EMPTY_ROW, of_a)
    else:
        tensors, _, numbers = shrink_arguments(x, stacks, tuple(tables), h)
        kernels.shrink.launch(rows, Arguments(tensors, (), (*numbers, rows)))
    if kernels.sum is not None:
        values = h[0].numel()
        kernels.sum.launch(-(-values // SUM_BLOCK), Arguments((h, h, h), (), (values, h_rows)))
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
        ids,
    )
    tma = None
    if kernels.expand.constants["HOW"] == "tma":
        sizes = kernels.expand.sizes
        tma = descriptor(b, weights.max_rank, sizes.BLOCK_C, sizes.BLOCK_R)
    numbers_of_b = (
        h_rows,
        *h.stride()[1:3],
        *stacks.b_strides,
        y.stride(0),
        0 if bias is None else bias.stride(0),
        *((0, 0) if b_scales is None else b_scales.stride()[:2]),
        rows,
    )
    kernels.expand.launch(rows, Arguments(of_b, (tma,), numbers_of_b))


def kernels_of(
    weights: LoRAWeights,
    stacks: Stacks,
    blend: Blend,
    rows: int,
    dtype: torch.dtype,
    options: Options,
) -> BlendKernels:
    """Return the kernels for a layer, a batch and x of `rows` rows: one cached lookup."""
    tokens = rows if blend.is_captured else blend.num_tokens
    kind = 0 if stacks.is_plain else storage_kind(weights.dtype, options.programmatic)
    folds = not kind and weights.dtype != torch.float16
    of_pairs = None
    if blend.by_pair:
        # not the pairs in use: a capture must find the kernels of the eager call before it
        of_pairs = BatchShape(tokens * blend.adapters, blend.active_slots, blend.run_pairs)
    tma = options.tma and stacks.tma and blend.grid_rows(True, rows) <= MAX_GRID_ROWS
    return kernels_for(
        BatchShape(tokens, blend.tiles_hint, blend.tile_tokens),
        layer_shape(weights, dtype.itemsize),
        weights.output_slices,
        BlendShape(blend.entries, blend.width, blend.merged, folds, of_pairs, tma),
        stacks.bias is not None,
        stacks.aligns,
        Storage(kind, weights.scale_block, dtype) if kind else PLAIN,
        options,
    )


def choose_blend_tiles(
    batch: BatchShape,
    layer: LayerShape,
    shape: BlendShape,
    storage: Storage,
    options: Options,
) -> BlendTiles:
    """Return the sizes of the kernels; for like tokens they count all entries as one adapter.

    As measured on an H200 in bfloat16: 1 to 4096 tokens, ranks 16 and 64, 2 and 4 of 8 adapters.
    """
    # Not the tables, nor shrinks in one wave: both were measured with one adapter per token. A
    # shrink by pair has one adapter per pair, so it takes `options` below.
    rules = options._replace(source=rules_for(options.gpu, one_wave=False))
    rank_pad = padded_rank(layer.max_rank)
    block_r, rank = min(MAX_BLOCK_R, rank_pad), shape.entries * rank_pad
    by_product = shape.merged or storage.kind or rank > MAX_STACKED
    # kernels without a product were not timed with these numbers of tiles
    by_product = by_product or FEW_ROWS <= batch.rows < MANY_ROWS
    if by_product:  # the rules choose a matrix product for more than 2 tokens a tile
        batch = replace(batch, num_tokens=max(batch.num_tokens, 2 * batch.active_slots + 1))
    stacked = replace(layer, num_slices=layer.num_slices * shape.entries)
    expand = choose_sizes(batch, layer, storage, rules, "linear")[1]
    # those take no 8 bits, no unlike tokens and at most MAX_STACKED ranks
    assert expand.num_stages or not by_product
    pairs = shape.pairs
    is_row = pairs is not None and expand.num_stages == 0 and batch.active_slots == 1
    if pairs is None:
        shrink = choose_sizes(batch, stacked, storage, rules, "linear")[0]
    else:
        if is_row:  # each pair has a slot to itself, as one token of one adapter has
            pairs = replace(pairs, num_tokens=1, active_slots=1)
        shrink = choose_sizes(pairs, layer, storage, options, "linear")[0]
    split = partial(_split, layer)
    if is_row:
        if rank > 2 * MAX_BLOCK_R:  # planes of so many ranks slow the expand
            shrink = split(shrink, shrink.split_k // 2)
        # a program keeps B of all entries, and all planes of h, in registers
        most = 32 if shrink.split_k * rank > MOST_ROW_VALUES else 128 * MAX_BLOCK_R // rank
        block_c = max(MIN_DOT, min(expand.block_c, most))
        num_warps = max(expand.num_warps, 4 if rank > MAX_BLOCK_R else 2)
        return BlendTiles(shrink, ExpandTiles(block_c, rank_pad, 1, num_warps, 0), "row")
    if expand.num_stages == 0:
        # a program keeps B of all entries in registers: at most 128 values a thread
        block_c = max(MIN_DOT, min(expand.block_c, 128 * MAX_BLOCK_R // rank))
        if rank > 2 * MAX_BLOCK_R:  # planes of so many ranks slow the expand
            shrink = split(shrink, shrink.split_k // 2)
        expand = replace(expand, block_c=block_c, chunks=1, num_stages=0)
        return BlendTiles(shrink, expand, "rows")
    # a program of the expand reads all planes of h of all pairs of its tokens
    is_long = layer.in_features > LONG_INPUT
    adds_many = shape.pairs is not None and shape.width > 2 and shrink.split_k > 4
    sums = adds_many and is_long and rank_pad > MIN_DOT
    if sums:  # a third kernel adds them up, so more parts cost the expand nothing
        shrink = split(shrink, 2 * shrink.split_k)
    else:
        shrink = split(shrink, _planes(shrink.split_k, batch, shape, rank_pad, is_long))
    if shape.merged or not shape.folds:
        h_values = batch.tile_tokens * shape.width * block_r
        if storage.kind or rank_pad > MAX_BLOCK_R or h_values > MOST_H_VALUES // 2:
            if batch.tile_tokens == 64:  # else it would spill
                expand = replace(expand, chunks=1, num_warps=8)
            return BlendTiles(shrink, replace(expand, num_stages=1), "each", sums=sums)
        return BlendTiles(shrink, _of_entries(batch, layer, shape), "entries", sums=sums)
    fits = max(rank_pad, rank // 4) <= MAX_BLOCK_R and options.gpu.shared_bytes >= TMA_BYTES
    if shape.tma and fits and layer.item_bytes == 2 and not shape.pairs:
        rows = options.gpu.as_on_h200(batch.rows)
        if rank > MAX_BLOCK_R:  # else as for one adapter
            shrink = _stacked_shrink(rows, layer, rank)
            shrink = fitting(shrink, batch.tile_tokens, layer.item_bytes, options.gpu)
        return BlendTiles(shrink, _by_tma(rows, layer, rank), "tma")
    expand, together = _together(replace(expand, num_stages=1), batch, layer, shape)
    return BlendTiles(shrink, expand, "together", together, sums)


def _stacked_shrink(rows: int, layer: LayerShape, rank: int) -> ShrinkTiles:
    """Return the sizes for tiles of 64 like tokens, whose adapters have `rank` ranks together.

    Each block of A costs another read of x from L2, whose bandwidth limits these shrinks. So one
    block has all ranks of a slice; split_k fills the GPU.
    """
    wave, programs = H200.multiprocessors, layer.num_slices * rows
    split_k = planes_of(layer.in_features, min(MOST_STACKED_PLANES, wave // programs))
    if rank == MAX_STACKED:  # too many for two programs on a multiprocessor
        return ShrinkTiles(rank, 64, split_k, num_warps=8, num_stages=5)
    # Alone on a multiprocessor, a program takes all its shared memory; else two share it.
    return ShrinkTiles(rank, 64, split_k, num_stages=6 if programs <= wave else 4)


def _by_tma(rows: int, layer: LayerShape, rank: int) -> ExpandTiles:
    """Return the sizes of an expand of like tokens through TMA."""
    block_r, wave = padded_rank(layer.max_rank), H200.multiprocessors
    # a stage of 256 ranks has 32 KiB of B
    stages = 2 if rank > 2 * MAX_BLOCK_R else 3
    programs = rows * layer.out_features // 1024
    # the default of 4 warps leaves registers for h of all entries
    if 1.5 * wave <= programs <= 2 * wave or programs >= 4 * wave:
        # Every program loads h, so 1,024 columns are faster where a multiprocessor gets 1.5 to 2
        # programs, which run at once, or at least 4. Of 3, one runs alone.
        block_c = 128 if rank <= MAX_BLOCK_R else 64
        return ExpandTiles(block_c, block_r, 1024 // block_c, num_stages=stages)
    return ExpandTiles(64, block_r, 8, num_stages=stages)


def _split(layer: LayerShape, shrink: ShrinkTiles, most: int) -> ShrinkTiles:
    return replace(shrink, split_k=parts(layer.in_features, shrink.block_k, most))


def _planes(planes: int, batch: BatchShape, shape: BlendShape, rank_pad: int, long: bool) -> int:
    """Return the number of planes of h, up to `planes`, if the expand itself adds them up."""
    if not shape.pairs:
        most = max(4, MOST_H_VALUES // (batch.tile_tokens * shape.entries * rank_pad))
    elif rank_pad > MIN_DOT:
        most = planes if long else 4
    elif shape.merged:  # a program reads h of all tokens of its tile
        most = 8 if long or batch.active_slots == 1 else 4
    else:
        most = planes
    return min(planes, most)


def _of_entries(batch: BatchShape, layer: LayerShape, shape: BlendShape) -> ExpandTiles:
    """Return the sizes of an expand with a product for each entry."""
    block_r, half = padded_rank(layer.max_rank), 2 if layer.item_bytes == 4 else 1
    # Few tiles leave registers for all of B, loaded before the wait for h. Prefetches of B instead
    # would slow a long shrink, on an H200 by up to 1.4 times.
    few = 4 if block_r == MIN_DOT else 1
    if batch.active_slots <= few and shape.entries <= 8:
        most = 64 if batch.active_slots == 1 else 128
        return ExpandTiles(min(most, 32 * MAX_BLOCK_R // block_r) // half, block_r)
    # several tiles share a multiprocessor: fewer registers, loads of B of 16 KiB or less
    stages = 4 if block_r == MIN_DOT else 3
    num_warps = 8 if batch.tile_tokens == 64 else 4
    return ExpandTiles(128 // half, block_r, num_warps=num_warps, num_stages=stages)


def _together(
    expand: ExpandTiles, batch: BatchShape, layer: LayerShape, shape: BlendShape
) -> tuple[ExpandTiles, int]:
    """Return the sizes where one product takes several entries of like tokens, and how many."""
    rank_pad = padded_rank(layer.max_rank)
    most = MAX_STACKED if layer.item_bytes == 2 else 2 * MAX_BLOCK_R
    together = max(1, min(shape.entries, most // expand.block_r))
    ranks = together * expand.block_r
    block_c, chunks = expand.block_c, expand.chunks
    while block_c > MIN_DOT and block_c * ranks > 128 * MAX_BLOCK_R:
        block_c, chunks = block_c // 2, 2 * chunks
    chunks = min(chunks, max(1, 2 * MAX_STACKED // ranks))  # the kernel unrolls them
    if together < shape.entries or expand.block_r < rank_pad:
        chunks = 1
    # 32 tokens and 128 ranks take 0.73 to 0.89 of the time with 4 warps instead of 8 on an H200
    wide = batch.tile_tokens * ranks >= 64 * MAX_BLOCK_R and batch.tile_tokens != 32
    # with a long shrink there are many planes to add up
    many_planes = rank_pad == MIN_DOT and layer.in_features > LONG_INPUT
    num_warps = 8 if wide or many_planes else expand.num_warps
    return replace(expand, block_c=block_c, chunks=chunks, num_warps=num_warps), together


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
    """Return the kernels."""
    if slice_aligns[1]:  # no block may reach beyond the tensor of its slice
        blend = blend._replace(tma=blend.tma and all(w % TMA_COLUMNS == 0 for w in output_slices))
    tiles = choose_blend_tiles(batch, layer, blend, storage, options)
    shrink, expand, how, together, sums = tiles
    if how == "tma" and slice_aligns[1] and not column_programs(output_slices, expand).even:
        expand = replace(expand, chunks=expand.chunks // 2)  # 512 columns instead of 1,024
    entries = blend.entries
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
        1 if sums else shrink.split_k,
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
    if blend.pairs is not None:
        row = RowSizes(blend.pairs.tile_tokens, 1, True, blend.width)
        of_shrink = shrink_kernel_of(layer, shrink, of_a, row, options)
    else:
        of_shrink = specialized(
            kernels.blend_shrink_kernel,
            -(-layer.stacked * entries // shrink.block_n) * shrink.split_k,
            num_warps=shrink.num_warps,
            num_stages=shrink.num_stages,
            programmatic=options.programmatic,
            SIZES=of_a,
            **tile,
        )
    of_expand = specialized(
        kernels.blend_expand_kernel,
        columns.programs,
        num_warps=expand.num_warps,
        programmatic=options.programmatic,
        PROGRAMS=0 if how == "tma" else columns.programs,
        SIZES=of_b,
        WIDTH=blend.width,
        HOW=how,
        TOGETHER=together,
        **tile,
    )
    add_planes = None
    if sums:
        add_planes = planes_kernel(
            shrink.split_k, h_width(rank), block=SUM_BLOCK, programmatic=options.programmatic
        )
    return BlendKernels(of_shrink, of_expand, shrink.split_k, add_planes)
