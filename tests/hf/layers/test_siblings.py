"""q, k, v and gate, up in one call: the same logits, whatever else is done to the modules."""

import copy
import gc
import inspect
import threading
import weakref

import pytest
import safetensors.torch
import torch
import transformers
from helpers.adapters.deltas import random_checkpoint
from torch.nn.utils import prune

from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.calls.running import RUNNING
from lora_backends.hf.hooks import siblings
from lora_backends.torch_ref import TorchRefBackend

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(1))
ROWS = ["a", None, "b"]
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OTHERS = ["Qwen2", "Qwen3", "Mistral"]


@pytest.fixture
def make(make_base):
    def make(name="llama", fuse=True, targets=LINEAR, bias=False, backend=None):
        if name in OTHERS:
            torch.manual_seed(7)
            config = getattr(transformers, f"{name}Config")(**SIZES, head_dim=4)
            base = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        else:
            base = make_base(name)
        backend = backend or TorchRefBackend()
        model = MultiLoRAModel(base, backend, max_adapters=3, max_rank=4, fuse=fuse)
        for seed, adapter in enumerate("ab"):
            model.add_adapter(adapter, random_checkpoint(base, targets, 4 - seed, seed, bias=bias))
        return model

    return make


@pytest.fixture
def operations(monkeypatch):
    """Return a list that notes the backend's operations."""
    noted, inside = [], []

    def note(name):
        run = getattr(TorchRefBackend, name)

        def noting(self, *args):
            if not inside:  # run_qkv is a run_linear by default
                noted.append(name)
            inside.append(name)
            y = run(self, *args)
            inside.pop()
            return y

        monkeypatch.setattr(TorchRefBackend, name, noting)

    for name in ("run_linear", "run_qkv", "run_gate_up"):
        note(name)
    return noted


def logits(model, rows=ROWS, ids=IDS):
    return model(adapters=rows, input_ids=ids, use_cache=False).logits


def attention(model):
    module = model.base.model.layers[0].self_attn
    return module.q_proj, module.k_proj, module.v_proj


def own_forwards(base):
    return [vars(module)["forward"] for module in base.modules() if "forward" in vars(module)]


def forwards(base):
    """Return the `forward` of every module in a group."""
    kinds = ("leader_forward", "sibling_forward")
    return [each for each in own_forwards(base) if each.__qualname__.startswith(kinds)]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama_bias", "gemma", *OTHERS])
def test_logits_are_those_of_modules_run_alone(name, strided, make, monkeypatch):
    if strided:  # as on a GPU
        monkeypatch.setattr(siblings, "_columns", lambda y, widths: y.split(widths, -1))
    fused, alone = make(name), make(name, fuse=False)
    assert len(forwards(fused.base)) == 5 * len(fused.base.model.layers)
    assert not forwards(alone.base)
    found, expected = logits(fused), logits(alone)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    with torch.no_grad():
        plain = alone.base(input_ids=IDS, use_cache=False).logits
    assert (found[0] - plain[0]).abs().max() > 1e-3
    torch.testing.assert_close(found[1], plain[1], rtol=0, atol=2e-5)


def test_a_layer_takes_four_calls(make, operations):
    logits(make())
    assert operations[:5] == ["run_qkv", "run_linear", "run_gate_up", "run_linear", "run_qkv"]
    assert RUNNING.kept is None


def test_all_modules_share_the_functions_that_add_their_lora(make):
    forwards, hooked = own_forwards(make().base), make(fuse=False).base.modules()
    hooks = [hook for module in hooked for hook in module._forward_hooks.values()]
    # for q, k and v, for gate and up, and for each module alone
    for functions, name, count in ((forwards, "run", 3), (hooks, "add", 1)):
        closures = [inspect.getclosurevars(each).nonlocals for each in functions]
        closures += [
            inspect.getclosurevars(c["in_full"]).nonlocals for c in closures if "in_full" in c
        ]
        assert len({c.get(name) for c in closures} - {None}) == count


def test_one_adapted_module_of_a_group_runs_alone(make, operations):
    logits(make(targets=["q_proj", "up_proj"]))
    assert set(operations) == {"run_linear"}


