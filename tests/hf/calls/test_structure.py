"""A base model that has changed since it was wrapped is refused by the name of the module."""

import functools

import pytest
import torch
import transformers
from helpers.adapters.deltas import random_checkpoint
from torch import nn

from lora_backends import InvalidInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.layout.structure import Structure
from lora_backends.torch_ref import TorchRefBackend

IDS = torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(1))
ROWS = ["a", None]


def wrap(base, fuse=False):
    model = MultiLoRAModel(base, TorchRefBackend(), max_rank=4, fuse=fuse)
    model.add_adapter("a", random_checkpoint(base, ("q_proj", "down_proj")))
    return model


@pytest.fixture(params=[False, True], ids=["hooks", "fused"])
def model(request, make_base):
    return wrap(make_base("llama"), request.param)


def calls(model):
    """Return every way to run the base model with adapters."""
    step = model.prepare(ROWS, tokens=5)

    def in_block():
        with model.using(step):
            model.base(input_ids=IDS)

    return [
        lambda: model(adapters=ROWS, input_ids=IDS),
        lambda: model(adapters=[None, None], input_ids=IDS),
        lambda: model(adapters=step, input_ids=IDS),
        lambda: model.generate(IDS, adapters=ROWS, max_new_tokens=1, pad_token_id=0),
        in_block,
    ]


def refused(calls, message):
    for call in calls:
        with pytest.raises(InvalidInputError, match=message):
            call()


def test_a_model_in_training_mode_is_refused(model):
    ways = calls(model)
    model.base.train()
    refused(ways, r"LlamaForCausalLM is in training mode\n[\s\S]*model\.base\.eval\(\)")
    model.base.eval()
    model.base.model.layers[1].self_attn.train()
    refused(ways, "in training mode: module model.layers.1.self_attn\n")
    model.base.eval()
    for call in ways:
        call()


def test_dropout_never_changes_a_row():
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.5,
    )
    torch.manual_seed(7)
    base = transformers.LlamaForCausalLM(config)  # a model made from a configuration trains
    model = wrap(base)
    with pytest.raises(InvalidInputError, match="training mode"):
        model(adapters=ROWS, input_ids=IDS)
    base.eval()
    first, second = (model(adapters=ROWS, input_ids=IDS).logits for _ in range(2))
    assert torch.equal(first, second)


def linear_like(module):
    return nn.Linear(module.in_features, module.out_features, bias=False).eval()


def test_a_replaced_module_is_refused_until_it_is_back(model):
    ways, expected = calls(model), model(adapters=ROWS, input_ids=IDS).logits
    attention = model.base.model.layers[0].self_attn
    original, attention.q_proj = attention.q_proj, linear_like(attention.q_proj)
    message = r"module model\.layers\.0\.self_attn\.q_proj was replaced or removed"
    refused([*ways, lambda: model.prepare(ROWS)], message)
    attention.q_proj = original
    for call in ways:
        call()
    assert torch.equal(model(adapters=ROWS, input_ids=IDS).logits, expected)


@pytest.mark.parametrize("path", ["self_attn.k_proj", "mlp.down_proj", "mlp"])
def test_another_forward_is_refused_until_the_earlier_one_is_back(model, path):
    """It computed without LoRA where LoRA is in the forward, or in modules that it passes by."""
    ways, expected = calls(model), model(adapters=ROWS, input_ids=IDS).logits
    module = model.base.model.layers[1].get_submodule(path)
    before = vars(module).get("forward")
    module.forward = lambda x: x @ torch.ones(x.shape[-1], expected.shape[-1])
    refused(ways, rf"module model\.layers\.1\.{path} has another forward")
    del module.forward
    if before is not None:
        refused(ways, rf"module model\.layers\.1\.{path} has another forward")
        module.forward = before
    assert torch.equal(model(adapters=ROWS, input_ids=IDS).logits, expected)


