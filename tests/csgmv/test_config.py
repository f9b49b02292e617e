import itertools

import pytest

from lora_backends.csgmv.config import (
    SEGMENT_SIZES,
    candidates,
    segment_and_group,
)
from lora_backends.gpu.config import Problem, row_tokens, tiles_for
from lora_backends.gpu.tiles import WIDEST_RANK_BLOCK, padded_rank

TOKENS = [(0, 0), (1, 1), (16, 8), (64, 64), (256, 8), (512, 512), (2048, 8), (100_000, 3)]
SLICES, RANKS = (1, 2, 3, 7), (1, 8, 16, 33, 64, 128, 512)
WIDTHS = [(1, 1), (5, 3), (4096, 4096), (4096, 28672), (14336, 4096), (128_256, 4096)]


def _problems(sizes=(16, 64, 128, "auto")):
    for (tokens, active), size, slices, rank, (inputs, outputs), item_bytes in itertools.product(
        TOKENS, sizes, SLICES, RANKS, WIDTHS, (2, 4)
    ):
        segment, group = segment_and_group(size, tokens, active)
        yield Problem(tokens, active, segment * group, slices, rank, inputs, outputs, item_bytes)


def _is_power_of_two(value):
    return value & (value - 1) == 0


def _check(problem, tiles):
    shrink, expand, rank_pad = tiles.shrink, tiles.expand, padded_rank(problem.max_rank)
    for size in (problem.row_tokens, shrink.block_n, expand.block_c, expand.block_r):
        assert size >= 16 and _is_power_of_two(size)
    assert _is_power_of_two(shrink.block_k) and shrink.block_k >= 16 * shrink.warps_k
    assert 1 <= shrink.split_k <= 32 and shrink.warps_k <= shrink.num_warps
    assert expand.block_r <= min(rank_pad, WIDEST_RANK_BLOCK)
    assert expand.chunks == 1 or expand.block_r == rank_pad
    stage = shrink.block_k * (shrink.block_n + problem.row_tokens) * problem.item_bytes
    assert stage * shrink.num_stages <= 160 * 1024  # shared memory of the smallest target


def test_sizes_of_any_problem_are_ones_that_the_kernels_take():
    for problem in _problems():
        _check(problem, tiles_for(problem))


def test_candidates_are_distinct_valid_and_start_with_the_chosen():
    for problem in itertools.islice(_problems((16, "auto")), 0, None, 23):
        found = list(candidates(problem))
        assert found[0] == tiles_for(problem)
        assert len(set(found)) == len(found) > 1
        for tiles in found:
            _check(problem, tiles)
            assert tiles.shrink == found[0].shrink or tiles.expand == found[0].expand


def test_a_lone_token_of_rank_16_is_split_over_many_programs():
    tiles = tiles_for(Problem(1, 1, 16, 1, 16, 4096, 4096, 2))
    assert tiles.shrink.split_k == 16


def test_parts_of_the_inputs_are_equal():
    for inputs in (4096, 14336):
        for tokens, active in TOKENS[1:]:
            problem = Problem(tokens, active, row_tokens(tokens, active), 1, 16, inputs, 4096, 2)
            assert (inputs // 256) % tiles_for(problem).shrink.split_k == 0


@pytest.mark.parametrize("tokens, active", TOKENS)
def test_segments_and_groups_make_rows_of_the_tokens_wanted(tokens, active):
    assert segment_and_group("auto", tokens, active) == (row_tokens(tokens, active), 1)
    for size in SEGMENT_SIZES:
        segment, group = segment_and_group(size, tokens, active)
        assert segment == size and segment * group == max(size, row_tokens(tokens, active))