def test_a_model_fuses_only_when_asked_to_and_gpt2_has_no_siblings(make):
    assert not own_forwards(make(fuse=False).base)
    assert not forwards(make("gpt2").base)


def test_a_bias_and_slots_written_again_are_seen_by_both_ways(make):
    fused, alone = make(), make(fuse=False)
    for model in (fused, alone):
        model.add_adapter("c", random_checkpoint(model.base, ["k_proj"], 2, seed=5, bias=True))
        model.add_adapter("b", random_checkpoint(model.base, ["q_proj", "v_proj"], 3, seed=6))
    rows = ["a", "b", "c"]
    torch.testing.assert_close(logits(fused, rows), logits(alone, rows), rtol=0, atol=2e-5)
    for model in (fused, alone):
        model.unload_adapter("c")
        model.add_adapter("d", random_checkpoint(model.base, ["v_proj"], 1, seed=8, bias=True))
    rows = ["a", "b", "d"]
    torch.testing.assert_close(logits(fused, rows), logits(alone, rows), rtol=0, atol=2e-5)


def test_matrices_are_there_once(make):
    pool = make().pool
    path = "model.layers.0.self_attn."
    whole, part = pool.shared_weights[f"{path}q_proj"], pool.weights(f"{path}v_proj")
    assert whole.lora_a.data_ptr() == pool.weights(f"{path}q_proj").lora_a.data_ptr()
    assert part.lora_a.untyped_storage().data_ptr() == whole.lora_a.untyped_storage().data_ptr()
    assert part.lora_b.untyped_storage().data_ptr() == whole.lora_b.untyped_storage().data_ptr()
    assert whole.ranks.tolist() == [[4] * 3, [3] * 3, [0] * 3]
    assert part.ranks.is_contiguous() and part.ranks.tolist() == [[4], [3], [0]]


def test_prepared_adapters_follow_updates(make):
    fused, alone = make(), make(fuse=False)
    with fused.prepare(ROWS, tokens=5) as step:
        for rows in (ROWS, ["b", "b", None], [None] * 3):
            step.update(rows)
            torch.testing.assert_close(logits(fused, step), logits(alone, rows), rtol=0, atol=2e-5)