def test_a_class_with_another_forward_is_refused(model, monkeypatch):
    ways, kind = calls(model), type(model.base.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    refused(ways, f"class {kind.__name__} has another forward")


def _declared(forward):
    return functools.wraps(forward)(lambda *args, **words: forward(*args, **words))


def _in_a_closure(forward):
    return lambda *args, **words: forward(*args, **words)


@pytest.mark.parametrize("around", [functools.partial, _declared, _in_a_closure])
def test_a_forward_around_the_earlier_one_runs(model, around):
    expected = model(adapters=ROWS, input_ids=IDS).logits
    for path in ("self_attn.k_proj", "mlp.down_proj", "mlp", "input_layernorm"):
        module = model.base.model.layers[1].get_submodule(path)
        module.forward = around(module.forward)
    module.forward = lambda x: x  # no adapter is in it
    for call in calls(model):
        call()
    assert not torch.equal(model(adapters=ROWS, input_ids=IDS).logits, expected)
    del module.forward
    assert torch.equal(model(adapters=ROWS, input_ids=IDS).logits, expected)


def test_a_replaced_parent_of_a_module_is_refused(model, make_base):
    ways, layers = calls(model), model.base.model.layers
    layers[1] = make_base("llama").model.layers[1]
    refused(ways, r"module model\.layers\.1 was replaced")
    layers[0] = make_base("llama").model.layers[0]
    refused(ways, r"module model\.layers\.0 \(and 1 more\) was replaced")


def test_a_removed_module_is_refused(model):
    ways = calls(model)
    del model.base.model.layers[2]
    refused(ways, r"module model\.layers\.2 was replaced or removed")


def test_a_model_may_get_more_modules(model):
    expected = model(adapters=ROWS, input_ids=IDS).logits
    model.base.model.layers[0].self_attn.scratch = torch.nn.Identity()
    for call in calls(model):
        call()
    assert torch.equal(model(adapters=ROWS, input_ids=IDS).logits, expected)


def test_a_change_inside_a_block_is_refused(model):
    attention = model.base.model.layers[0].self_attn
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        model.base(input_ids=IDS)
        attention.q_proj = linear_like(attention.q_proj)
        refused([lambda: model.base(input_ids=IDS)], "q_proj was replaced")


def test_a_changed_model_runs_without_adapters_and_is_wrapped_again(model):
    attention = model.base.model.layers[0].self_attn
    attention.q_proj = linear_like(attention.q_proj)
    with torch.no_grad():
        plain = model.base(input_ids=IDS).logits
    again = wrap(model.detach())
    logits = again(adapters=ROWS, input_ids=IDS).logits
    assert torch.equal(logits[1], plain[1]) and not torch.equal(logits[0], plain[0])


def test_a_loaded_adapter_for_a_changed_model_is_refused(model):
    attention = model.base.model.layers[0].self_attn
    attention.q_proj = linear_like(attention.q_proj)
    with pytest.raises(InvalidInputError, match="q_proj was replaced"):
        model.add_adapter("b", random_checkpoint(model.base, ("q_proj",)))


def test_a_model_that_was_converted_is_refused(model):
    """The backend's error named dtypes of a kernel's arguments."""
    ways = calls(model)
    model.base.to(torch.bfloat16)
    refused(
        ways, r"was converted after it was wrapped: to torch\.bfloat16 on cpu, from torch\.float32"
    )
    model.base.to(torch.float32)
    for call in ways:
        call()


def test_a_model_that_is_offloaded_runs(model):
    """Accelerate brings each weight back for the time in which its module runs."""
    accelerate = pytest.importorskip("accelerate")
    ways = calls(model)
    expected = model(adapters=ROWS, input_ids=IDS).logits
    accelerate.cpu_offload(model.base, execution_device="cpu")
    assert next(model.base.parameters()).is_meta
    for call in ways[:3]:
        call()
    found = model(adapters=ROWS, input_ids=IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    accelerate.hooks.remove_hook_from_submodules(model.base)
    model.base.to(torch.bfloat16)
    refused(ways, "was converted after it was wrapped")


def test_adapters_come_and_go_while_the_model_is_elsewhere(model):
    """As where one GPU trains and serves in turn: only passes need the weights."""
    model.base.to(torch.bfloat16)
    checkpoint = random_checkpoint(model.base, ("q_proj", "down_proj"), seed=7)
    model.update_adapter("a", checkpoint)
    model.add_adapter("b", checkpoint)
    step = model.prepare(["b", None], tokens=5)
    model.base.to(torch.float32)
    found = model(adapters=step, input_ids=IDS).logits
    torch.testing.assert_close(found, model(adapters=ROWS, input_ids=IDS).logits, rtol=0, atol=2e-5)


def test_under_autocast_adapters_act(model):
    """down_proj gets bfloat16 from the products before it, which is cast to its dtype."""
    expected = model(adapters=ROWS, input_ids=IDS).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(adapters=ROWS, input_ids=IDS).logits
        bare = model(adapters=[None] * len(ROWS), input_ids=IDS).logits
    assert not torch.equal(found[0], bare[0])
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_a_model_without_wide_parameters_is_no_conversion():
    base = nn.Module().eval()
    base.packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    structure = Structure(base)
    structure.check_state()
    base.packed.data = base.packed.data.clone()
    structure.check_state()
