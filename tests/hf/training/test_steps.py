"""Whole trainings: optimizers, modes, adapters that come and go, files, and generation."""

import json

import pytest
import torch
from helpers.adapters.training import (
    PATTERNS,
    PLAIN,
    WIDE,
    Pair,
    batch,
    by_peft,
    causal_loss,
    parameters_of,
    shake,
    tiny,
    train_step,
    wrapped,
)

from lora_backends import (
    InvalidInputError,
    UnsupportedInputError,
    backend_names,
    unavailable_reasons,
)

BACKENDS = [name for name in backend_names() if not unavailable_reasons(name, "cpu")]
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.01),
    # A large eps: Adam would blow the rounding of tiny gradients up to whole steps.
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3),
}


def step(model, pairs, optimizers, rows, seed):
    ids, labels = batch(len(rows), seed=seed)
    losses = train_step(model, rows, ids, labels)
    for pair in pairs:
        expected = pair.backward(rows, ids, labels)
        if expected is not None:
            assert torch.allclose(losses[pair.name], expected, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers[pair.name]:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "backend, fuse, dtype",
    [("torch_ref", False, torch.float64)]
    + [(name, fuse, torch.float32) for name in BACKENDS for fuse in (False, True)],
)
def test_20_steps_with_adapters_that_come_and_go(kind, backend, fuse, dtype):
    if backend in ("triton", "csgmv") and kind == "SGD":
        pytest.skip("the interpreter is slow")
    model = wrapped(tiny(dtype=dtype), backend, max_adapters=3, fuse=fuse)
    pairs, optimizers = [], {}

    def add(name, config):
        pair = Pair(model, name, tiny(dtype=dtype), config, seed=len(optimizers), std=0)
        pairs.append(pair)
        optimizers[name] = [OPTIMIZERS[kind](p.values()) for p in (pair.ours, pair.theirs)]

    add("a", PLAIN)
    add("b", WIDE)
    mixes = [["a", "b", None, "a"], ["b", None], ["a", "b"]]
    for turn in range(10):
        step(model, pairs, optimizers, mixes[turn % 3], turn)
    gone = pairs.pop(0)
    model.unload_adapter("a")
    add("c", PATTERNS)
    mixes = [["c", "b", None, "b"], ["c", "c"], ["b", "c"]]
    kept = {key: p.detach().clone() for key, p in gone.ours.items()}
    for turn in range(10, 20):
        step(model, pairs, optimizers, mixes[turn % 3], turn)
    for pair in [gone, *pairs]:
        pair.check(2e-4, "values")
        assert any(p.abs().max() > 0.01 for k, p in pair.ours.items() if "lora_B" in k)
    assert all(torch.equal(gone.ours[key], value) for key, value in kept.items())


def test_parameters_of_an_unloaded_adapter_have_no_effect():
    model = wrapped(tiny(), max_adapters=1)
    old = Pair(model, "old", tiny(), PLAIN)
    model.unload_adapter("old")
    new = Pair(model, "new", tiny(), PLAIN, seed=4)
    assert old.ours["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].is_contiguous()
    with torch.no_grad():
        for parameter in old.ours.values():
            parameter.fill_(torch.nan)
    ids, _ = batch(1)
    expected = new.peft(input_ids=ids).logits
    assert torch.allclose(model(adapters=["new"], input_ids=ids).logits, expected, atol=1e-5)
    with pytest.raises(InvalidInputError, match="not loaded"):
        model.adapter_parameters("old")


def test_a_trained_adapter_keeps_its_slot(tmp_path):
    model = wrapped(tiny(), max_adapters=2)
    pair = Pair(model, "a", tiny(), PLAIN)
    model.save_adapter("a", tmp_path)
    for name in ("x", "y", "z"):  # each evicts the one before
        model.load_adapter(name, tmp_path)
    assert sorted(model.adapters) == ["a", "z"]
    with pytest.raises(InvalidInputError, match="being trained, so it cannot be replaced"):
        model.load_adapter("a", tmp_path, replace_existing=True)
    with pytest.raises(InvalidInputError, match="being trained, so it cannot be updated"):
        model.update_adapter("a", pair.peft)
    model.pin_adapter("a")
    with pytest.raises(InvalidInputError, match="pinned, so it cannot be unloaded"):
        model.unload_adapter("a")
    assert model.adapter_parameters("a").keys() == pair.ours.keys()
    model.unpin_adapter("a")
    model.load_adapter("w", tmp_path)
    assert "a" in model.adapters
    model.unload_adapter("a")
    model.load_adapter("a", tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [WIDE, PATTERNS], ids=["wide", "patterns"])
def test_peft_loads_what_is_saved(config, dtype, tmp_path):
    model = wrapped(tiny(dtype=dtype))
    options = {"dtype": torch.float32} if dtype == torch.bfloat16 else {}
    pair = Pair(model, "a", tiny(dtype=dtype), {**config, "lora_dropout": 0.1}, **options)
    ids, labels = batch(2)
    train_step(model, ["a", "a"], ids, labels)
    torch.optim.SGD(pair.ours.values(), lr=0.1).step()
    folder = model.save_adapter("a", tmp_path / "of" / "a")
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    pair.peft.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        json.loads((each / "adapter_config.json").read_text())
        for each in (folder, tmp_path / "theirs")
    )
    for values in (ours, theirs):
        values["target_modules"].sort()  # PEFT writes a set in any order
    assert ours == theirs
    loaded = by_peft(tiny(dtype=dtype), None, folder=folder)
    theirs = parameters_of(loaded)
    assert all(torch.equal(theirs[key], value) for key, value in pair.ours.items())
    if dtype == torch.float32:
        logits = loaded(input_ids=ids).logits
        assert torch.allclose(model(adapters=["a", "a"], input_ids=ids).logits, logits, atol=1e-5)
    model.load_adapter("again", folder, trainable=True, **options)
    again = model.adapter_parameters("again")
    assert all(torch.equal(again[key], value) for key, value in pair.ours.items())
    with torch.no_grad():
        same = [model(adapters=[name], input_ids=ids[:1]).logits for name in ("a", "again")]
    assert torch.equal(*same)
    model.save_adapter("again", folder)  # over the old files
    again = json.loads((folder / "adapter_config.json").read_text())
    assert again == {**ours, "target_modules": again["target_modules"]}


