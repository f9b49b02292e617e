"""Rows of adapters that bring more than LoRA: heads, saved modules, tokens, invocations."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
import transformers
from helpers.sweeps import sweep, sweep_variants
from helpers.sweeps.sweep import BOUND, adapt, in_peft
from helpers.sweeps.sweep_variants import Q_V, build, inputs
from safetensors.torch import load_file, save_file

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.adapters import AdapterPool, Checkpoint, OwnModules
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.replacements import modules

HEAD = {**Q_V, "modules_to_save": ["lm_head"]}


def saved(tmp_path, base, name, **config):
    folder = str(tmp_path / name)
    adapt(base, folder, len(name), **config)
    return folder


def with_head(labels):
    base = build("bert")
    base.classifier = torch.nn.Linear(16, labels)
    torch.nn.init.normal_(base.classifier.weight)
    return base.eval()


@pytest.fixture
def heads(tmp_path):
    """A model of 3 labels, adapters with heads of 2 and 5, and what PEFT gives for them."""
    base = build("bert")
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3)
    expected = {None: base}
    for name, labels in (("two", 2), ("five", 5)):
        own = with_head(labels)
        folder = saved(tmp_path, own, name, target_modules=["query"], task_type="SEQ_CLS")
        model.load_adapter(name, folder)
        expected[name] = in_peft(own, folder)
    return model, expected


ROWS = ["two", None, "five", "two"]


def test_rows_have_as_many_labels_as_their_head(heads):
    model, expected = heads
    logits = model(adapters=ROWS, logits_as_list=True, **inputs("bert")).logits
    assert [len(row) for row in logits] == [2, 3, 5, 2]
    for row, name in enumerate(ROWS):
        with torch.no_grad():
            alone = expected[name](**inputs("bert")).logits[row]
        torch.testing.assert_close(logits[row], alone, rtol=0, atol=BOUND)


def test_rows_with_one_number_of_labels_need_no_list(heads):
    model, expected = heads
    logits = model(adapters=["two"] * 4, **inputs("bert")).logits
    with torch.no_grad():
        torch.testing.assert_close(
            logits, expected["two"](**inputs("bert")).logits, rtol=0, atol=BOUND
        )


def test_a_saved_module_that_returns_no_tensor_is_refused_when_it_runs(tmp_path):
    base = build("llama")
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    model.load_adapter("own", saved(tmp_path, build("llama"), "own", **HEAD))
    base.lm_head.register_forward_hook(lambda module, args, y: (y,), prepend=True)
    match = r"module lm_head \(Linear\): it returned a tuple of Tensor instead of one tensor"
    with pytest.raises(UnsupportedInputError, match=match):
        model(adapters=["own"] * 4, **inputs("llama"))


def test_different_numbers_of_labels_are_refused_without_a_list(heads):
    model, _ = heads
    with pytest.raises(InvalidInputError, match=r"given: \[2, 3, 5, 2\]\n.*logits_as_list=True"):
        model(adapters=ROWS, **inputs("bert"))
    with pytest.raises(InvalidInputError, match="labels are given"):
        model(adapters=["two"] * 4, labels=torch.zeros(4).long(), **inputs("bert"))


def test_heads_of_one_rows_tokens_have_one_number_of_labels(tmp_path):
    base = build("llama for tokens")
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3)
    model.load_adapter("three", saved(tmp_path, base, "three", **Q_V))
    base.score = torch.nn.Linear(16, 5)
    base.config.num_labels = 5
    folder = saved(tmp_path, base, "five", **Q_V, task_type="TOKEN_CLS")
    model.load_adapter("five", folder)
    ids = inputs("llama for tokens")["input_ids"][:2, :4]
    for first, last in (("three", "five"), (None, "five"), ("five", "three")):
        rows = [[first] * 2 + [last] * 2, "five"]
        with pytest.raises(UnsupportedInputError, match=r"given: \[3, 5\] at score"):
            model(input_ids=ids, adapters=rows, logits_as_list=True)
    rows = [[None, "three", "three", "three"], ["five"] * 4]
    logits = model(input_ids=ids, adapters=rows, logits_as_list=True).logits
    assert [row.shape[-1] for row in logits] == [3, 5]


def test_a_model_that_mixes_labels_behind_its_head_is_refused(heads):
    model, _ = heads
    model.base.classifier.register_forward_hook(lambda m, args, output: output.softmax(-1))
    with pytest.raises(UnsupportedInputError, match="mixes labels after its head"):
        model(adapters=ROWS, logits_as_list=True, **inputs("bert"))


@pytest.mark.parametrize("fuse", [False, True])
def test_saved_modules_go_with_lora_of_other_rows_in_fused_layers(fuse, tmp_path):
    base = build("llama")
    folders = {
        None: None,
        "own": saved(tmp_path, base, "own", **Q_V, modules_to_save=["up_proj", "k_proj"]),
        "lora": saved(tmp_path, base, "lora", target_modules="all-linear"),
    }
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3, fuse=fuse)
    for name in ("own", "lora"):
        model.load_adapter(name, folders[name])
    rows = ["own", "lora", None, "own"]
    logits = model(adapters=rows, **inputs("llama")).logits
    for row, name in enumerate(rows):
        with torch.no_grad():
            alone = in_peft(base, folders[name])(**inputs("llama")).logits[row]
        torch.testing.assert_close(logits[row], alone, rtol=0, atol=BOUND)


def test_an_evicted_adapter_leaves_no_module(tmp_path):
    base = build("llama")
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_adapters=1, max_rank=3)
    plain = saved(tmp_path, base, "plain", **Q_V)
    model.load_adapter("own", saved(tmp_path, base, "own", **HEAD))
    model.load_adapter("plain", plain)
    logits = model(adapters=["plain"] * 4, **inputs("llama")).logits
    with torch.no_grad():
        expected = in_peft(base, plain)(**inputs("llama")).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=BOUND)


def test_the_base_model_is_as_it_was_after_detach(tmp_path):
    base = build("llama")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    model.load_adapter("own", saved(tmp_path, build("llama"), "own", **HEAD))
    model(adapters=["own"] * 4, **inputs("llama"))
    model.detach()
    assert not any(module._forward_hooks for module in base.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


def test_detach_waits_for_adapters_that_are_loaded_ahead(tmp_path, monkeypatch):
    base = build("llama")
    saved(tmp_path, base, "own", **HEAD)
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    model.keep_adapters(folder=tmp_path)
    started, hook = threading.Event(), modules.Replacements._hook

    def slow(*arguments):
        started.set()
        time.sleep(0.05)
        hook(*arguments)

    monkeypatch.setattr(modules.Replacements, "_hook", slow)
    model.store.prefetch(["own"])
    assert started.wait(30)
    model.detach()
    assert not base.lm_head._forward_hooks and model.store is None


def test_what_cannot_follow_modules_of_its_own_is_refused(tmp_path):
    model = MultiLoRAModel(build("llama"), "torch_ref", max_rank=3)
    model.load_adapter("own", saved(tmp_path, build("llama"), "own", **HEAD))
    with pytest.raises(UnsupportedInputError, match="'own' has modules of its own.*prepared"):
        model.prepare(["own", None])
    for blend in ({"own": 0.5}, {"own": 1.0, "other": 1.0}):
        model.load_adapter(
            "other", saved(tmp_path, build("llama"), "other", **Q_V), replace_existing=True
        )
        with pytest.raises(UnsupportedInputError, match="'own' has modules of its own.*strength"):
            model(adapters=[blend] * 4, **inputs("llama"))
    model.base.compile()
    with pytest.raises(UnsupportedInputError, match="was compiled in place"):
        model(adapters=["own"] * 4, **inputs("llama"))


def test_a_pool_that_runs_no_modules_refuses_them(tmp_path, monkeypatch):
    folder = saved(tmp_path, build("llama"), "own", **HEAD)
    pool = AdapterPool(MultiLoRAModel(build("llama"), "torch_ref").pool.modules)
    with pytest.raises(UnsupportedInputError, match="modules_to_save"):
        pool.load("own", folder)
    checkpoint = Checkpoint(tmp_path, {}, {}, own=OwnModules(invocation=(1,)))
    with pytest.raises(UnsupportedInputError, match="modules of its own"):
        pool.add("own", checkpoint)


def test_a_module_that_the_model_does_not_call_is_refused(tmp_path):
    """DeBERTa reads the weight of its relative embeddings itself."""
    model = MultiLoRAModel(build("deberta"), "torch_ref", max_rank=3)
    base = build("deberta")
    folder = saved(
        tmp_path, base, "own", target_modules=["value_proj"], modules_to_save=["rel_embeddings"]
    )
    with pytest.raises(UnsupportedInputError, match="does not call deberta.encoder.rel_embeddings"):
        model.load_adapter("own", folder)
    assert model.adapters == []


def test_a_parameter_that_the_model_also_reads_itself_is_refused(tmp_path):
    class Reading(type(build("llama"))):
        def forward(self, **given):
            output = super().forward(**given)
            output["logits"] = output.logits + self.lm_head.weight.mean()
            return output

    base = build("llama")
    folder = saved(tmp_path, base, "own", **HEAD)
    base.__class__ = Reading
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    with pytest.raises(UnsupportedInputError, match="reads a parameter in another way"):
        model.load_adapter("own", folder)
    assert model.adapters == []


def test_modules_that_may_mix_positions_are_refused_by_name(tmp_path):
    base = build("llama")
    base.model.norm.__class__ = type("Mixing", (type(base.model.norm),), {})
    folder = saved(tmp_path, build("llama"), "own", **Q_V, modules_to_save=["norm"])
    with pytest.raises(UnsupportedInputError, match="has a Mixing of its own for model.norm"):
        MultiLoRAModel(base, "torch_ref", max_rank=3).load_adapter("own", folder)


def test_a_resized_embedding_tells_how_to_resize_the_base(tmp_path):
    base = build("llama")
    base.resize_token_embeddings(70, mean_resizing=False)
    base.eval()
    config = {**Q_V, "modules_to_save": ["embed_tokens", "lm_head"]}
    folder = saved(tmp_path, base, "own", **config)
    model = MultiLoRAModel(build("llama"), "torch_ref", max_rank=3)
    with pytest.raises(InvalidInputError, match=r"base.resize_token_embeddings\(70\)"):
        model.load_adapter("own", folder)
    resized = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3)
    resized.load_adapter("own", folder)
    logits = resized(adapters=["own", None] * 2, **inputs("llama")).logits
    with torch.no_grad():
        alone = in_peft(base, folder)(**inputs("llama")).logits
    torch.testing.assert_close(logits[0], alone[0], rtol=0, atol=BOUND)


def test_an_adapter_acts_from_its_invocation_on_and_not_without_it(tmp_path):
    base, config = build("llama"), sweep_variants.VARIANTS["aLoRA"][1]
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3)
    model.load_adapter("own", saved(tmp_path, base, "own", **config))
    given = inputs("llama")
    logits = model(adapters=["own"] * 4, **given).logits
    with torch.no_grad():
        plain = base(**given).logits
    assert torch.equal(logits[:, :3], plain[:, :3])
    assert (logits[:3, 3:] - plain[:3, 3:]).abs().max() > 20 * BOUND
    assert torch.equal(logits[3], plain[3])
    embeds = base.get_input_embeddings()(given["input_ids"])
    with pytest.raises(UnsupportedInputError, match="no input_ids to find them in"):
        model(adapters=["own"] * 4, inputs_embeds=embeds)


def test_a_loss_of_another_head_is_refused_whatever_its_labels_are_called(heads):
    model, _ = heads

    class Renamed(type(model.base)):
        def forward(self, targets=None, **given):
            return super().forward(labels=targets, **given)

    model.base.__class__ = Renamed
    with pytest.raises(UnsupportedInputError, match="has a loss, and an adapter has a head with"):
        rows = ["two", None] * 2
        targets = torch.ones(4, dtype=torch.long)
        model(adapters=rows, logits_as_list=True, targets=targets, **inputs("bert"))


@pytest.fixture
def invoked(tmp_path):
    base, config = build("llama"), sweep_variants.VARIANTS["aLoRA"][1]
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    model.load_adapter("own", saved(tmp_path, base, "own", **config))
    return model


def test_a_blend_of_one_adapter_with_strength_1_is_invoked_like_its_name(invoked):
    given = inputs("llama")
    by_name = invoked(adapters=["own"] * 4, **given).logits
    assert torch.equal(invoked(adapters=[{"own": 1.0}] * 4, **given).logits, by_name)
    with pytest.raises(UnsupportedInputError, match="which no strength scales"):
        invoked(adapters=[{"own": 0.5}] * 4, **given)


def test_an_invocation_that_may_lie_in_the_cache_is_refused(invoked):
    ids = inputs("llama")["input_ids"][:1]
    full = invoked(adapters=["own"], input_ids=ids).logits
    first = invoked(adapters=["own"], input_ids=ids[:, :-1], use_cache=True)
    cached = {"input_ids": ids[:, -1:], "past_key_values": first.past_key_values}
    with pytest.raises(UnsupportedInputError, match="may be in the key-value cache"):
        invoked(adapters=["own"], **cached)
    last = invoked(adapters=[["own"]], **cached).logits
    torch.testing.assert_close(last, full[:, -1:], rtol=0, atol=BOUND)


def test_an_invocation_with_modules_of_its_own_is_refused(tmp_path):
    base, config = build("llama"), sweep_variants.VARIANTS["aLoRA"][1]
    folder = saved(tmp_path, base, "own", **config, modules_to_save=["lm_head"])
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    with pytest.raises(UnsupportedInputError, match="alora_invocation_tokens, and lm_head"):
        model.load_adapter("own", folder)


@pytest.mark.parametrize(
    ("name", "targets", "task"),
    [
        ("Mpt", ["Wqkv"], "CAUSAL_LM"),
        ("Llama", ["q_proj"], None),
    ],
)
def test_an_invocation_that_peft_passes_by_is_refused(tmp_path, name, targets, task):
    config = {"target_modules": targets, "alora_invocation_tokens": [9], "task_type": task}
    folder, ids = saved(tmp_path, sweep.build(name), "own", **config), torch.tensor([[12, 9, 8]])
    peft = sweep.in_peft(sweep.build(name), folder)
    assert torch.equal(peft(input_ids=ids).logits, sweep.build(name)(input_ids=ids).logits)
    with pytest.raises(UnsupportedInputError, match="which PEFT does not run here"):
        MultiLoRAModel(sweep.build(name), "torch_ref", max_rank=3).load_adapter("own", folder)


class Noise(torch.nn.Module):
    """Adds random numbers, also in eval mode."""

    def forward(self, x):
        return x + 0.3 * torch.randn_like(x)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_load_draws_no_random_number_and_tries_every_way_with_the_same(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    base = build("bert")
    folder = saved(tmp_path, with_head(3), "head", target_modules=["query"], task_type="SEQ_CLS")
    base.bert.embeddings.dropout = Noise()
    model = MultiLoRAModel(base.to(device), "torch_ref", max_rank=3)
    module = torch.cuda if device == "cuda" else torch
    state = module.get_rng_state()
    model.load_adapter("head", folder)
    assert torch.equal(module.get_rng_state(), state)


def test_two_values_of_one_parameter_are_refused(tmp_path):
    base = build("llama")
    folder = saved(tmp_path, base, "own", **HEAD)
    tensors = load_file(f"{folder}/adapter_model.safetensors")
    head = next(name for name in tensors if "lm_head" in name)
    tensors["base_model.model.lm_head.modules_to_save.weight"] = tensors[head] + 1
    save_file(tensors, f"{folder}/adapter_model.safetensors", {"format": "pt"})
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    with pytest.raises(InvalidInputError, match=r"two tensors give parameter 'lm_head\.weight'"):
        model.load_adapter("own", folder)


def test_modules_that_are_saved_one_inside_another_are_refused(tmp_path):
    """PEFT trains the copy inside, saves the one that it was copied from, and reads neither."""
    base = build("llama")
    folder = saved(tmp_path, base, "own", **Q_V, modules_to_save=["mlp", "up_proj"])
    with pytest.raises(KeyError):
        in_peft(base, folder)
    with pytest.raises(UnsupportedInputError, match="one inside another(.|\n)*mlp.up_proj"):
        MultiLoRAModel(base, "torch_ref", max_rank=3).load_adapter("own", folder)


@pytest.mark.parametrize("bias", [0.0, 0.1])
def test_rows_of_a_tied_head_with_a_bias_are_refused_as_peft_leaves_the_bias_out(tmp_path, bias):
    config = transformers.ModernBertConfig(**sweep_variants.TEXT)
    base = transformers.ModernBertForMaskedLM(config).eval()
    base.decoder.bias.data.fill_(bias)
    tokens = [*range(4, 30)]
    folder = saved(tmp_path, base, "own", target_modules=["Wqkv"], trainable_token_indices=tokens)
    model, given = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3), inputs("bert")
    if bias:
        with pytest.raises(UnsupportedInputError, match="decoder shares, whose bias PEFT leaves"):
            model.load_adapter("own", folder)
        return
    model.load_adapter("own", folder)
    with torch.no_grad():
        expected = in_peft(base, folder)(**given).logits
    logits = model(adapters=["own"] * len(expected), **given).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=BOUND)


def test_the_report_counts_the_values_of_modules_of_its_own(tmp_path):
    base, config = build("llama"), sweep_variants.VARIANTS["aLoRA"][1]
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    model.load_adapter("plain", saved(tmp_path, base, "plain", **Q_V))
    model.load_adapter("head", saved(tmp_path, base, "head", **HEAD))
    model.load_adapter("own", saved(tmp_path, base, "own", **config))
    plain, head, own = model.adapters_report().adapters
    assert head.bytes == plain.bytes + base.lm_head.weight.nbytes
    assert own.targets == plain.targets == ("q_proj", "v_proj")


def test_loads_of_several_threads_hook_a_module_once(tmp_path, monkeypatch):
    model = MultiLoRAModel(build("bert"), "torch_ref", max_rank=3)
    folders = {
        name: saved(tmp_path, build("bert"), name, target_modules=["query"], bias="all")
        for name in ("a", "bb")
    }
    real = modules.replacement_hook

    def slow(*arguments):
        time.sleep(0.001)  # lets the other thread run between the check and the hook
        return real(*arguments)

    monkeypatch.setattr(modules, "replacement_hook", slow)
    with ThreadPoolExecutor() as pool:
        list(pool.map(model.load_adapter, folders, folders.values()))
    assert sorted(model.adapters) == ["a", "bb"]
    norm = model.base.bert.embeddings.LayerNorm
    assert len(norm._forward_hooks) == 2  # before LoRA, and after it


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_pissa_near_its_start_is_refused_in_8_bits(tmp_path):
    base = build("llama")
    config = peft.LoraConfig(r=3, init_lora_weights="pissa", **Q_V)
    trained = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.001)
    trained.save_pretrained(tmp_path)
    model = MultiLoRAModel(base, "torch_ref", max_rank=6, adapter_dtype="int8")
    with pytest.raises(UnsupportedInputError, match=r"too little for torch\.int8"):
        model.load_adapter("p", tmp_path)


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("base", ["llama", "tied llama"])
def test_a_base_weight_in_the_file_is_what_the_initialisation_has_left(base, init):
    """PEFT saves the base weight of a head that is adapted."""
    config = {"target_modules": ["lm_head", "q_proj"], "init_lora_weights": init}
    assert sweep.compare(build(base), inputs(base), config, config) <= BOUND


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_start_on_a_weight_that_is_read_without_its_module_is_refused(tmp_path, init):
    """PEFT takes the start off the weight there, and adds no LoRA."""
    base = sweep.build("Siglip")
    config = {"init_lora_weights": init, "target_modules": ["out_proj", "fc1"]}
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=8)
    with pytest.raises(UnsupportedInputError, match="head.attention.out_proj, whose weight"):
        model.load_adapter("own", saved(tmp_path, base, "own", **config))
    config["exclude_modules"] = ["head.attention.out_proj"]
    model.load_adapter("others", saved(tmp_path, base, "others", **config))


def test_pissa_takes_twice_its_rank(tmp_path):
    folder = saved(tmp_path, build("llama"), "own", **Q_V, init_lora_weights="pissa")
    model = MultiLoRAModel(build("llama"), "torch_ref", max_rank=5)
    with pytest.raises(InvalidInputError, match="set max_rank to 6 or more"):
        model.load_adapter("own", folder)
    tied = saved(
        tmp_path,
        build("tied llama"),
        "tied",
        target_modules=["lm_head"],
        init_lora_weights="pissa",
    )
    tensors = load_file(f"{tied}/adapter_model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if "base_layer" not in name}
    save_file(own, f"{tied}/adapter_model.safetensors", {"format": "pt"})
    model = MultiLoRAModel(build("tied llama"), "torch_ref", max_rank=8)
    with pytest.raises(UnsupportedInputError, match="whose weight other modules share"):
        model.load_adapter("own", tied)