def test_another_order_or_input_gives_what_modules_alone_give(make):
    fused, alone = make(), make(fuse=False)
    x, other = torch.randn(2, 3, 5, 16)

    def calls(model):
        q, k, v = attention(model)
        changed = x.clone()
        with model.prepare(ROWS, tokens=5) as step, model.using(step):
            yield from (k(x), q(x), v(other), v(x), k(x))  # v(other) runs alone
            yield q(changed)
            changed.mul_(2)
            yield from (k(changed), v(changed))  # not the input that q had
            yield from (q(x), k(x.clone()), v(x[:]))

    for found, expected in zip(list(calls(fused)), list(calls(alone)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_a_model_that_leaves_outputs_is_no_longer_fused(make, operations):
    model = make()
    q, k, _ = attention(model)
    x = torch.randn(3, 5, 16)
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        for _ in range(3):
            q(x), k(x)
    assert operations == ["run_qkv", "run_linear", "run_linear", "run_linear", "run_linear"]


@pytest.mark.parametrize("bias", [False, True])
def test_inputs_of_any_layout_give_the_same(make, operations, bias):
    model = make("llama_bias" if bias else "llama")
    qkv, o_proj = attention(model), model.base.model.layers[0].self_attn.o_proj
    layouts = [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.stack([x, x], -1)[..., 0],
    ]
    with model.prepare(ROWS, tokens=5) as step, model.using(step), torch.no_grad():
        original = torch.randn(3, 5, 16)
        expected = [module(original) for module in (*qkv, o_proj)]
        for layout in layouts:
            x = layout(original)
            operations.clear()
            for module, y in zip((*qkv, o_proj), expected, strict=True):
                found = module(x)
                assert found.shape[:-1] == x.shape[:-1]
                torch.testing.assert_close(found.reshape(y.shape), y)
            assert operations == ["run_qkv", "run_linear"]


def test_an_engine_is_given_rows_once_for_every_group_and_module(make):
    rows = []

    class Noting(TorchRefBackend):
        def run_linear(self, x, weights, plan, base_output=None):
            rows.append((x.ndim, base_output.ndim))
            return super().run_linear(x, weights, plan, base_output)

    expected, calls = logits(make()), 4 * len(make().base.model.layers)
    rows.clear()
    torch.testing.assert_close(logits(make(backend=Noting())), expected)
    assert rows == [(2, 2)] * calls


def test_nothing_is_kept_after_an_error_or_a_call(make):
    model = make()
    q, k, _ = attention(model)
    x = torch.randn(3, 5, 16)
    with torch.no_grad():
        plain = k(x)
    step = model.prepare(ROWS, tokens=5)
    with pytest.raises(ZeroDivisionError), model.using(step):
        q(x)
        assert RUNNING.kept is not None
        raise ZeroDivisionError
    assert RUNNING.kept is None
    with torch.no_grad():
        assert torch.equal(k(x), plain)
    with model.using(step):
        q(x)
        with torch.no_grad():
            model.base(input_ids=IDS, use_cache=False)
        assert RUNNING.kept is None


def test_other_hooks_see_the_lora_and_hooked_modules_stay_alone(make, make_base):
    model, seen = make(), []
    _, k, _ = attention(model)
    k.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    k.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    expected = make(fuse=False)
    attention(expected)[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=2e-5)
    assert seen[0][0].shape == (3, 5, 16)
    base = make_base("llama")
    base.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *args: None)
    MultiLoRAModel(base, TorchRefBackend(), fuse=True)
    assert len(forwards(base)) == 5 * len(base.model.layers) - 3


def parameters_of(modules):
    return [dict(module.named_parameters()) for module in modules]


def test_weights_become_parts_of_one_and_values_stay(make, make_base):
    base = make_base("llama_bias")
    before, values = parameters_of(base.modules()), copy.deepcopy(base.state_dict())
    model = MultiLoRAModel(base, TorchRefBackend(), max_adapters=3, max_rank=4, fuse=True)
    q, k, v = attention(model)
    for name in ("weight", "bias"):
        parts = [getattr(module, name) for module in (q, k, v)]
        ends = [part.data_ptr() + part.nbytes for part in parts]
        assert ends[:-1] == [part.data_ptr() for part in parts[1:]]
    after = parameters_of(base.modules())
    assert [[*map(id, found.values())] for found in after] == [
        [*map(id, found.values())] for found in before
    ]
    assert base.state_dict().keys() == values.keys()
    for _ in range(2):
        for name, value in base.state_dict().items():
            assert torch.equal(value, values[name])
        model.detach()
    assert q.weight.untyped_storage().nbytes() == q.weight.nbytes
    assert q.weight.untyped_storage().data_ptr() != k.weight.untyped_storage().data_ptr()


def test_detach_gives_every_forward_back(make):
    model = make()
    assert len(own_forwards(model.base)) == 7 * len(model.base.model.layers) + 1
    assert not own_forwards(model.detach())


def test_weights_written_in_place_are_seen_and_weights_replaced_run_alone(make, operations):
    model, alone = make(), make(fuse=False)
    changes = [
        lambda k: k.weight.data.mul_(2),
        lambda k: setattr(k, "weight", torch.nn.Parameter(k.weight.detach() * 3)),
        lambda k: setattr(k.weight, "data", k.weight.data * 0.5),
    ]
    for number, change in enumerate(changes):
        for each in (model, alone):
            change(attention(each)[1])
        expected = logits(alone)
        operations.clear()
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=2e-5)
        assert operations[0] == ("run_linear" if number else "run_qkv")
    model.detach()
    torch.testing.assert_close(
        attention(model)[1].weight, attention(alone)[1].weight, rtol=0, atol=0
    )


def test_a_joined_model_is_saved_whole(make, tmp_path):
    model, expected = make(), make(fuse=False).base.state_dict()
    safetensors.torch.save_model(model.base, str(tmp_path / "model.safetensors"))
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    model.base.save_pretrained(tmp_path / "model")
    again = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    for found in (saved, again):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    k = attention(model)[1]
    assert k.weight.untyped_storage().nbytes() == k.weight.nbytes