def test_a_loaded_adapter_is_trained_on(tmp_path):
    trained = by_peft(tiny(), PATTERNS, seed=1)
    shake(parameters_of(trained))
    trained.save_pretrained(tmp_path)
    model = wrapped(tiny())
    model.load_adapter("a", tmp_path, trainable=True)
    ours, theirs = model.adapter_parameters("a"), parameters_of(trained)
    ids, labels = batch(3)
    rows = ["a", None, "a"]
    train_step(model, rows, ids, labels)
    causal_loss(trained(input_ids=ids[[0, 2]]).logits, labels[[0, 2]]).backward()
    for key, parameter in ours.items():
        room = 2e-5 * max(1e-3, theirs[key].grad.abs().max().item())
        assert (parameter.grad - theirs[key].grad).abs().max() <= room


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("feature", ["use_dora", "lora_bias", "modules_to_save"])
def test_loaded_adapters_with_features_that_are_not_trained_are_refused(feature, tmp_path):
    value = {"use_dora": True, "lora_bias": True, "modules_to_save": ["lm_head"]}[feature]
    trained = by_peft(tiny(), {"r": 2, "target_modules": ["q_proj"], feature: value})
    trained.save_pretrained(tmp_path)
    model = wrapped(tiny())
    with pytest.raises(UnsupportedInputError, match=feature):
        model.load_adapter("a", tmp_path, trainable=True)
    assert model.adapters == []
    model.load_adapter("a", tmp_path)


