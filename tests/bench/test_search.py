"""The search for tile sizes, with times that are made up."""

import random
from dataclasses import astuple, dataclass

import pytest

from lora_backends.bench.search import RulesFail, fastest, search


@dataclass(frozen=True)
class Half:
    width: int
    warps: int = 4


@dataclass(frozen=True)
class Sizes:
    shrink: Half
    expand: Half


RULES = Sizes(Half(16), Half(16))
WIDTHS, WARPS = (16, 32, 64, 128, 256), (1, 2, 4, 8)
HALVES = [Half(width, warps) for width in WIDTHS for warps in WARPS]
CANDIDATES = [Sizes(h, RULES.expand) for h in HALVES] + [Sizes(RULES.shrink, h) for h in HALVES]
BEST = Sizes(Half(128, 2), Half(64, 8))


def _steps(tiles):
    """Return how many doublings lie between some sizes and the best."""
    pairs = zip(astuple(tiles.shrink) + astuple(tiles.expand), (128, 2, 64, 8), strict=True)
    return sum(abs(a.bit_length() - b.bit_length()) for a, b in pairs)


class MadeUp:
    """A lab whose times are a function, with noise; it remembers what it was asked."""

    def __init__(self, time, noise=0.0, broken=()):
        self.time, self.noise, self.broken = time, noise, set(broken)
        self.random, self.prepared, self.samples = random.Random(0), set(), []

    def prepare(self, candidates):
        good = [tiles for tiles in candidates if tiles not in self.broken]
        self.prepared.update(good)
        return {tiles: "OutOfResources: too much" for tiles in candidates if tiles in self.broken}

    def sample(self, tiles):
        assert tiles in self.prepared, "timed without a check"
        self.samples.append(tiles)
        return self.time(tiles) * (1 + self.noise * self.random.random())

    def keep(self, candidates):
        self.prepared &= set(candidates)


def _search(lab, legal=lambda _: True, out_of_time=lambda: False):
    return search(RULES, CANDIDATES, legal, lab, out_of_time)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fastest_sizes_are_found_though_both_halves_have_to_change(noise):
    found = _search(MadeUp(lambda tiles: 10.0 * 1.2 ** _steps(tiles), noise))
    assert found.tiles == BEST
    assert found.rules_us / found.tuned_us == pytest.approx(1.2 ** _steps(RULES), rel=0.1)


def test_noise_does_not_choose():
    """All sizes are equally fast: of 20 searches none may leave the rules."""
    for seed in range(20):
        lab = MadeUp(lambda _: 10.0, noise=0.05)
        lab.random.seed(seed)
        found = _search(lab)
        assert found.tiles == RULES and found.tuned_us == found.rules_us


def test_a_gain_below_the_margin_leaves_the_rules():
    found = _search(MadeUp(lambda tiles: 10.0 if tiles == RULES else 9.95))
    assert found.tiles == RULES


def test_sizes_that_fail_are_counted_and_never_timed():
    broken = {tiles for tiles in CANDIDATES if tiles.shrink.width == 128}
    lab = MadeUp(lambda tiles: 10.0 * 1.2 ** _steps(tiles), broken=broken)
    found = _search(lab)
    assert len(found.failed) >= 1 and set(found.failed) == {"OutOfResources: too much"}
    assert not broken & set(lab.samples)


def test_sizes_that_kernels_cannot_take_are_not_tried():
    lab = MadeUp(lambda tiles: 10.0 * 1.2 ** _steps(tiles))
    found = _search(lab, legal=lambda tiles: tiles.shrink.width <= 64)
    assert found.tiles.shrink.width == 64
    assert max(tiles.shrink.width for tiles in lab.samples) == 64


def test_without_time_the_rules_are_timed_alone():
    lab = MadeUp(lambda _: 10.0)
    found = _search(lab, out_of_time=lambda: True)
    assert found.tried == 0 and set(lab.samples) == {RULES} and found.rules_us == 10.0


def test_a_search_begins_with_known_sizes_and_is_never_worse():
    lab = MadeUp(lambda tiles: 10.0 * 1.2 ** _steps(tiles), noise=0.05)
    rounds = iter([False] + [True] * 100)  # time for one round
    found = search(RULES, CANDIDATES, lambda _: True, lab, lambda: next(rounds), [RULES, BEST])
    assert found.tiles == BEST and found.tried == 1
    slow = Sizes(Half(16, 1), Half(16, 1))
    found = search(RULES, CANDIDATES, lambda _: True, lab, lambda: False, [slow, BEST])
    assert found.tiles == BEST
    illegal = search(RULES, [RULES], lambda tiles: tiles != BEST, lab, lambda: False, [BEST])
    assert illegal.tiles == RULES


def test_known_sizes_that_fail_are_counted():
    lab = MadeUp(lambda tiles: 10.0 * 1.2 ** _steps(tiles), broken={BEST})
    found = search(RULES, [RULES], lambda _: True, lab, lambda: False, [BEST])
    assert found.tiles == RULES and len(found.failed) == 1


def test_rules_that_cannot_be_run_are_told():
    with pytest.raises(RulesFail, match="OutOfResources"):
        _search(MadeUp(lambda _: 10.0, broken={RULES}))


def test_rivals_are_timed_in_turns():
    """A device that gets slower while it is timed must not favour who came first."""
    clock = iter(range(1, 10_000))
    rivals = CANDIDATES[:6]
    true = dict(zip(rivals, (10, 10, 10, 10, 10, 8), strict=True))
    assert fastest(rivals, lambda tiles: true[tiles] * (1 + next(clock) / 100)) == rivals[5]
