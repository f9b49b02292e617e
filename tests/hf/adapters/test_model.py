"""Loading, evicting, detaching and refusing, on tiny models."""

import contextlib
import copy
import json
import pickle
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_backends import InvalidInputError, UnsupportedInputError, get_backend
from lora_backends.hf import MultiLoRAModel
from lora_backends.selection.config import LoRAConfig

IDS = torch.arange(8)[None] + 1
PLAIN = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def model(make_base):
    return MultiLoRAModel(make_base("llama"), "torch_ref", max_adapters=2, max_rank=4)


def logits(model, adapter):
    return model(adapters=[adapter], input_ids=IDS).logits


def test_a_call_of_the_base_model_runs_without_adapters(model, make_base, save_adapter):
    model.load_adapter("a", save_adapter(**PLAIN))
    with torch.no_grad():
        expected = make_base("llama")(input_ids=IDS).logits
        assert torch.equal(model.base(input_ids=IDS).logits, expected)
    assert not torch.equal(logits(model, "a"), expected)


def test_detach_gives_the_base_model_back_bit_for_bit(make_base, save_adapter):
    base, untouched = make_base("llama"), make_base("llama")
    model = MultiLoRAModel(base, "torch_ref", max_rank=4)
    model.load_adapter("a", save_adapter(**PLAIN))
    logits(model, "a")
    assert model.detach() is base
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.modules())
    state, expected = base.state_dict(), untouched.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)
    with pytest.raises(InvalidInputError, match="was detached"):
        logits(model, "a")
    with pytest.raises(InvalidInputError, match="was detached"):
        model.load_adapter("b", "anywhere")


def test_only_touched_modules_run_the_backend(model, save_adapter, monkeypatch):
    model.load_adapter("a", save_adapter(r=2, target_modules=["q_proj"], layers_to_transform=[1]))
    touched, run = [], type(model.backend).run_linear

    def noting(self, x, weights, plan, base_output=None):
        touched.append(weights)
        return run(self, x, weights, plan, base_output)

    monkeypatch.setattr(type(model.backend), "run_linear", noting)
    other = MultiLoRAModel(model.base, model.backend)
    folder = save_adapter(r=2, target_modules=["q_proj"], layers_to_transform=[1])
    other.load_adapter("a", folder)
    logits(other, "a")
    assert touched == [other.pool.weights("model.layers.1.self_attn.q_proj")]
    other.unload_adapter("a")
    assert not other.pool.active_weights
    with pytest.raises(InvalidInputError, match="no adapter named 'a'"):
        logits(other, "a")
    assert len(touched) == 1


def test_loading_more_adapters_than_slots_evicts_the_least_recently_used(model, save_adapter):
    folders = [save_adapter(name=n, std=0.3, seed=i, **PLAIN) for i, n in enumerate("abc")]
    model.load_adapter("a", folders[0])
    model.load_adapter("b", folders[1])
    expected = logits(model, "a")
    assert model.load_adapter("c", folders[2]).evicted == "b"
    assert torch.equal(logits(model, "a"), expected)
    with pytest.raises(InvalidInputError, match="evicted when 'c' was loaded"):
        logits(model, "b")


def test_a_full_model_of_pinned_adapters_takes_no_more(model, save_adapter):
    folder = save_adapter(**PLAIN)
    model.load_adapter("a", folder, pin=True)
    model.load_adapter("b", folder)
    model.pin_adapter("b")
    before = logits(model, "a")
    with pytest.raises(InvalidInputError, match="all 2 are pinned"):
        model.load_adapter("c", folder)
    assert torch.equal(logits(model, "a"), before)
    model.unpin_adapter("b")
    assert model.load_adapter("c", folder).evicted == "b"


def test_an_adapter_can_be_replaced(model, save_adapter):
    model.load_adapter("a", save_adapter(name="one", std=0.3, seed=1, **PLAIN))
    before = logits(model, "a")
    other = save_adapter(name="two", std=0.3, seed=2, **PLAIN)
    with pytest.raises(InvalidInputError, match="loaded already"):
        model.load_adapter("a", other)
    model.load_adapter("a", other, replace_existing=True)
    assert not torch.equal(logits(model, "a"), before)


def test_a_running_call_keeps_its_adapters(model, save_adapter):
    model.load_adapter("a", save_adapter(**PLAIN))
    refused = []

    def try_to_unload(module, args):
        with pytest.raises(InvalidInputError, match="in use"):
            model.unload_adapter("a")
        refused.append(True)

    handle = model.base.lm_head.register_forward_pre_hook(try_to_unload)
    logits(model, "a")
    handle.remove()
    assert refused
    model.unload_adapter("a")


