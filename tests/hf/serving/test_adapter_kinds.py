"""Requests of adapters with modules of their own, and of experts: each gets PEFT's logits."""

import copy
import gc
import time
import weakref

import pytest
import torch
import transformers
from helpers.continuous import settings, soon
from helpers.sweeps.sweep import BOUND, adapt, in_peft
from helpers.sweeps.sweep_variants import EXPERTS, Q_V, build

from lora_backends import UnsupportedInputError
from lora_backends.hf import MultiLoRAModel

NEW = 4
TOKENS = {**Q_V, "trainable_token_indices": [*range(4, 30)]}
KINDS = {
    "llama with biases": {
        "head": {**Q_V, "modules_to_save": ["lm_head"]},
        "embedding": {**Q_V, "modules_to_save": ["embed_tokens", "lm_head"]},
        "norms": {**Q_V, "modules_to_save": ["norm", "input_layernorm"]},
        "linear": {**Q_V, "modules_to_save": ["up_proj"]},
        "biases": {"target_modules": "all-linear", "bias": "all"},
        "tokens": TOKENS,
        "lora": {"target_modules": "all-linear"},
    },
    "tied llama": {"tokens": TOKENS, "embedding": {**Q_V, "modules_to_save": ["embed_tokens"]}},
    "gemma3": {"tokens": TOKENS, "head": {**Q_V, "modules_to_save": ["lm_head"]}},
    "mixtral": {"experts": EXPERTS, "router": {"target_modules": ["gate"]}},
}

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]


@pytest.fixture
def make(tmp_path):
    def make(name, kinds, device="cpu", **options):
        base = build(name)
        base.generation_config = transformers.GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        backend = "torch_ref" if device == "cpu" else "auto"
        model = MultiLoRAModel(copy.deepcopy(base).to(device), backend, max_rank=4, **options)
        alone = {None: base}
        for seed, (kind, config) in enumerate(kinds.items()):
            folder = str(tmp_path / kind)
            adapt(base, folder, seed, **copy.deepcopy(config))
            alone[kind] = in_peft(base, folder)
            model.load_adapter(kind, folder)
        return model, alone

    return make


def freed(references):
    end = time.monotonic() + 60
    while any(reference() for reference in references) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fuse", [False, True], ids=["hooks", "fused"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_adapter_is_answered_as_by_peft(make, name, fuse, device):
    """Their requests share passes: prompts of one lie beside decode steps of others."""
    model, alone = make(name, KINDS[name], device, fuse=fuse)
    bound = BOUND if device == "cpu" else 1e-3
    entries = [*KINDS[name], None, *KINDS[name]]
    inputs = [[10 + i, 5, 7, *range(11, 11 + i)] for i in range(len(entries))]
    seen = []
    model.base.lm_head.register_forward_hook(lambda m, args, y: seen.append(y[0].cpu().clone()))
    config = settings(max_batch_tokens=9, num_blocks=64)
    requests = model.continuous_batching(continuous_batching_config=config)
    seen.clear()  # of the trial pass
    names = requests.add_requests(inputs, adapters=entries)
    with requests:
        outputs = soon(requests.collect, names)
    rows = torch.cat(seen)
    for ids, entry, output in zip(inputs, entries, outputs.values(), strict=True):
        tokens = output.generated_tokens
        with torch.no_grad():
            logits = alone[entry](torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
        nearest = torch.cdist(logits, rows, p=torch.inf).amin(1)
        assert nearest.amax() < bound


def test_a_blend_of_a_head_and_a_head_of_another_size_are_refused_on_add(make, monkeypatch):
    kinds = KINDS["llama with biases"]
    model, _ = make("llama with biases", {name: kinds[name] for name in ("head", "lora")})
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        for blend in ({"head": 0.5}, {"head": 1.0, "lora": 1.0}):
            with pytest.raises(UnsupportedInputError, match="'head' has modules of its own"):
                requests.add_request([1, 2], adapter=blend)
        head = model.pool.own_modules(model.pool.slots.slot("head"))["lm_head"]
        monkeypatch.setitem(vars(head), "width", 7)
        with pytest.raises(UnsupportedInputError, match="'head' has lm_head with 7 outputs"):
            requests.add_request([1, 2], adapter="head")
        monkeypatch.undo()
        name = requests.add_request([10, 12], adapter="head")
        assert len(soon(requests.collect, [name])[name].generated_tokens) == NEW


def test_a_norm_that_sees_the_parts_of_a_token_is_refused_on_add(make):
    model, _ = make("gemma3", {"norms": {**Q_V, "modules_to_save": ["q_norm"]}})
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        with pytest.raises(UnsupportedInputError, match=r"'norms' touches .*\.q_norm"):
            requests.add_request([1, 2], adapter="norms")


def test_modules_of_an_unloaded_adapter_are_freed(make):
    model, _ = make("tied llama", {"tokens": TOKENS})
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        soon(requests.collect, [requests.add_request([10, 12], adapter="tokens")])
        slot = model.pool.slots.slot("tokens")
        kept = [weakref.ref(own) for own in model.pool.own_modules(slot).values()]
        model.unload_adapter("tokens")
        assert kept
        freed(kept)
        assert not any(reference() for reference in kept)
