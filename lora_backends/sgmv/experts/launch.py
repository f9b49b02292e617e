"""The kernels of a site and a routing, and their arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lora_backends.experts import ExpertWeights
from lora_backends.sgmv.experts import kernels, rules
from lora_backends.sgmv.experts.routing import SgmvRouting, sort_tokens
from lora_backends.sgmv.experts.rules import PairShape, SiteShape, SiteTiles
from lora_backends.sgmv.launching.kernel import INTERPRETED, Arguments, SpecializedKernel
from lora_backends.sgmv.tiles.sizes import column_programs, padded_rank


class Options(NamedTuple):
    """What a backend fixes for all of its launches."""

    precision: str  # of float32 products, as `tl.dot` names it
    programmatic: bool  # whether a kernel launches before the one in front has ended
    tma: bool  # whether the device has TMA


class Site(NamedTuple):
    """What the kernels of a site are compiled for, besides sizes."""

    shape: SiteShape
    slices: tuple[int, ...]  # widths that the expand tells apart; one where a single A feeds all
    num_a: int
    interleaved: bool
    top_k: int
    by_pair: bool  # whether every pair has a row of x
    by_token: bool  # whether all experts share an A, so that h has a row for every token
    weighted: bool


class Kernels(NamedTuple):
    """Both kernels of a site."""

    shrink: SpecializedKernel
    expand: SpecializedKernel
    split_k: int  # planes of h
    shrink_parts: int  # rows of the shrink's grid per tile
    expand_parts: int  # rows of the expand's grid per tile


class Call(NamedTuple):
    """The tensors of one call."""

    x: torch.Tensor  # [num_tokens, in_features], or a row for every pair
    weights: ExpertWeights
    routing: SgmvRouting
    y: torch.Tensor  # [num_tokens, top_k, out_features], or [num_tokens, out_features] if summed
    ranks: torch.Tensor  # of the weights, contiguous
    scalings: torch.Tensor  # of the weights, contiguous
    shrunk: SgmvRouting  # whose tiles the shrink runs on: the routing, or its tokens by slot


def add_experts(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: SgmvRouting,
    options: Options,
    *,
    rows: str,
    weighted: bool,
    reduce: bool,
) -> None:
    """Add the delta of every live pair to y, in place; arguments as in `run_experts`."""
    site = site_of(weights, routing, by_pair=rows == "pairs", weighted=weighted)
    tma = options.tma and not reduce and allows_tma(weights.lora_b)
    shrunk = sort_tokens(routing, options.programmatic) if site.by_token else routing
    found = kernels_of(routing.shape, shrunk.shape, site, reduce, options._replace(tma=tma))
    # copies are made before the first launch: no kernel may run between the shrink and an expand
    # that starts before the shrink has ended
    tables = weights.ranks.contiguous(), weights.scalings.contiguous()
    call = Call(x, weights, routing, y, *tables, shrunk)
    if not reduce:
        launch_site(call, found, y)
        return
    shape = (routing.num_tokens, routing.top_k, weights.out_features)
    deltas = torch.empty(shape, dtype=torch.float32, device=y.device)
    launch_site(call, found, deltas)
    _launch_sum(call, deltas, _sum_kernel(site, options.programmatic))


def launch_site(call: Call, found: Kernels, to: torch.Tensor) -> None:
    """Launch both kernels; `to` [num_tokens, top_k, out_features] is y, or where deltas go."""
    h = _new_h(call.weights, call.shrunk, found.split_k)
    launch_shrink(call, found, h)
    launch_expand(call, found, h, to)


def launch_shrink(call: Call, found: Kernels, h: torch.Tensor) -> None:
    """Write h [planes, places, num_a * padded rank]."""
    x, weights, _, _, ranks, _, shrunk = call
    tensors = (x, weights.lora_a, ranks, shrunk.order, shrunk.tiles, shrunk.count, h)
    strides = (x.stride(0), *_strides(weights.lora_a, 4), *_strides(ranks, 2))
    arguments = Arguments(tensors, (), (weights.in_features, *strides, h.shape[1]))
    found.shrink.launch(shrunk.max_tiles * found.shrink_parts, arguments)


def launch_expand(call: Call, found: Kernels, h: torch.Tensor, to: torch.Tensor) -> None:
    """Add the deltas to `to`, or write them there."""
    _, weights, routing, _, ranks, scalings, _ = call
    b, sizes = weights.lora_b, found.expand.constants
    tma = descriptor(b, sizes["BLOCK_C"], sizes["BLOCK_R"]) if sizes["STAGES"] > 1 else None
    strides = (*_strides(b, 3), *to.stride()[:2], *_strides(ranks, 2), *_strides(scalings, 2))
    tables = (routing.topk_weights, routing.order, routing.tiles, routing.count)
    arguments = Arguments((h, b, to, ranks, scalings, *tables), (tma,), (h.shape[1], *strides))
    found.expand.launch(routing.max_tiles * found.expand_parts, arguments)


def _launch_sum(call: Call, deltas: torch.Tensor, kernel: SpecializedKernel) -> None:
    """Add the sums of deltas over the pairs of a token to y."""
    _, weights, routing, y, ranks, _, _ = call
    tensors = (y, deltas, routing.topk_ids, routing.plan.token_slots(), ranks)
    numbers = (weights.out_features, y.stride(0), *_strides(ranks, 2))
    kernel.launch(routing.num_tokens, Arguments(tensors, (), numbers))


def _new_h(weights: ExpertWeights, routing: SgmvRouting, planes: int) -> torch.Tensor:
    """Return h: [planes, places, num_a * padded rank].

    Partial sums are float32; a single plane has the dtype that h is rounded to for the expand.
    """
    width = weights.num_a * padded_rank(weights.max_rank)
    dtype = torch.float32 if planes > 1 else weights.dtype
    return torch.empty(planes, routing.num_pairs, width, dtype=dtype, device=routing.order.device)


def _strides(tensor: torch.Tensor, count: int) -> tuple[int, ...]:
    """Return the first strides; that of an expert axis of 1 is 0, so every expert reads it."""
    slot, expert, *rest = tensor.stride()[:count]
    return (slot, expert if tensor.shape[1] > 1 else 0, *rest)


def allows_tma(lora_b: torch.Tensor) -> bool:
    """Return whether B can be loaded through TMA.

    B of all slots and experts must form one matrix of 16-bit rows, aligned.
    """
    slot, expert, row, _ = lora_b.stride()
    return (
        lora_b.element_size() == 2
        and lora_b.shape[3] % 8 == 0
        and row >= lora_b.shape[3]
        and row % 8 == 0
        and slot % row == 0
        and expert % row == 0
        and lora_b.data_ptr() % 16 == 0
        and _rows(lora_b) < 2**31
    )


def _rows(lora_b: torch.Tensor) -> int:
    slots, experts, columns, _ = lora_b.shape
    slot, expert, row, _ = lora_b.stride()
    return ((slots - 1) * slot + (experts - 1) * expert) // row + columns


def descriptor(lora_b: torch.Tensor, block_c: int, block_r: int) -> Any:
    """Return the TMA descriptor of a B that `allows_tma`, as one matrix [rows, max_rank]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape = [_rows(lora_b), lora_b.shape[3]]
    return TensorDescriptor(lora_b, shape, [lora_b.stride(2), 1], [block_c, block_r])