def test_threads_do_not_see_each_others_adapters(model, save_adapter):
    for seed, name in enumerate("ab"):
        model.load_adapter(name, save_adapter(name=name, std=0.3, seed=seed, **PLAIN))
    expected = {name: logits(model, name) for name in ("a", "b", None)}
    wrong = []

    def work(name):
        for _ in range(20):
            if not torch.equal(logits(model, name), expected[name]):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_models_over_one_base_keep_their_adapters_apart(model, save_adapter):
    other = MultiLoRAModel(model.base, get_backend("torch_ref", device="cpu"), max_rank=4)
    model.load_adapter("a", save_adapter(name="one", std=0.3, seed=1, **PLAIN))
    other.load_adapter("a", save_adapter(name="two", std=0.3, seed=2, **PLAIN))
    first, second = logits(model, "a"), logits(other, "a")
    assert not torch.equal(first, second)
    assert torch.equal(logits(model, "a"), first)


def test_a_configuration_makes_the_model_and_loads_its_adapters(make_base, save_adapter):
    config = LoRAConfig(
        backend="torch_ref", max_adapters=3, max_rank=5, adapters={"a": save_adapter(**PLAIN)}
    )
    model = MultiLoRAModel.from_config(make_base("llama"), config)
    assert model.adapters == ["a"]
    assert (model.pool.slots.num_slots, model.pool.max_rank) == (3, 5)


def refused_alike(model, folder, error, told):
    """Assert that loading `folder` is refused and that nothing has changed."""
    before = logits(model, "good")
    with pytest.raises(error, match=told):
        model.load_adapter("bad", folder)
    assert model.adapters == ["good"]
    assert torch.equal(logits(model, "good"), before)


@pytest.fixture
def loaded(model, save_adapter):
    model.load_adapter("good", save_adapter(name="good", std=0.3, **PLAIN))
    return model


def test_a_missing_folder_is_named(loaded, tmp_path):
    refused_alike(loaded, tmp_path / "nowhere", InvalidInputError, "nowhere")


def test_a_folder_without_configuration_is_named(loaded, tmp_path):
    refused_alike(loaded, tmp_path, InvalidInputError, "adapter_config.json")


def test_broken_json_is_named(loaded, save_adapter):
    folder = save_adapter(**PLAIN)
    (folder / "adapter_config.json").write_text("{")
    refused_alike(loaded, folder, InvalidInputError, "adapter_config.json")


def test_truncated_weights_are_named(loaded, save_adapter):
    file = save_adapter(**PLAIN) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    refused_alike(loaded, file.parent, InvalidInputError, "adapter_model.safetensors")


def test_wrong_shapes_are_named(loaded, save_adapter):
    folder = save_adapter(**PLAIN)
    tensors = load_file(folder / "adapter_model.safetensors")
    key = next(key for key in tensors if "q_proj.lora_A" in key)
    tensors[key] = tensors[key][:, :-1].contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    refused_alike(loaded, folder, InvalidInputError, r"q_proj[\s\S]*\[4, 15\][\s\S]*\[4, 16\]")


def test_a_rank_over_the_maximum_is_named(loaded, save_adapter):
    folder = save_adapter(r=5, target_modules=["q_proj"])
    refused_alike(loaded, folder, InvalidInputError, r"5[\s\S]*max_rank")


@pytest.mark.parametrize(
    ("feature", "config"),
    [
        ("use_qalora", {"use_qalora": True}),
        ("layer_replication", {"layer_replication": [[0, 2], [1, 3]]}),
        ("init_lora_weights", {"init_lora_weights": "pissa_niter_2"}),
    ],
)
def test_refused_features_are_named(loaded, save_adapter, feature, config):
    folder = save_adapter("llama", **PLAIN, **config)
    refused_alike(loaded, folder, UnsupportedInputError, feature)


