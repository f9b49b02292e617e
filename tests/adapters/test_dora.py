"""DoRA in a pool: scales of each output from the base weight, in slots that are rewritten."""

from dataclasses import replace

import pytest
import torch

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.adapters import AdapterPool, BaseLayer, Checkpoint, ModuleDelta, ModuleSpec
from lora_backends.adapters.peft import dora

WIDE, HIGH = 6, {"q": 4, "k": 3, "v": 5}
SPECS = {name: ModuleSpec("linear", WIDE, high) for name, high in HIGH.items()}
GENERATOR = torch.Generator().manual_seed(3)
BASE = {
    name: BaseLayer(torch.randn(high, WIDE, generator=GENERATOR), torch.arange(high) + 1.0)
    for name, high in HIGH.items()
}


def delta(name, seed=0, magnitude=True, rank=2):
    generator = torch.Generator().manual_seed(seed)
    high = HIGH[name]
    return ModuleDelta(
        module=name,
        kind="linear",
        rank=rank,
        scaling=0.5,
        lora_a=torch.randn(rank, WIDE, generator=generator),
        lora_b=torch.randn(high, rank, generator=generator),
        bias=None,
        magnitude=torch.randn(high, generator=generator) if magnitude else None,
    )


def checkpoint(tmp_path, *deltas):
    return Checkpoint(tmp_path, {delta.module: delta for delta in deltas}, {})


def scales_of(delta):
    merged = BASE[delta.module].weight + delta.scaling * delta.lora_b @ delta.lora_a
    return delta.magnitude / merged.norm(dim=1)


@pytest.fixture
def pool():
    groups = [("q", "k", "v")]
    return AdapterPool(SPECS, 3, 2, groups=groups, base_layers=BASE.__getitem__)


def test_scales_are_allocated_with_the_first_dora_and_are_1_elsewhere(pool, tmp_path):
    pool.add(
        "plain", checkpoint(tmp_path, delta("q", magnitude=False), delta("k", magnitude=False))
    )
    assert pool.weights("q").output_scales is pool.shared_weights["q"].output_scales is None
    pool.add("dora", checkpoint(tmp_path, delta("q"), delta("v")))
    whole, q, v = pool.shared_weights["q"], pool.weights("q"), pool.weights("v")
    assert pool.weights("k").output_scales is None
    torch.testing.assert_close(q.output_scales[1], scales_of(delta("q")))
    torch.testing.assert_close(v.output_scales[1], scales_of(delta("v")))
    assert q.output_scales.data_ptr() == whole.output_scales.data_ptr()  # one tensor, two views
    assert torch.equal(
        whole.output_scales[1], torch.cat([q.output_scales[1], torch.ones(3), v.output_scales[1]])
    )
    assert (whole.output_scales[[0, 2]] == 1).all()


def test_the_base_bias_is_left_out_of_the_scaling(pool, tmp_path):
    pool.add("dora", checkpoint(tmp_path, delta("q")))
    expected = (1 - scales_of(delta("q"))) * BASE["q"].bias
    torch.testing.assert_close(pool.weights("q").bias[0], expected)


def test_slots_are_rewritten_in_place_and_reset(pool, tmp_path):
    pool.add("a", checkpoint(tmp_path, delta("q")))
    stack = pool.weights("q")
    pool.add("a", checkpoint(tmp_path, delta("q", seed=5)))
    assert pool.weights("q") is stack
    torch.testing.assert_close(stack.output_scales[0], scales_of(delta("q", seed=5)))
    pool.add("a", checkpoint(tmp_path, delta("q", magnitude=False)))
    assert (stack.output_scales == 1).all() and (stack.bias == 0).all()
    pool.add("a", checkpoint(tmp_path, delta("q")))
    pool.unload("a")
    assert (stack.output_scales == 1).all() and (stack.bias == 0).all()


def test_the_scale_of_a_scaled_embedding_is_not_part_of_the_norm(tmp_path):
    spec = ModuleSpec("embedding", WIDE, 4, embed_scale=3.0)
    pool = AdapterPool(
        {"e": spec}, 1, 2, base_layers=lambda path: BaseLayer(BASE["q"].weight, None)
    )
    plain = delta("q")
    pool.add("a", checkpoint(tmp_path, replace(plain, module="e", kind="embedding", scaling=1.5)))
    torch.testing.assert_close(pool.weights("e").output_scales[0], scales_of(plain))
    assert pool.weights("e").bias is None


def test_the_norm_is_computed_in_blocks_of_rows(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(dora, "BLOCK", 2 * WIDE)
    sizes, addmm = [], torch.addmm

    def noting(block, *args, **kwargs):
        sizes.append(len(block))
        return addmm(block, *args, **kwargs)

    monkeypatch.setattr(torch, "addmm", noting)
    pool.add("dora", checkpoint(tmp_path, delta("v")))
    assert sizes == [2, 2, 1]
    torch.testing.assert_close(pool.weights("v").output_scales[0], scales_of(delta("v")))


def test_the_norm_is_that_of_the_file_and_not_of_rounded_weights(tmp_path):
    pool = AdapterPool(SPECS, 1, 2, torch.bfloat16, base_layers=BASE.__getitem__)
    pool.add("dora", checkpoint(tmp_path, delta("q")))
    torch.testing.assert_close(pool.weights("q").output_scales[0], scales_of(delta("q")))


def refused(pool, error, told, *deltas, folder):
    before = {n: [t.clone() for t in w.tensors.values()] for n, w in pool.active_weights.items()}
    names = pool.slots.names
    with pytest.raises(error, match=told):
        pool.add("new", checkpoint(folder, *deltas))
    assert pool.slots.names == names
    for name, tensors in before.items():
        now = pool.active_weights[name].tensors.values()
        assert all(map(torch.equal, tensors, now))


def test_what_dora_cannot_divide_by_is_refused_before_anything_is_written(pool, tmp_path):
    pool.add("dora", checkpoint(tmp_path, delta("q"), delta("v")))
    zero = replace(delta("v"), lora_b=torch.zeros(5, 2))
    for weight in (
        torch.zeros(5, WIDE),
        torch.full((5, WIDE), torch.nan),
        torch.full((5, WIDE), 3e38),
    ):
        bases = {**BASE, "v": BaseLayer(weight, None)}
        pool._staging._base_layers = bases.__getitem__
        refused(
            pool, InvalidInputError, "no norm to divide by", delta("q", 1), zero, folder=tmp_path
        )
    pool._staging._base_layers = {**BASE, "v": BASE["q"]}.__getitem__
    refused(pool, InvalidInputError, "wrong shape", delta("q", 1), delta("v"), folder=tmp_path)


def test_a_pool_without_base_weights_refuses_dora_by_name(tmp_path):
    pool = AdapterPool(SPECS, 2, 2)
    pool.add("plain", checkpoint(tmp_path, delta("q", magnitude=False)))
    refused(pool, UnsupportedInputError, "use_dora[^$]*base_layers", delta("q"), folder=tmp_path)


@pytest.mark.parametrize("wrong", [{"magnitude": torch.ones(5)}, {"bias": torch.ones(4)}])
def test_a_magnitude_of_another_shape_or_with_a_bias_is_refused(pool, tmp_path, wrong):
    refused(pool, InvalidInputError, "magnitude", replace(delta("q"), **wrong), folder=tmp_path)
