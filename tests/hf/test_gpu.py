"""A model on a GPU computes what it computes on the CPU, with every backend that runs there."""

import json

import pytest
import torch
from safetensors.torch import save_file

from lora_backends import backend_names, unavailable_reasons
from lora_backends.hf import MultiLoRAModel

CUDA = "cuda"
BACKENDS = [
    name
    for name in backend_names()
    if torch.cuda.is_available() and not unavailable_reasons(name, CUDA)
]
ROWS = ["a", None, "b", "a"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.fixture
def folders(make_base, tmp_path):
    """Write two adapters by hand, since PEFT need not be there: q, v and down, ranks 4 and 3."""
    base, folders = make_base("llama"), {}
    for seed, (name, rank) in enumerate({"a": 4, "b": 3}.items()):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for path, module in base.named_modules():
            if path.endswith(("q_proj", "v_proj", "down_proj")):
                a = torch.randn(rank, module.in_features, generator=generator)
                b = torch.randn(module.out_features, rank, generator=generator)
                tensors[f"base_model.model.{path}.lora_A.weight"] = a
                tensors[f"base_model.model.{path}.lora_B.weight"] = 0.3 * b
        folders[name] = tmp_path / name
        folders[name].mkdir()
        config = {"peft_type": "LORA", "r": rank, "target_modules": ["q_proj", "v_proj"]}
        config["target_modules"].append("down_proj")
        (folders[name] / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folders[name] / "adapter_model.safetensors")
    return folders


def wrapped(base, backend, folders):
    model = MultiLoRAModel(base, backend, max_adapters=2, max_rank=4)
    for name, folder in folders.items():
        model.load_adapter(name, folder)
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_on_the_gpu_are_those_on_the_cpu(backend, make_base, folders):
    ids = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(3))
    expected = wrapped(make_base("llama"), "torch_ref", folders)(adapters=ROWS, input_ids=ids)
    model = wrapped(make_base("llama").to(CUDA), backend, folders)
    logits = model(adapters=ROWS, input_ids=ids.to(CUDA)).logits.cpu()
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=2e-4)
    plain = model(adapters=[None] * 4, input_ids=ids.to(CUDA)).logits.cpu()
    assert torch.equal(logits[1], plain[1])
    assert (logits[0] - plain[0]).abs().max() > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_generation_on_the_gpu_keeps_the_adapter_of_each_row(backend, make_base, folders):
    ids = torch.randint(1, 40, (4, 6), generator=torch.Generator().manual_seed(5)).to(CUDA)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model = wrapped(make_base("llama").to(CUDA), backend, folders)
    tokens = model.generate(ids, adapters=ROWS, **settings)
    for row, name in enumerate(ROWS):
        alone = model.generate(ids[row : row + 1], adapters=[name], **settings)
        assert torch.equal(tokens[row], alone[0])