def test_a_batch_with_an_adapter_that_has_modules_of_its_own_is_refused(tmp_path):
    trained = by_peft(
        tiny(), {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    )
    trained.base_model.model.lm_head.modules_to_save["default"].weight.data += 0.1
    trained.save_pretrained(tmp_path)
    model = wrapped(tiny())
    model.load_adapter("own", tmp_path)
    Pair(model, "a", tiny(), PLAIN)
    ids, _ = batch(2)
    with pytest.raises(UnsupportedInputError, match="'own' has modules of its own"):
        model(adapters=["a", "own"], input_ids=ids)
    with torch.no_grad():
        model(adapters=["a", "own"], input_ids=ids)


def test_a_frozen_adapter_with_dora_passes_gradients_on(tmp_path):
    """A row's tokens of an adapter in training see those of one with output_scales."""
    trained = by_peft(tiny(), {"r": 2, "target_modules": ["v_proj", "o_proj"], "use_dora": True})
    shake(parameters_of(trained))
    trained.save_pretrained(tmp_path)
    found = []
    for fuse in (False, True):
        model = wrapped(tiny(), fuse=fuse)
        model.load_adapter("dora", tmp_path)
        pair = Pair(model, "a", tiny(), PLAIN)
        ids, _ = batch(1)
        rows = [["a", "dora", "a", None, "dora", "a", "a", "dora", "a"]]

        def loss(model=model, ids=ids, rows=rows):
            return model(adapters=rows, input_ids=ids).logits.float().log_softmax(-1)[..., 3].sum()

        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
        parameter = pair.ours[key]
        loss().backward()
        found.append(parameter.grad.clone())
        # along the gradient, by finite differences
        direction = parameter.grad / parameter.grad.norm()
        with torch.no_grad():
            parameter += 0.01 * direction
            up = loss()
            parameter -= 0.02 * direction
            down = loss()
        assert abs((up - down) / 0.02 - parameter.grad.norm()) <= 0.02 * parameter.grad.norm()
    assert torch.allclose(*found, atol=1e-6)


def test_saving_to_a_file_or_of_another_adapter_is_refused(tmp_path):
    model = wrapped(tiny())
    Pair(model, "a", tiny(), PLAIN)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="is a file"):
        model.save_adapter("a", tmp_path / "file")
    with pytest.raises(InvalidInputError, match="cannot write"):
        model.save_adapter("a", tmp_path / "file" / "folder")
    model.save_adapter("a", tmp_path / "a")
    model.load_adapter("frozen", tmp_path / "a")
    with pytest.raises(InvalidInputError, match="loaded, and not trained"):
        model.save_adapter("frozen", tmp_path / "b")
    with pytest.raises(InvalidInputError, match="trainable=True"):
        model.load_adapter("b", tmp_path / "a", dtype=torch.float32)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_every_way_of_running_sees_the_last_step(dtype):
    model = wrapped(tiny(dtype=torch.bfloat16), fuse=False)
    pair = Pair(model, "a", tiny(dtype=torch.bfloat16), WIDE, dtype=dtype)
    ids, labels = batch(2)
    prepared = model.prepare(["a", "a"], tokens=9)
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True,
               "return_dict_in_generate": True, "pad_token_id": 0}  # fmt: skip
    seen = []
    for _ in range(3):
        train_step(model, ["a", "a"], ids, labels)
        torch.optim.SGD(pair.ours.values(), lr=3.0).step()
        with torch.no_grad():
            generated = model.generate(ids, adapters=["a", "a"], **options).logits[0]
            called = model(adapters=["a", "a"], input_ids=ids).logits
            again = model(adapters=prepared, input_ids=ids).logits
            with model.using(prepared):
                within = model.base(input_ids=ids).logits
        assert torch.allclose(generated.float(), called[:, -1].float(), atol=0.05)
        assert torch.equal(again, called) and torch.equal(within, called)
        with torch.no_grad():
            fresh = wrapped(tiny(dtype=torch.bfloat16), fuse=False)
            fresh.add_adapter("a", {k: p.bfloat16() for k, p in pair.ours.items()},
                              pair.peft.peft_config["default"])  # fmt: skip
            assert torch.equal(fresh(adapters=["a", "a"], input_ids=ids).logits, called)
        seen.append(called)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_parameters_with_other_memory_are_refused():
    model = wrapped(tiny())
    pair = Pair(model, "a", tiny(), PLAIN)
    parameter = next(iter(pair.ours.values()))
    parameter.data = parameter.data.clone()
    ids, _ = batch(1)
    with pytest.raises(InvalidInputError, match="other memory[\\s\\S]*q_proj.lora_A"):
        model(adapters=["a"], input_ids=ids)


def test_losses_are_those_of_each_adapters_own_labels():
    model = wrapped(tiny())
    logits = torch.randn(4, 5, 7, requires_grad=True)
    labels = torch.randint(0, 7, (4, 5))
    labels[0] = labels[1, :4] = -100
    losses = model.adapter_losses(logits, labels, adapters=["a", "b", None, "b"])
    expected = torch.nn.functional.cross_entropy(
        logits[[1, 3], :-1].flatten(0, 1), labels[[1, 3], 1:].flatten()
    )
    assert [*losses] == ["a", "b"] and losses["a"] == 0
    assert torch.allclose(losses["b"], expected)
    sum(losses.values()).backward()
    assert not logits.grad[[0, 2]].any() and logits.grad[3].any()
    narrow = model.adapter_losses(logits.bfloat16(), labels, adapters=["a", None, "b", None])
    assert narrow["b"].dtype == torch.float32
    for wrong in ([logits[0], labels], [logits, labels[:3]], [logits, labels[:, :4]]):
        with pytest.raises(InvalidInputError, match="belong together"):
            model.adapter_losses(*wrong, adapters=["a"] * 4)
    with pytest.raises(InvalidInputError, match="belong together"):
        model.adapter_losses(logits, labels, adapters=["a"] * 3)