def test_an_adapter_for_another_model_is_refused(loaded, save_adapter):
    folder = save_adapter("gpt2", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    refused_alike(loaded, folder, InvalidInputError, "transformer.h.0.attn.c_attn")


def test_a_position_embedding_is_refused(make_base, save_adapter):
    model = MultiLoRAModel(make_base("gpt2"), "torch_ref")
    folder = save_adapter("gpt2", r=2, target_modules=["wpe"])
    with pytest.raises(UnsupportedInputError, match="transformer.wpe: it is not the token"):
        model.load_adapter("a", folder)
    assert model.adapters == []


def test_a_replaced_base_weight_is_of_its_rows_alone(loaded, save_adapter, make_base):
    folder = save_adapter(r=2, target_modules=["embed_tokens"])
    tensors = load_file(folder / "adapter_model.safetensors")
    key = next((key for key in tensors if key.endswith("embed_tokens.base_layer.weight")), None)
    assert key, f"PEFT saved no base weight: {list(tensors)}"
    tensors[key] = tensors[key] + 1
    save_file(tensors, folder / "adapter_model.safetensors")
    before = logits(loaded, "good")
    loaded.load_adapter("own", folder)
    assert torch.equal(logits(loaded, "good"), before)
    base = make_base("llama")
    base.model.embed_tokens.weight.data += 1
    other = MultiLoRAModel(base, "torch_ref", max_rank=4)
    other.load_adapter("own", folder)
    torch.testing.assert_close(logits(loaded, "own"), logits(other, "own"), rtol=0, atol=2e-5)


def test_the_configuration_file_of_a_peft_checkpoint_stays_untouched(loaded, save_adapter):
    folder = save_adapter(**PLAIN)
    before = json.loads((folder / "adapter_config.json").read_text())
    loaded.load_adapter("other", folder)
    assert json.loads((folder / "adapter_config.json").read_text()) == before


def test_a_half_precision_model_rounds_its_adapters_once(make_base, save_adapter):
    model = MultiLoRAModel(make_base("llama").bfloat16(), "torch_ref", max_rank=4)
    model.load_adapter("a", save_adapter(**PLAIN))
    weights = model.pool.weights("model.layers.0.self_attn.q_proj")
    assert weights.lora_a.dtype == torch.bfloat16
    assert logits(model, "a").dtype == torch.bfloat16


def test_a_running_call_is_not_detached(model, save_adapter):
    """It would go on with the base model's own modules, from the middle on."""
    model.load_adapter("a", save_adapter(**PLAIN))
    refused, base = [], model.base

    def detach(*_):
        with pytest.raises(InvalidInputError, match="while it runs with adapters"):
            model.detach()
        refused.append(True)

    handle = base.model.layers[1].register_forward_pre_hook(detach)
    expected = logits(model, "a")
    step = model.prepare(["a"], tokens=IDS.shape[1])
    with model.using(step):
        assert torch.equal(base(input_ids=IDS).logits, expected)
    assert torch.equal(model(adapters=step, input_ids=IDS).logits, expected)
    assert len(refused) == 3
    handle.remove()
    assert torch.equal(logits(model, "a"), expected)
    assert model.detach() is base
    with pytest.raises(InvalidInputError, match="was detached"):
        with model.using(step):
            pass


@pytest.mark.parametrize("way", ["name", "prepared", "using"])
def test_a_call_that_begins_while_a_model_is_detached_is_refused(model, save_adapter, way):
    model.load_adapter("a", save_adapter(**PLAIN))
    step, results = model.prepare(["a"], tokens=IDS.shape[1]), []

    def call():
        try:
            if way == "using":
                with model.using(step):
                    results.append(model.base(input_ids=IDS).logits)
            else:
                results.append(model(adapters=["a"] if way == "name" else step, input_ids=IDS))
        except InvalidInputError as error:
            results.append(error)

    thread, handles = threading.Thread(target=call), model._wrapped.hooked.handles

    class Switching:
        """A hook whose removal runs `call` in another thread, in the middle of `detach`."""

        def __init__(self, hook):
            self.hook = hook

        def remove(self):
            self.hook.remove()
            thread.start()
            thread.join(10)

    handles[-1] = Switching(handles[-1])
    model.detach()
    thread.join()
    assert "was detached" in str(results)


def test_a_block_that_begins_while_a_store_is_closed_is_refused(model, save_adapter):
    """Otherwise `detach` would fail after it had closed the store."""
    store = model.keep_adapters()
    model.load_adapter("a", save_adapter(**PLAIN))
    step, close = model.prepare(["a"], tokens=IDS.shape[1]), store.close
    with contextlib.ExitStack() as block:

        def begin():
            close()
            with pytest.raises(InvalidInputError, match="was detached"):
                block.enter_context(model.using(step))

        store.close = begin
        assert model.detach() is model.base and model.store is None


def test_detach_may_be_called_twice(model):
    base = model.base
    assert model.detach() is base and model.detach() is base


def test_a_configuration_that_cannot_be_loaded_leaves_no_hook(make_base, save_adapter, tmp_path):
    base = make_base("llama")
    adapters = {"a": save_adapter(**PLAIN), "b": tmp_path / "nowhere"}
    config = LoRAConfig(backend="torch_ref", adapters=adapters)
    with pytest.raises(InvalidInputError, match="nowhere"):
        MultiLoRAModel.from_config(base, config)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.modules())