@pytest.mark.parametrize("then", ["replaced", "pruned"])
def test_detach_parts_what_is_left_of_a_group(make, then):
    model = make()
    q, k, v = attention(model)
    if then == "pruned":
        prune.l1_unstructured(k, "weight", 0.5)
    else:
        k.weight = torch.nn.Parameter(k.weight.detach() * 2)
    alone = make(fuse=False)
    attention(alone)[1].weight.data.copy_(k.weight)
    torch.testing.assert_close(logits(model), logits(alone), rtol=0, atol=2e-5)
    addresses = q.weight.data_ptr(), v.weight.data_ptr()
    model.detach()
    assert (q.weight.data_ptr(), v.weight.data_ptr()) != addresses
    assert not own_forwards(model.base)


def test_a_base_wrapped_in_inference_mode_can_be_trained(make_base):
    base = make_base("llama")
    with torch.inference_mode():
        model = MultiLoRAModel(base, TorchRefBackend(), fuse=True)
    model.base(input_ids=IDS, labels=IDS).loss.backward()
    with torch.inference_mode():
        model.detach()
    model.base(input_ids=IDS, labels=IDS).loss.backward()
    assert attention(model)[1].weight.grad is not None


def test_gradients_are_not_lost(make):
    model = make()
    q, _, _ = attention(model)
    with model.prepare(ROWS, tokens=5) as step, model.using(step), torch.enable_grad():
        q(torch.randn(3, 5, 16)).sum().backward()
    assert q.weight.grad is not None


@pytest.fixture
def products(monkeypatch):
    """Return a list that notes the products of joined weights."""
    noted, linear = [], siblings.functional.linear

    def noting(x, weight, bias=None):
        if not weight.requires_grad:
            noted.append(weight)
        return linear(x, weight, bias)

    monkeypatch.setattr(siblings.functional, "linear", noting)
    return noted


def test_autocast_runs_modules_alone(make, products):
    model = make()
    logits(model)
    assert len(products) == 2 * len(model.base.model.layers)
    products.clear()
    q, _, _ = attention(model)
    x = torch.randn(3, 5, 16)
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        wanted = q(x.bfloat16().float())
        products.clear()
        with torch.autocast("cpu", torch.bfloat16):
            found = q(x.bfloat16())
    assert not products
    torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02)


def test_a_weight_transposed_in_place_is_seen(make, products):
    model, alone = make(), make(fuse=False)
    for each in (model, alone):
        weight = attention(each)[0].weight
        assert weight.shape[0] == weight.shape[1]
        weight.data = weight.data.t()
    torch.testing.assert_close(logits(model), logits(alone), rtol=0, atol=2e-5)
    assert len(products) == 2 * len(model.base.model.layers) - 1


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_module_whose_parameter_was_pruned_runs_with_what_is_left(make, name):
    model, plain = make("llama_bias"), make("llama_bias")
    pruned, written = (each.base.model.layers[0].self_attn.o_proj for each in (model, plain))
    pruned.bias.data.normal_()
    written.bias.data.copy_(pruned.bias)
    prune.l1_unstructured(pruned, name, 0.5)
    assert torch.equal(getattr(pruned, name) == 0, getattr(pruned, f"{name}_mask") == 0)
    getattr(written, name).data.copy_(getattr(pruned, name))
    assert torch.equal(logits(model), logits(plain))


def test_what_was_kept_for_siblings_goes_with_an_update(make):
    model, alone = make(), make(fuse=False)
    x, found = torch.randn(3, 5, 16), []
    for each in (model, alone):
        q, k, _ = attention(each)
        with each.prepare(ROWS, tokens=5) as step, each.using(step):
            q(x)
            step.update(["b", "b", None])
            found.append(k(x))
    torch.testing.assert_close(*found, rtol=0, atol=2e-5)


def test_prepared_adapters_keep_what_a_graph_reads(make):
    model = make()
    joined = model._wrapped.hooked.groups[0].joined.weight
    step = model.prepare(ROWS, tokens=5)
    kept = weakref.ref(joined)
    del joined
    model.detach()
    assert kept() is not None
    del step
    gc.collect()
    assert kept() is None