def site_of(weights: ExpertWeights, routing: SgmvRouting, *, by_pair: bool, weighted: bool) -> Site:
    """Return what the kernels of a site are compiled for."""
    shared = weights.lora_a.shape[1] == 1 and routing.tokens is not None and not by_pair
    alone = weights.num_a == 1
    interleaved = weights.interleaved and not alone
    slices = weights.output_slices
    if alone or interleaved:
        slices = (weights.out_features,)
    shape = SiteShape(
        weights.num_a,
        weights.max_rank,
        weights.in_features,
        weights.out_features,
        max(slices),
        weights.lora_a.element_size(),
        interleaved,
    )
    top_k, num_a = routing.top_k, weights.num_a
    return Site(shape, slices, num_a, interleaved, top_k, by_pair, shared, weighted)


@lru_cache(maxsize=16384)
def kernels_of(
    pairs: PairShape, shrunk: PairShape, site: Site, fresh: bool, options: Options
) -> Kernels:
    """Return both kernels of a site; `fresh`: the expand writes deltas instead of adding them."""
    tiles = rules.choose_tiles(pairs, site.shape)
    if site.by_token:
        of_tokens = rules.choose_tiles(shrunk, site.shape)
        rows = of_tokens.shrink_rows
        tiles = replace(tiles, shrink=of_tokens.shrink, shrink_rows=rows, eager_a=True)
    return kernels_with(tiles, pairs.tile, shrunk.tile, site, fresh, options)


