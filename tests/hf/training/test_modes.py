"""Training mode, dropout, and gradient checkpointing."""

import threading
import warnings

import peft
import pytest
import torch
import transformers
from helpers.adapters.training import PATTERNS, PLAIN, WIDE, Pair, batch, tiny, train_step, wrapped
from torch.utils.checkpoint import checkpoint

from lora_backends import InvalidInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.calls.running import TRAINED

ROWS = ["a", None, "b", "a", "b"]
BOUND = 2e-5


def train(model, *pairs):
    assert model.train() is model and model.training
    for pair in pairs:
        pair.peft.train()


def enable_checkpointing(base, reentrant):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base.gradient_checkpointing_enable({"use_reentrant": reentrant})


def test_training_mode_without_an_adapter_that_is_trained_is_refused():
    model = wrapped(tiny()).train()
    ids, _ = batch(1)
    with pytest.raises(InvalidInputError, match="training mode"):
        model(adapters=[None], input_ids=ids)
    Pair(model, "a", tiny(), PLAIN)
    model(adapters=[None], input_ids=ids)
    with torch.no_grad():
        model(adapters=["a"], input_ids=ids)
        model.generate(ids, adapters=["a"], max_new_tokens=2, pad_token_id=0)
    model.unload_adapter("a")
    with pytest.raises(InvalidInputError, match="training mode"):
        model(adapters=[None], input_ids=ids)
    assert model.eval() is model and not model.training and not model.base.training


@pytest.mark.parametrize("fuse", [False, True])
def test_a_dropout_of_all_or_nothing_is_exact(fuse):
    """p is 1: PEFT drops all of the LoRA; in eval mode nothing; p is 0: nothing."""
    model = wrapped(tiny(), fuse=fuse)
    pairs = [
        Pair(model, "a", tiny(), {**WIDE, "lora_dropout": 1.0}),
        Pair(model, "b", tiny(), {**PATTERNS, "lora_dropout": 0.0}),
    ]
    ids, labels = batch(len(ROWS))
    train(model, *pairs)
    losses = train_step(model, ROWS, ids, labels)
    for pair in pairs:
        assert torch.allclose(losses[pair.name], pair.backward(ROWS, ids, labels), rtol=1e-5)
        pair.check(BOUND)
    assert not any(p.grad.any() for key, p in pairs[0].ours.items())
    model.eval()
    pairs[0].peft.eval()
    loss = train_step(model, ROWS, ids, labels)["a"]
    assert torch.allclose(loss, pairs[0].backward(ROWS, ids, labels), rtol=1e-5)


