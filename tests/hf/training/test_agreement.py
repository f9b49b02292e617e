"""A training forward beside generation: the same LoRA in both; the first module that differs."""

import peft
import pytest
import torch
from helpers.adapters.training import PATTERNS, WIDE, shake, tiny, wrapped

from lora_backends import InvalidInputError, UnsupportedInputError, get_backend
from lora_backends.hf import agreement
from lora_backends.hf.agreement import BASE, BEFORE, LORA, compare

PROMPT = torch.tensor([3, 14, 15, 9, 2, 6, 5])
EVERYWHERE = {"r": 4, "target_modules": ["embed_tokens", "lm_head", "q_proj", "down_proj"]}
CONFIGS = {"all linear": WIDE, "patterns": PATTERNS, "embedding and head": EVERYWHERE}
MLP = "model.layers.0.mlp.down_proj"


def trained(base, backend, config=WIDE, **options):
    model = wrapped(base, backend, **options)
    model.new_adapter("a", peft.LoraConfig(**config))
    shake(model.adapter_parameters("a"))
    return model


class Slipping(type(get_backend("numba_cpu", device="cpu"))):
    """Adds to the LoRA of layers with 24 inputs where a batch has one token."""

    name = "slipping"

    def run_linear(self, x, weights, plan, base_output=None):
        y = super().run_linear(x, weights, plan, base_output)
        if len(x) == 1 and x.shape[1] == 24:
            y[:, 0] += 0.125
        return y


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_lora_of_an_invariant_backend_is_the_same_in_both(config, fuse):
    model = trained(tiny(), "numba_cpu", CONFIGS[config], fuse=fuse)
    found = compare(model, "a", PROMPT, 6)
    assert found.same_lora and found.different_loras == []
    touched = {key.rpartition(".lora_")[0] for key in model.adapter_parameters("a")}
    assert found.compared_loras == len(touched)
    assert len(found.tokens) == len(found.differences) == 6
    # Sums of 24 products of float32 in another order, through two layers.
    assert found.largest < 1e-5
    assert found.cause in (None, BASE, BEFORE)
    model.detach()


def test_the_tokens_are_those_of_generate():
    model = trained(tiny(), "numba_cpu")
    found = compare(model, "a", PROMPT, 5)
    tokens = model.generate(PROMPT[None], adapters=["a"], max_new_tokens=5, do_sample=False)
    assert found.tokens == tokens[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("fuse", [False, True])
def test_a_lora_that_depends_on_the_batch_is_named(fuse):
    model = trained(tiny(), Slipping("cpu"), fuse=fuse)
    found = compare(model, "a", PROMPT, 4)
    assert not found.same_lora
    assert found.different_loras == [MLP, MLP.replace("0", "1")]
    assert found.first_token is not None and found.largest > 1e-6


@pytest.mark.parametrize("fuse", [False, True])
def test_the_first_module_is_that_of_the_lora_where_the_base_agrees(fuse):
    """In bfloat16 the tiny base rounds all differences away, so that the LoRA's is the first."""
    model = trained(tiny(dtype=torch.bfloat16), Slipping("cpu"), fuse=fuse)
    found = compare(model, "a", PROMPT, 4)
    assert (found.first_module, found.cause) == (MLP, LORA)


def test_a_base_that_depends_on_the_batch_is_no_fault_of_the_lora():
    model = trained(tiny(dtype=torch.bfloat16), "numba_cpu")
    layer = model.base.model.layers[1].post_attention_layernorm
    plain = layer.forward
    layer.forward = lambda x: plain(x) * (1 + 0.125 * (x.shape[1] == 1))
    found = compare(model, "a", PROMPT, 4)
    assert found.first_module == "model.layers.1.post_attention_layernorm"
    assert found.cause == BASE and found.same_lora and found.largest > 0


def test_a_difference_between_modules_is_told_from_one_in_them():
    model = trained(tiny(dtype=torch.bfloat16), "numba_cpu")
    attention = model.base.model.layers[0].self_attn
    handle = attention.register_forward_pre_hook(
        lambda module, args, kwargs: setattr(
            module, "scaling", 0.3 if kwargs["hidden_states"].shape[1] == 1 else 0.6
        ),
        with_kwargs=True,
    )
    found = compare(model, "a", PROMPT, 4)
    handle.remove()
    assert (found.first_module, found.cause) == ("model.layers.0.self_attn.o_proj", BEFORE)
    assert found.same_lora


def test_a_module_whose_rows_are_not_known_is_refused_by_name():
    """A comparison that leaves it out would say that its LoRA is the same."""
    base = tiny()
    mlp = base.model.layers[1].mlp

    def twice(x):
        hidden = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        return mlp.down_proj(torch.cat([hidden, hidden], 1))[:, : x.shape[1]]

    mlp.forward = twice
    model = trained(base, "numba_cpu")
    with pytest.raises(UnsupportedInputError, match=r"layers\.1\.mlp\.down_proj cannot"):
        compare(model, "a", PROMPT, 3)


def test_one_new_token_is_compared_too():
    found = compare(trained(tiny(), "numba_cpu"), "a", PROMPT[:1], 1)
    assert len(found.differences) == 1 and found.compared_loras == 14 and found.same_lora


def test_what_cannot_be_compared_is_refused():
    model = trained(tiny(), "torch_ref")
    model.train()
    with pytest.raises(InvalidInputError, match="training mode"):
        compare(model, "a", PROMPT, 3)
    model.eval()
    with pytest.raises(InvalidInputError, match="at least one"):
        compare(model, "a", PROMPT[None], 3)
    with pytest.raises(InvalidInputError, match="at least one"):
        compare(model, "a", PROMPT, 0)
    with pytest.raises(InvalidInputError, match="'b'"):
        compare(model, "b", PROMPT, 3)


def test_a_reference_without_the_promise_is_close():
    found = compare(trained(tiny(), "torch_ref"), "a", PROMPT, 4)
    assert found.largest < 1e-5 and found.compared_loras == 14


def test_a_nan_is_the_largest_difference():
    found = agreement.Agreement([1, 2], [0.5, float("nan")], 0, None, None, 0, [])
    assert found.largest != found.largest
