"""Base weights that torch computes (parametrize), and LoRA that a model holds in this form."""

import types

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.hf import MultiLoRAModel

TASKS = ["retrieval.query", "text-matching", "separation"]
ROWS = ["separation", None, "retrieval.query", "text-matching"]
IDS = torch.randint(3, 30, (4, 7), generator=torch.Generator().manual_seed(1))
TARGETS = ["query", "key", "dense", "word_embeddings"]


def base_of():
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=16, type_vocab_size=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.XLMRobertaModel(config).eval()


def layers(base):
    """Yield the layers that the adapters target."""
    for path, module in base.named_modules():
        if path.split(".")[-1] in TARGETS and "parametrizations" not in path:
            yield path, module


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized():
    """Return a model whose weights are computed in each pass."""
    base = base_of()
    for path, module in layers(base):
        if path.endswith("query"):
            parametrizations.weight_norm(module)
        elif not path.endswith("key"):  # key stays plain beside a parametrized query
            parametrize.register_parametrization(module, "weight", Doubled())
    return base.eval()


class Packed(nn.Module):
    """LoRA of all tasks, as jina-embeddings-v3 holds it."""

    def __init__(self, weight, embeds):
        super().__init__()
        (high, wide), rank, tasks = weight.shape, 2, len(TASKS)
        first, second = ((high, rank), (rank, wide)) if embeds else ((rank, wide), (high, rank))
        self.lora_A = nn.Parameter(torch.randn(tasks, *first))
        self.lora_B = nn.Parameter(torch.randn(tasks, *second))
        self.embeds = embeds

    def forward(self, weight):
        return weight

    def delta(self, task):
        a, b = self.lora_A[task], self.lora_B[task]
        return 0.5 * (a @ b if self.embeds else b @ a)  # lora_alpha 1, rank 2


def packed():
    """Return a model whose layers add the LoRA of `base.task`, as jina's code does, if set."""
    base = base_of()
    base.task = None

    def forward(self, x):
        weight = self.weight
        if base.task is not None and "parametrizations" in self._modules:
            weight = weight + self.parametrizations.weight[0].delta(base.task)
        if isinstance(self, nn.Embedding):
            return functional.embedding(x, weight, self.padding_idx)
        return functional.linear(x, weight, self.bias)

    for _, module in layers(base):
        embeds = isinstance(module, nn.Embedding)
        parametrize.register_parametrization(module, "weight", Packed(module.weight, embeds))
        module.forward = types.MethodType(forward, module)
    return base.eval()


def split(base, task):
    """Return the tensors of one task as PEFT names them, as the error message says."""
    tensors = {}
    for path, module in layers(base):
        held, key = module.parametrizations.weight[0], f"base_model.model.{path}"
        a, b = held.lora_A[task], held.lora_B[task]
        if held.embeds:
            tensors |= {f"{key}.lora_embedding_A": a.T, f"{key}.lora_embedding_B": b.T}
        else:
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    return tensors


@torch.no_grad()
def hidden(model, **options):
    return model(input_ids=IDS, **options).last_hidden_state


def close(found, wanted):
    return (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
def test_lora_is_added_to_computed_weights(use_dora, fuse, tmp_path):
    config = peft.LoraConfig(
        r=2, target_modules=TARGETS, init_lora_weights=False, use_dora=use_dora
    )
    peft.get_peft_model(parametrized(), config).save_pretrained(tmp_path)
    plain = hidden(parametrized())
    alone = hidden(peft.PeftModel.from_pretrained(parametrized(), tmp_path))
    model = MultiLoRAModel(parametrized(), "torch_ref", max_rank=4, fuse=fuse)
    model.load_adapter("a", tmp_path)
    found = hidden(model, adapters=["a", None, "a", None])
    assert close(found[::2], alone[::2]) and close(found[1::2], plain[1::2])
    assert not close(alone, plain)
    assert torch.equal(hidden(model.detach()), plain)


def test_pissa_of_a_computed_weight_is_refused(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights="pissa")
    peft.get_peft_model(base_of(), config).save_pretrained(tmp_path)
    model = MultiLoRAModel(parametrized(), "torch_ref", max_rank=4)
    with pytest.raises(UnsupportedInputError, match="torch computes in each pass"):
        model.load_adapter("a", tmp_path)
    assert model.adapters == []


def test_a_model_with_packed_lora_is_refused_and_its_tasks_can_be_split():
    base = packed()
    before = hidden(base)
    with pytest.raises(UnsupportedInputError) as caught:
        MultiLoRAModel(base, "torch_ref")
    key = "embeddings.word_embeddings.parametrizations.weight.0.lora_A"
    assert f"{key} [3, 30, 2] and 23 other such tensors" in str(caught.value)
    assert "a PEFT adapter per task" in str(caught.value)
    assert not any(module._forward_hooks for module in base.modules())
    alone = {None: before}
    for base.task, name in enumerate(TASKS):
        alone[name] = hidden(base)
    base.task, tasks = None, {name: split(base, task) for task, name in enumerate(TASKS)}
    for _, module in layers(base):
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    model = MultiLoRAModel(base, "torch_ref", max_rank=2)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": TARGETS}
    for name, tensors in tasks.items():
        model.add_adapter(name, tensors, config)
    found = hidden(model, adapters=ROWS)
    for row, name in enumerate(ROWS):
        assert close(found[row], alone[name][row])
        assert not any(close(found[row], alone[each][row]) for each in alone if each != name)


def test_packed_tensors_are_no_adapter():
    base = packed()
    model = MultiLoRAModel(base_of(), "torch_ref")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": TARGETS}
    with pytest.raises(UnsupportedInputError, match="a PEFT adapter per task"):
        model.add_adapter("text-matching", base.state_dict(), config)
    with pytest.raises(InvalidInputError, match="no adapter"):
        model.add_adapter("text-matching", base)
    assert model.adapters == []