def test_a_configuration_with_more_adapters_than_slots_is_refused(make_base, save_adapter):
    folder = save_adapter(**PLAIN)
    config = LoRAConfig(max_adapters=1, adapters={"a": folder, "b": folder})
    with pytest.raises(InvalidInputError, match="2 adapters for 1 slots"):
        MultiLoRAModel.from_config(make_base("llama"), config)


def test_options_do_not_go_with_a_backend_that_is_made_already(make_base):
    backend = get_backend("torch_ref", device="cpu")
    with pytest.raises(InvalidInputError, match="made already"):
        MultiLoRAModel(make_base("llama"), backend, backend_options={"tile": 3})


@pytest.mark.parametrize(
    "option", [{"backend_options": 3}, {"fuse": "no"}, {"limits": 3}, {"limits": {"tensors": 9}}]
)
def test_options_of_a_wrong_type_are_refused_by_name(make_base, option):
    base = make_base("llama")
    with pytest.raises(InvalidInputError, match=f"{next(iter(option))} is .*\n  allowed"):
        MultiLoRAModel(base, "torch_ref", **option)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.modules())


@pytest.mark.parametrize("config", [None, "lora.toml", {"max_adapters": 2}])
def test_from_config_takes_a_configuration_alone(make_base, config):
    with pytest.raises(InvalidInputError, match=r"config is .*\n  allowed: a LoRAConfig"):
        MultiLoRAModel.from_config(make_base("llama"), config)


@pytest.mark.parametrize("ids", [[[1, 2]], torch.tensor([1, 2])])
def test_input_ids_are_rows_of_tokens(model, ids):
    with pytest.raises(InvalidInputError, match="no tokens to run on"):
        model(adapters=[None], input_ids=ids)


@pytest.mark.parametrize("base", [None, 3, "gpt2", {}], ids=repr)
def test_what_is_no_model_is_refused(base):
    with pytest.raises(InvalidInputError, match="base is no model"):
        MultiLoRAModel(base, "torch_ref")


def test_a_model_inside_another_module_is_refused_by_what_is_around_it(make_base):
    peft = pytest.importorskip("peft")
    inside = {
        "was compiled\n.*\n.*\n.*compile model.base": torch.compile,
        "is wrapped for parallel training\n.*\n.*\n.*base.module": torch.nn.DataParallel,
        "holds adapters of PEFT already\n.*\n.*\n.*base.unload": lambda base: peft.get_peft_model(
            base, peft.LoraConfig(target_modules=["q_proj"])
        ),
    }
    for told, wrap in inside.items():
        with pytest.raises(UnsupportedInputError, match=told):
            MultiLoRAModel(wrap(make_base("llama")), "torch_ref")


@pytest.mark.parametrize("way", ["base", "get_base_model", "load_adapter"])
def test_peft_430_a_base_that_peft_has_changed_is_refused(make_base, way):
    """PEFT puts LoRA into the model it is given; rows without an adapter had that LoRA, too."""
    peft = pytest.importorskip("peft")
    base = make_base("llama")
    config = peft.LoraConfig(target_modules=["q_proj"])
    if way == "load_adapter":
        try:
            base.add_adapter(config)
        except ValueError as error:  # a newer Transformers may ask for a PEFT that is yet to come
            pytest.skip(str(error))
    else:
        model = peft.get_peft_model(base, config)
        base = model.get_base_model() if way == "get_base_model" else base
    told = "every row would get\n.*q_proj.*\n.*\n.*unload"
    with pytest.raises(UnsupportedInputError, match=told):
        MultiLoRAModel(base, "torch_ref")
    if way != "load_adapter":
        MultiLoRAModel(model.unload(), "torch_ref")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_wrapped_model_is_not_copied(model, copied):
    with pytest.raises(UnsupportedInputError, match="cannot be copied or pickled"):
        copied(model)
