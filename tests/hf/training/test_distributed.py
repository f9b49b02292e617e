"""Two processes give the gradients of one: DDP, a base that `fully_shard` spreads, and both."""

import json

import pytest
import torch
import torch.distributed as dist
from helpers.adapters.training import PLAIN, WIDE, batch, by_peft, tiny, wrapped
from helpers.distributed import (
    APART,
    ROWS,
    SCENES,
    UPPER,
    WITHOUT,
    alone,
    exact,
    part_of,
    sharded,
    trainer_of,
    work,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lora_backends import InvalidInputError, UnsupportedInputError

ROUNDING = 1e-12  # float64: of sums over rows in another order, relative to the largest gradient


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the gradients of each process in every scene."""
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def assert_equal(ours, expected):
    assert ours.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.any(), key
        assert (ours[key] - gradient).abs().max() <= ROUNDING * gradient.abs().max(), key


@pytest.mark.parametrize("scene", [name for name in SCENES if name != "an adapter each"])
def test_the_gradients_of_one_process_with_the_whole_batch(scene, found):
    rows = APART if "one process" in scene or "other" in scene else ROWS
    rows = WITHOUT if "none" in scene else rows
    expected = alone(rows, configs=(WIDE, UPPER)) if "other layers" in scene else alone(rows)
    assert {key[0] for key in expected} == {*rows} - {None}
    for gradients in found:
        assert_equal(gradients[scene], expected)


def test_processes_with_adapters_of_their_own(found):
    expected = alone(APART)
    for name, gradients in zip("ab", found, strict=True):
        own = {key: g for key, g in expected.items() if key.startswith(name)}
        assert_equal(gradients["an adapter each"], own)


@pytest.fixture
def mesh():
    """Return a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_sharded_base_generates_and_saves(mesh, tmp_path):
    plain, module = trainer_of(tiny()), trainer_of(sharded(tiny()))
    ids, _ = batch(3)
    words = {"adapters": ["a", None, "b"], "max_new_tokens": 3, "pad_token_id": 0}
    tokens = [each.model.generate(ids, **words) for each in (plain, module)]
    assert torch.equal(*tokens)
    for each, name in ((plain, "plain"), (module, "sharded")):
        each.model.save_adapter("a", tmp_path / name)
    configs = [
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("plain", "sharded")
    ]
    assert configs[0] == configs[1]
    assert configs[1]["auto_mapping"]["base_model_class"] == "LlamaForCausalLM"
    loaded = by_peft(tiny(), None, folder=tmp_path / "sharded")
    expected = loaded(input_ids=ids[:1]).logits
    found = module.model(adapters=["a"], input_ids=ids[:1]).logits
    assert torch.allclose(found, expected, atol=1e-5)
    module.model.load_adapter("again", tmp_path / "sharded")
    found = module.model(adapters=["again"], input_ids=ids[:1]).logits
    assert torch.allclose(found, expected, atol=1e-5)


def test_adapters_that_need_whole_weights_are_refused_over_a_sharded_base(mesh, tmp_path):
    by_peft(tiny(), {**PLAIN, "use_dora": True}).save_pretrained(tmp_path / "dora")
    config = {**PLAIN, "modules_to_save": ["lm_head"]}
    by_peft(tiny(), config).save_pretrained(tmp_path / "own")
    model = wrapped(sharded(tiny()))
    for name in ("dora", "own"):
        with pytest.raises(UnsupportedInputError, match="whole weights"):
            model.load_adapter(name, tmp_path / name)
    assert not model.adapters


def test_weights_that_are_spread_in_another_way_are_refused(mesh):
    base = tiny()
    parallelize_module(base.model.layers[1].self_attn.q_proj, mesh, ColwiseParallel())
    with pytest.raises(UnsupportedInputError, match="tensor parallelism"):
        wrapped(base)
    base = tiny()
    fully_shard(base, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(UnsupportedInputError, match="MixedPrecisionPolicy"):
        wrapped(base)
    assert not any(module._forward_hooks for module in base.model.layers.modules())


def test_tensor_parallelism_after_the_wrapper_is_refused_by_its_tensors(mesh):
    base = exact()
    module = trainer_of(base)
    parallelize_module(base.model.layers[1].self_attn.q_proj, mesh, ColwiseParallel())
    rows, ids, labels = part_of(ROWS)
    with pytest.raises(InvalidInputError, match="DTensor"):
        module(adapters=rows, input_ids=ids, labels=labels)