def test_dropout_has_the_distribution_of_peft_on_its_own_rows():
    """The mean and the spread over many draws of one module's output are PEFT's, per row."""
    config = {"r": 4, "target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0]}
    model = wrapped(tiny(), fuse=True)
    rates = {"a": 0.5, "b": 0.1, "c": 0.0}
    pairs = {
        name: Pair(model, name, tiny(), {**config, "lora_dropout": p}, std=0.5, seed=at)
        for at, (name, p) in enumerate(rates.items())
    }
    train(model, *pairs.values())
    rows = ["a", "b", None, "c"]
    ids, _ = batch(1, length=3)
    draws, found = 200, []
    for layer, path in ((model.base, "q_proj"), *((pairs[n].peft, "q_proj") for n in rates)):
        outputs = []
        owner = layer if layer is model.base else layer.base_model.model
        module = owner.model.layers[0].self_attn.get_submodule(path)
        handle = module.register_forward_hook(lambda *call, kept=outputs: kept.append(call[2]))
        torch.manual_seed(0)
        with torch.no_grad():
            for _ in range(draws):
                if layer is model.base:
                    model(adapters=rows, input_ids=ids.expand(len(rows), -1))
                else:
                    layer(input_ids=ids)
        handle.remove()
        found.append(torch.stack(outputs))
    ours, theirs = found[0], dict(zip(rates, found[1:], strict=True))
    assert torch.equal(ours[0, 2], ours[1, 2]) and torch.equal(ours[0, 3], ours[1, 3])
    for row, name in ((0, "a"), (1, "b")):
        mine, other = ours[:, row], theirs[name][:, 0]
        spread = other.std(0)
        # Means of 200 draws differ by less than 6 of their standard deviations, sqrt(2 / 200).
        assert ((mine.mean(0) - other.mean(0)).abs() <= 6 * spread * (2 / draws) ** 0.5).all()
        # A standard deviation of 200 draws has a relative error of about 1 / sqrt(400).
        assert ((mine.std(0) / spread - 1).abs() < 0.4).all() and (spread > 0).all()
    assert torch.allclose(ours[0, 3], theirs["c"][0, 0], atol=1e-5)


def test_siblings_drop_different_elements():
    config = {"r": 16, "lora_alpha": 16, "target_modules": ["gate_proj", "up_proj"]}
    model = wrapped(tiny(), max_rank=16, fuse=True)
    model.new_adapter("a", peft.LoraConfig(**config, lora_dropout=0.5))
    mlp = model.base.model.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj.weight.zero_()
        mlp.up_proj.weight.zero_()
        for key, parameter in model.adapter_parameters("a").items():
            eye = torch.eye(*parameter.shape)
            parameter.copy_(eye if "A" in key else eye)
    seen = []
    for module in (mlp.gate_proj, mlp.up_proj):
        module.register_forward_hook(lambda *call: seen.append(call[2]))
    model.train()(adapters=["a"], input_ids=batch(1)[0])
    dropped = [output[..., :16] == 0 for output in seen[:2]]
    assert not torch.equal(*dropped) and all(0.2 < each.float().mean() < 0.8 for each in dropped)


def test_the_bases_own_dropout_acts_in_training_mode_alone():
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    model = MultiLoRAModel(transformers.GPT2LMHeadModel(config).eval(), "torch_ref")
    model.new_adapter("a", peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    ids, _ = batch(1)

    def logits():
        return model(adapters=["a"], input_ids=ids).logits

    assert torch.equal(logits(), logits())
    model.train()
    assert not torch.equal(logits(), logits())
    model.train(False)
    assert torch.equal(logits(), logits())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_checkpointing_gives_the_gradients_of_peft(reentrant, fuse, when):
    base = tiny()
    if when == "before":
        enable_checkpointing(base, reentrant)
    model = wrapped(base, fuse=fuse)
    pairs = [Pair(model, n, tiny(), c) for n, c in (("a", WIDE), ("b", PATTERNS))]
    if when == "after":
        enable_checkpointing(base, reentrant)
    model.train()
    runs = count_runs(base)
    ids, labels = batch(len(ROWS))
    for _ in range(2):
        train_step(model, ROWS, ids, labels)
        for pair in pairs:
            pair.backward(ROWS, ids, labels)
            pair.check(BOUND)
    # each layer runs twice in each step: its own forward, and again for the backward
    assert len(runs) == 2 * 2 * 2
    model.detach()
    functions = (vars(m).get("_gradient_checkpointing_func") for m in base.modules())
    assert not any("lora_backends" in type(function).__module__ for function in functions)


def count_runs(base):
    runs = []
    for layer in base.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: runs.append(0))
    return runs


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fuse", [False, True])
def test_forwards_in_flight_are_computed_again_with_their_own_adapters(reentrant, fuse):
    model = wrapped(tiny(), fuse=fuse)
    pairs = [Pair(model, n, tiny(), WIDE, seed=at) for at, n in enumerate("ab")]
    enable_checkpointing(model.base, reentrant)
    model.train()
    pending = []
    for rows, seed in ((["a", "b", None], 1), (["b", None], 2), (["b", "a", "a"], 3)):
        ids, labels = batch(len(rows), seed=seed)
        logits = model(adapters=rows, input_ids=ids).logits
        pending.append(model.adapter_losses(logits, labels, adapters=rows))
        for pair in pairs:
            pair.backward(rows, ids, labels)
        with torch.no_grad():  # other passes in between
            model(adapters=["b", "b"], input_ids=ids[:2])
        model.base(input_ids=ids)
    for losses in (pending[1], pending[0], pending[2]):
        sum(losses.values()).backward()
    for pair in pairs:
        pair.check(BOUND)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_draws_the_same_dropout(reentrant):
    found = []
    for checkpoints in (False, True):
        model = wrapped(tiny())
        pair = Pair(model, "a", tiny(), {**WIDE, "lora_dropout": 0.3})
        if checkpoints:
            enable_checkpointing(model.base, reentrant)
        model.train()
        ids, labels = batch(2)
        torch.manual_seed(4)
        train_step(model, ["a", "a"], ids, labels)
        found.append({key: p.grad for key, p in pair.ours.items()})
    assert all(torch.allclose(found[0][key], found[1][key], atol=1e-7) for key in found[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_in_another_thread_knows_its_adapters(reentrant):
    model = wrapped(tiny(), fuse=True)
    pair = Pair(model, "a", tiny(), WIDE)
    enable_checkpointing(model.base, reentrant)
    model.train()
    ids, labels = batch(2)
    logits = model(adapters=["a", None], input_ids=ids).logits
    loss = model.adapter_losses(logits, labels, adapters=["a", None])["a"]
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    pair.backward(["a", None], ids, labels)
    pair.check(BOUND)


@pytest.mark.parametrize("change", ["step", "unload"])
def test_a_recomputation_with_other_weights_is_refused(change):
    model = wrapped(tiny())
    pair = Pair(model, "a", tiny(), WIDE)
    enable_checkpointing(model.base, False)
    model.train()
    ids, _ = batch(1)
    logits = model(adapters=["a"], input_ids=ids).logits
    if change == "step":
        with torch.no_grad():
            next(iter(pair.ours.values())).add_(1)
    else:
        model.unload_adapter("a")
    message = "checkpointing and its backward|between its forward"
    with pytest.raises((InvalidInputError, RuntimeError), match=message):
        logits.sum().backward()


def test_checkpoints_of_other_code_are_refused_and_those_of_whole_calls_run():
    model = wrapped(tiny())
    pair = Pair(model, "a", tiny(), WIDE)
    layer = model.base.model.layers[0]
    plain = layer.forward
    ids, labels = batch(2)
    rows = ["a", None]
    layer.forward = lambda x, **words: checkpoint(plain, x, use_reentrant=False, **words)
    losses = model.adapter_losses(model(adapters=rows, input_ids=ids).logits, labels, rows)
    with pytest.raises(InvalidInputError, match="not known with which adapters"):
        losses["a"].backward()
    layer.forward = plain
    for parameter in pair.ours.values():
        parameter.grad = None

    def run(ids):
        return model(adapters=rows, input_ids=ids).logits

    logits = checkpoint(run, ids, use_reentrant=False)
    model.adapter_losses(logits, labels, adapters=rows)["a"].backward()
    pair.backward(rows, ids, labels)
    pair.check(BOUND)
    assert model._wrapped.key in TRAINED
    model.detach()
    assert model._wrapped.key not in TRAINED