def kernels_with(
    tiles: SiteTiles, tile: int, shrunk_tile: int, site: Site, fresh: bool, options: Options
) -> Kernels:
    """Return both kernels of a site with the sizes given."""
    long = padded_rank(site.shape.max_rank) > tiles.expand.block_r
    expand = tiles.expand
    if not options.tma or long or site.interleaved or fresh:
        expand = replace(expand, num_stages=1)
    if long or site.interleaved:
        expand = replace(expand, chunks=1)
    tiles = replace(tiles, expand=expand)
    return Kernels(
        _shrink_kernel(tiles, shrunk_tile, site, options._replace(tma=False)),
        _expand_kernel(tiles, tile, site, fresh, options),
        tiles.shrink.split_k,
        max(1, shrunk_tile // tiles.shrink_rows),
        max(1, tile // tiles.expand_rows),
    )


@lru_cache(maxsize=4096)
def _shrink_kernel(tiles: SiteTiles, tile: int, site: Site, options: Options) -> SpecializedKernel:
    shape, sizes, rows = site.shape, tiles.shrink, tiles.shrink_rows
    step = sizes.block_k * sizes.split_k
    programs = -(-shape.stacked // sizes.block_n) * sizes.split_k
    constants = {
        "PROGRAMS": programs,
        "ROWS": rows,
        "PARTS": max(1, tile // rows),
        "TOP_K": 1 if site.by_pair or site.by_token else site.top_k,
        "NUM_A": site.num_a,
        "MAX_RANK": shape.max_rank,
        "RANK_PAD": padded_rank(shape.max_rank),
        "BLOCK_N": sizes.block_n,
        "BLOCK_K": sizes.block_k,
        "WARPS_K": sizes.warps_k,
        "SPLIT_K": sizes.split_k,
        "STEPS": -(-shape.in_features // step),
        "EVEN_K": shape.in_features % step == 0,
        "EAGER": tiles.eager_a,
        "BY_TOKEN": site.by_token,
        "PRECISION": options.precision,
        "INTERPRETED": INTERPRETED,
        "PROGRAMMATIC": options.programmatic,
    }
    return SpecializedKernel(
        kernels.shrink_kernel,
        constants,
        programs,
        sizes.num_warps,
        sizes.num_stages,
        options.programmatic,
    )


@lru_cache(maxsize=4096)
def _expand_kernel(
    tiles: SiteTiles, tile: int, site: Site, fresh: bool, options: Options
) -> SpecializedKernel:
    shape, sizes, rows = site.shape, tiles.expand, tiles.expand_rows
    columns = column_programs(site.slices, sizes)
    constants = {
        "STARTS": columns.starts,
        "FIRST_PROGRAMS": columns.firsts,
        "PROGRAMS": columns.programs,
        "ROWS": rows,
        "PARTS": max(1, tile // rows),
        "TOP_K": site.top_k,
        "NUM_A": site.num_a,
        "SPLIT_K": tiles.shrink.split_k,
        "MAX_RANK": shape.max_rank,
        "RANK_PAD": padded_rank(shape.max_rank),
        "BLOCK_C": sizes.block_c,
        "BLOCK_R": sizes.block_r,
        "CHUNKS": sizes.chunks,
        "STAGES": sizes.num_stages,
        "EVEN_C": columns.even,
        "EVEN_R": shape.max_rank % 8 == 0,
        "EAGER": tiles.eager_b,
        "BY_TOKEN": site.by_token,
        "INTERLEAVED": site.interleaved,
        "WEIGHTED": site.weighted,
        "FRESH": fresh,
        "PRECISION": options.precision,
        "INTERPRETED": INTERPRETED,
        "PROGRAMMATIC": options.programmatic,
    }
    return SpecializedKernel(
        kernels.expand_kernel,
        constants,
        columns.programs,
        sizes.num_warps,
        programmatic=options.programmatic,
    )


@lru_cache(maxsize=1024)
def _sum_kernel(site: Site, programmatic: bool) -> SpecializedKernel:
    starts = [0]
    for width in site.slices[:-1]:
        starts.append(starts[-1] + width)
    programs = -(-site.shape.out_features // 1024)
    constants = {
        "PROGRAMS": programs,
        "STARTS": tuple(starts),
        "TOP_K": site.top_k,
        "NUM_A": site.num_a,
        "BLOCK_C": 1024,
        "INTERLEAVED": site.interleaved,
        "INTERPRETED": INTERPRETED,
        "PROGRAMMATIC": programmatic,
    }
    return SpecializedKernel(kernels.sum_kernel, constants, programs, programmatic=programmatic)