def test_a_deep_copy_runs_its_own_weights_in_a_call(make):
    model = make()
    twin = copy.deepcopy(model.base)
    q, own = twin.model.layers[0].self_attn.q_proj, attention(model)[0]
    q.weight.data.mul_(3)
    x = torch.randn(3, 5, 16)
    with model.prepare([None] * 3, tokens=5) as step, model.using(step):
        torch.testing.assert_close(q(x), 3 * own(x), rtol=0, atol=2e-5)


def test_parameters_that_cannot_move_stay(make_base):
    with torch.inference_mode():
        base = make_base("llama")
        model = MultiLoRAModel(base, TorchRefBackend(), max_adapters=2, max_rank=4, fuse=True)
        model.add_adapter("a", random_checkpoint(base, LINEAR, 4))
        model(adapters=["a", None, "a"], input_ids=IDS, use_cache=False)
        model.detach()
        base(input_ids=IDS)
    assert not forwards(MultiLoRAModel(base, TorchRefBackend(), fuse=True).base)
    modules = [torch.nn.Linear(4, 4, device="meta") for _ in range(2)]
    assert not siblings.are_plain(tuple(modules))


def test_no_memory_for_a_join_leaves_the_base_as_it_was(make_base, monkeypatch):
    base, join, count = make_base("llama"), siblings.Siblings.join, []

    def failing(self, joined):
        count.append(self)
        if len(count) == 3:
            raise torch.OutOfMemoryError("injected")
        join(self, joined)

    monkeypatch.setattr(siblings.Siblings, "join", failing)
    before = [p.data_ptr() for p in base.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        MultiLoRAModel(base, TorchRefBackend(), fuse=True)
    assert not own_forwards(base)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.modules())
    assert len({p.untyped_storage().data_ptr() for p in base.parameters()}) == len(before)


def test_what_moved_weights_leave_behind_is_freed(make):
    model = make()
    group = model._wrapped.hooked.groups[0]
    for module in group.modules:
        module.weight.data = module.weight.data.clone()
    logits(model)
    assert group.joined is None and group.paths[0] not in model._wrapped.hooked.joined


def test_modules_that_share_a_weight_stay_alone(make_base):
    """A weight is one part of a joined one, and the other part would miss what is written to it."""
    base = make_base("llama")
    attention = base.model.layers[0].self_attn
    attention.k_proj.weight = attention.v_proj.weight
    model = MultiLoRAModel(base, TorchRefBackend(), fuse=True)
    assert "forward" in vars(attention.k_proj) and not any(
        attention.k_proj in group.modules for group in model._wrapped.hooked.groups
    )
    with model.prepare([None] * 3, tokens=5) as step, model.using(step), torch.no_grad():
        attention.v_proj.weight.mul_(2)
        x = torch.randn(3, 5, 16)
        attention.q_proj(x)
        assert torch.equal(attention.k_proj(x), attention.v_proj(x))


def test_modules_of_which_some_have_a_bias_stay_alone(make_base):
    base = make_base("llama")
    k = base.model.layers[0].self_attn.k_proj
    k.bias = torch.nn.Parameter(torch.ones(k.out_features))
    MultiLoRAModel(base, TorchRefBackend(), fuse=True)
    assert len(forwards(base)) == 5 * len(base.model.layers) - 3


def test_a_deep_copy_computes_with_its_own_weights(make):
    model = make()
    twin = copy.deepcopy(model.base)
    with torch.no_grad():
        for parameter in model.base.parameters():
            parameter.zero_()
        x = torch.randn(2, 16)
        assert twin.model.layers[0].self_attn.k_proj(x).abs().max() > 0


def test_threads_and_inference_mode(make):
    model, alone = make(), make(fuse=False)
    wanted = {name: logits(alone, [name] * 3) for name in ("a", "b", None)}
    with torch.inference_mode():
        torch.testing.assert_close(logits(model, ["a"] * 3), wanted["a"], rtol=0, atol=2e-5)
    expected, wrong = {name: logits(model, [name] * 3) for name in wanted}, []

    def work(name):
        for _ in range(20):
            if not torch.equal(logits(model, [name] * 3), expected[name]):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
