"""The search for tile sizes, on made-up times."""

import random
from dataclasses import dataclass

import pytest

from lora_backends.bench.search import RulesFail, far_away, fastest, neighbours, search
from lora_backends.sgmv.tiles.gpu import H200
from lora_backends.sgmv.tiles.rules import choose_tiles
from lora_backends.sgmv.tiles.sizes import BatchShape, LayerShape, tile_faults


@dataclass(frozen=True)
class Half:
    width: int
    warps: int


@dataclass(frozen=True)
class Sizes:
    shrink: Half
    expand: Half


WIDTHS, WARPS = (16, 32, 64, 128), (1, 2, 4, 8)
RULES = Sizes(Half(32, 4), Half(32, 4))
BEST = Sizes(Half(128, 1), Half(64, 8))


def _steps(tiles):
    """Return how many steps the sizes are away from the best ones."""
    return sum(
        abs(WIDTHS.index(mine.width) - WIDTHS.index(best.width))
        + abs(WARPS.index(mine.warps) - WARPS.index(best.warps))
        for mine, best in ((tiles.shrink, BEST.shrink), (tiles.expand, BEST.expand))
    )


def _legal(tiles):
    return all(h.width in WIDTHS and h.warps in WARPS for h in (tiles.shrink, tiles.expand))


class MadeUp:
    """A lab whose times are known; each timing is up to `noise` too long."""

    def __init__(self, time, noise=0.0, broken=()):
        self.time, self.noise, self.broken = time, noise, broken
        self.random = random.Random(0)
        self.prepared, self.samples = set(), []

    def prepare(self, tiles):
        if tiles in self.broken:
            return "OutOfResources: too much"
        self.prepared.add(tiles)
        return None

    def sample(self, tiles):
        assert tiles in self.prepared, "timed without a check"
        self.samples.append(tiles)
        return self.time(tiles) * (1 + self.noise * self.random.random())

    def keep(self, kept):
        self.prepared &= set(kept)


def _climb(tiles):
    return 10.0 * 1.2 ** _steps(tiles)


def _search(lab, in_use=RULES, legal=_legal, out_of_time=lambda: False):
    return search(RULES, [in_use], legal, lab, out_of_time)


def test_a_neighbour_differs_in_one_size():
    found = neighbours(Sizes(Half(2, 1), Half(16, 4)))
    assert Sizes(Half(4, 1), Half(16, 4)) in found and Sizes(Half(2, 1), Half(16, 5)) in found
    assert len(found) == len(set(found))
    for tiles in found:
        pairs = ((2, tiles.shrink.width), (1, tiles.shrink.warps))
        pairs += ((16, tiles.expand.width), (4, tiles.expand.warps))
        assert sum(old != new for old, new in pairs) == 1 and all(new > 0 for _, new in pairs)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fastest_sizes_are_found_though_both_halves_have_to_change(noise):
    found = _search(MadeUp(_climb, noise))
    assert found.tiles == BEST
    assert found.rules_us / found.tuned_us == pytest.approx(1.2 ** _steps(RULES), rel=0.1)


def test_noise_does_not_choose():
    """All sizes are equally fast: none of 20 searches may leave the rules."""
    for seed in range(20):
        lab = MadeUp(lambda _: 10.0, noise=0.05)
        lab.random.seed(seed)
        found = _search(lab)
        assert found.tiles == RULES and found.tuned_us == found.rules_us


def test_a_gain_below_the_margin_leaves_the_rules():
    found = _search(MadeUp(lambda tiles: 10.0 if tiles == RULES else 9.95))
    assert found.tiles == RULES


def test_sizes_that_fail_are_counted_and_never_timed():
    broken = {Sizes(Half(64, 4), RULES.expand), Sizes(Half(32, 2), RULES.expand)}
    lab = MadeUp(_climb, broken=broken)
    found = _search(lab)
    assert found.failed == ("OutOfResources: too much",) * 2
    assert not broken & set(lab.samples)


def test_sizes_that_kernels_cannot_take_are_not_tried():
    lab = MadeUp(_climb)
    found = _search(lab, legal=lambda tiles: _legal(tiles) and tiles.shrink.width <= 64)
    assert found.tiles.shrink.width == 64
    assert max(tiles.shrink.width for tiles in lab.samples) == 64


def test_without_time_the_rules_are_timed_alone():
    lab = MadeUp(_climb)
    found = _search(lab, in_use=BEST, out_of_time=lambda: True)
    assert found.tried == 0 and set(lab.samples) == {RULES} and found.tiles == RULES


def test_a_search_begins_with_the_sizes_in_use():
    left = iter([False] + [True] * 100)  # time for one candidate
    found = _search(MadeUp(_climb, noise=0.05), in_use=BEST, out_of_time=lambda: next(left))
    assert found.tiles == BEST and found.tried == 1


def test_the_search_leaves_a_valley_for_a_start_far_away():
    def valley(tiles):
        return 9.0 if tiles == BEST else 10.0 + _steps(Sizes(RULES.shrink, tiles.expand))

    start = Sizes(BEST.shrink, Half(64, 4))
    assert _search(MadeUp(valley)).tiles != BEST
    lab = MadeUp(lambda tiles: 9.5 if tiles == start else valley(tiles))
    assert search(RULES, [RULES, start], _legal, lab, lambda: False).tiles == BEST


@pytest.mark.parametrize("tokens, slots, tile", [(1, 1, 16), (64, 8, 16), (256, 8, 32)])
def test_starts_far_away_differ_in_the_parts_of_the_inputs_and_run(tokens, slots, tile):
    batch, layer = BatchShape(tokens, slots, tile), LayerShape(3, 64, 4096, 6144, 2)
    rules = choose_tiles(batch, layer, H200)
    found = far_away(rules, batch, layer, H200)
    assert len(found) >= 2 and len({tiles.shrink.split_k for tiles in found}) == len(found)
    for tiles in found:
        assert tiles.expand == rules.expand and tiles.shrink.warps_k == 4
        assert not tile_faults(tiles, tile, layer, H200)


def test_sizes_in_use_that_are_slow_fail_or_are_illegal_are_left_for_the_rules():
    slow = Sizes(Half(16, 8), Half(16, 1))
    one = lambda time: iter([False] * time + [True] * 100).__next__  # noqa: E731
    assert _search(MadeUp(_climb), in_use=slow, out_of_time=one(1)).tiles == RULES
    broken = _search(MadeUp(_climb, broken={BEST}), in_use=BEST, out_of_time=one(1))
    assert broken.tiles == RULES and len(broken.failed) == 1
    illegal = _search(MadeUp(_climb), in_use=BEST, legal=lambda tiles: False)
    assert illegal.tiles == RULES and illegal.tried == 0


def test_rules_that_cannot_be_run_are_an_error():
    with pytest.raises(RulesFail, match="OutOfResources"):
        _search(MadeUp(_climb, broken={RULES}))


def test_rivals_are_timed_in_turns():
    """A device that gets slower while it is timed must not favour the first."""
    clock = iter(range(1, 10_000))
    rivals = [Sizes(Half(width, 1), RULES.expand) for width in (16, 32, 64, 128, 256, 512)]
    true = dict(zip(rivals, (10, 10, 10, 10, 10, 8), strict=True))
    assert fastest(rivals, lambda tiles: true[tiles] * (1 + next(clock) / 100)) == rivals[5]
