"""Training on bases of many kinds: quantised, with experts, hooked by other code, packed."""

import copy

import peft
import pytest
import torch
import transformers
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
from helpers.sweeps import sweep_bases

from lora_backends import UnsupportedInputError
from lora_backends.hf.training.products import is_product

BOUND = 2e-5


def assert_same_gradients(ours, theirs, bound=BOUND):
    for key, parameter in ours.items():
        expected = theirs[key].grad
        room = bound * max(1e-3, expected.abs().max().item())
        assert (parameter.grad - expected).abs().max().item() <= room, key


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GPTQ, AWQ, AQLM, VPTQ", "Metal", "FP8"])
def test_quantised_layers_pass_gradients_on(name, tmp_path):
    """As the same model with its values unpacked."""
    base = sweep_bases.LAYERS[name][0]()
    plain = sweep_bases.unpacked(base)
    config = {"r": 3, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
    trained = by_peft(plain, config)
    shake(parameters_of(trained), std=0.2)
    trained.save_pretrained(tmp_path)
    ids, labels = batch(3)
    rows = ["a", None, "a"]
    for fuse in (False, True):
        model = wrapped(copy.deepcopy(base), fuse=fuse)
        model.load_adapter("a", tmp_path, trainable=True)
        train_step(model, rows, ids, labels)
        trained.zero_grad()
        causal_loss(trained(input_ids=ids[[0, 2]]).logits, labels[[0, 2]]).backward()
        assert_same_gradients(model.adapter_parameters("a"), parameters_of(trained), 1e-4)
        assert all(parameter.grad is None for parameter in model.base.parameters())


@pytest.fixture(scope="module")
def mixture():
    torch.manual_seed(7)
    config = transformers.Qwen3MoeConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, moe_intermediate_size=12,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore")
def test_layers_beside_experts_are_trained_and_experts_are_refused(mixture, tmp_path):
    model = wrapped(copy.deepcopy(mixture))
    config = {"r": 3, "target_modules": ["q_proj", "o_proj"]}
    pair = Pair(model, "a", copy.deepcopy(mixture), config)
    ids, labels = batch(3)
    rows = ["a", None, "a"]
    train_step(model, rows, ids, labels)
    pair.backward(rows, ids, labels)
    pair.check(BOUND)
    experts = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    with pytest.raises(UnsupportedInputError, match="target_parameters"):
        model.new_adapter("b", peft.LoraConfig(**experts))
    trained = by_peft(copy.deepcopy(mixture), experts)
    shake(parameters_of(trained))
    trained.save_pretrained(tmp_path)
    model.load_adapter("b", tmp_path)
    train_step(model, rows, ids, labels)  # its stacks are no part of this batch
    with pytest.raises(UnsupportedInputError, match="experts.*no gradient"):
        model(adapters=["a", "b", None], input_ids=ids)
    with torch.no_grad():
        model(adapters=["a", "b", None], input_ids=ids)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_other_code_keep_their_effect(when, fuse):
    """Before: the hook sees the base's output, as below PEFT; after: the output with LoRA."""

    def double(module, args, output):
        return 2 * output

    base, other = tiny(), tiny()
    paths = ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj")
    if when == "before":
        for path in paths:
            base.get_submodule(path).register_forward_hook(double)
            other.get_submodule(path).register_forward_hook(double)
    model = wrapped(base, fuse=fuse)
    pair = Pair(model, "a", other, WIDE)
    if when == "after":
        for path in paths:
            base.get_submodule(path).register_forward_hook(double)
            pair.peft.base_model.model.get_submodule(path).register_forward_hook(double)
    ids, labels = batch(2)
    train_step(model, ["a", "a"], ids, labels)
    pair.backward(["a", "a"], ids, labels)
    pair.check(BOUND)


def test_a_node_holds_the_product_of_plain_layers_alone():
    base = tiny()
    model = wrapped(base, fuse=False)
    layer = base.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 3, 16)
    base.requires_grad_(False)
    output = torch.nn.functional.linear(x, layer.weight)
    assert is_product(layer, x, output)
    assert not is_product(layer, x, output.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_product(layer, x, output)
    handle = layer.register_forward_hook(lambda *_: None)
    assert not is_product(layer, x, output)
    handle.remove()
    layer.forward = lambda x: x
    assert not is_product(layer, x, output)
    del layer.forward
    layer.weight.requires_grad_(True)
    assert not is_product(layer, x, output)
    model.detach()


@pytest.mark.parametrize("fuse", [False, True])
def test_packed_sequences_with_an_adapter_each(fuse):
    """Two sequences in one row, told apart by their position_ids."""
    model = wrapped(tiny(), fuse=fuse)
    pairs = [Pair(model, n, tiny(), c) for n, c in (("a", WIDE), ("b", PATTERNS))]
    ids, _ = batch(1, length=9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    rows = [["a"] * 4 + ["b"] * 5]
    logits = model(adapters=rows, input_ids=ids, position_ids=positions, use_cache=False).logits
    parts = {"a": slice(0, 4), "b": slice(4, 9)}
    for pair in pairs:
        part = parts[pair.name]
        loss = causal_loss(logits[:, part], ids[:, part])
        expected = causal_loss(pair.peft(input_ids=ids[:, part]).logits, ids[:, part])
        assert torch.allclose(loss, expected, rtol=1e-5)
        loss.backward(retain_graph=True)
        expected.backward()
    for pair in pairs:
        pair.check(BOUND)


def test_padding_and_embeddings_as_inputs():
    model = wrapped(tiny())
    pair = Pair(model, "a", tiny(), PLAIN)
    ids, labels = batch(4)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :1] = 0
    rows = ["a", None, "a", "a"]
    train_step(model, rows, ids, labels, attention_mask=mask)
    pair.backward(rows, ids, labels, mask)
    pair.check(BOUND)
    x = model.base.get_input_embeddings()(ids).detach().requires_grad_()
    y = x.detach().clone()[[0, 2, 3]].requires_grad_()
    model(adapters=rows, inputs_embeds=x).logits[[0, 2, 3]].sum().backward()
    pair.peft(inputs_embeds=y).logits.sum().backward()
    assert torch.allclose(x.grad[[0, 2, 3]], y.grad, atol=1e-5) and not x.grad[1].any()


def test_two_models_train_beside_each_other():
    models = [wrapped(tiny()) for _ in range(2)]
    pairs = [Pair(m, "a", tiny(), c) for m, c in zip(models, (PLAIN, WIDE), strict=True)]
    ids, labels = batch(2)
    logits = [model(adapters=["a", None], input_ids=ids).logits for model in models]
    for model, pair, each in zip(models, pairs, logits, strict=True):
        model.adapter_losses(each, labels, ["a", None])["a"].backward()
        pair.backward(["a", None], ids, labels)
        pair.check(BOUND)
