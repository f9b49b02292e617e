"""Modules that repeat their last call give what they give in full, whatever has changed since."""

import copy
import threading

import pytest
import torch
from helpers.adapters.deltas import random_checkpoint
from torch.nn.utils import prune

pytest.importorskip("numba")

from lora_backends.dispatch.repeats import NO_REPEATS, Repeat
from lora_backends.errors import LoRABackendError
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.calls.running import RUNNING
from lora_backends.numba_cpu import NumbaCPUBackend

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(1))
ROWS, OTHERS = ["a", None, "b"], ["b", "b", "a"]
GROUPS = 4 * 2  # of two layers


@pytest.fixture
def make(make_base):
    def make(fuse=True, name="llama_bias"):
        base = make_base(name)
        del base.model.layers[2:]
        model = MultiLoRAModel(base, NumbaCPUBackend(), max_adapters=3, max_rank=4, fuse=fuse)
        for seed, adapter in enumerate("ab"):
            model.add_adapter(adapter, random_checkpoint(base, LINEAR, 4 - seed, seed))
        return model

    return make


@pytest.fixture
def repeated(monkeypatch):
    """Return a list with a bool for each call that modules tried to repeat."""
    noted, run = [], Repeat.run

    def noting(self, *given):
        y = run(self, *given)
        noted.append(y is not None)
        return y

    monkeypatch.setattr(Repeat, "run", noting)
    return noted


def logits(model, rows=ROWS, ids=IDS):
    return model(adapters=rows, input_ids=ids, use_cache=False).logits


def warm(model, rows=ROWS, tokens=5):
    """Return prepared adapters whose calls are kept."""
    step = model.prepare(rows, tokens=tokens)
    logits(model, step, IDS[:, :tokens])
    return step


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def attention(model):
    return model.base.model.layers[0].self_attn


def test_every_group_repeats_the_call_of_the_pass_before(make, repeated):
    model = make()
    step = model.prepare(ROWS, tokens=5)
    expected = logits(model, step)
    assert not repeated
    for _ in range(2):
        repeated.clear()
        assert torch.equal(logits(model, step), expected)
        assert repeated == [True] * GROUPS
    assert RUNNING.kept is None and RUNNING.repeats is NO_REPEATS
    close(expected, logits(make(fuse=False)))


def test_repeats_follow_updates_and_adapters_written_anew(make, repeated):
    model, alone = make(), make(fuse=False)
    step = warm(model)
    for rows in (OTHERS, [None] * 3, ROWS):
        step.update(rows)
        close(logits(model, step), logits(alone, rows))
    for each in (model, alone):
        each.update_adapter("b", random_checkpoint(each.base, LINEAR, 2, seed=9))
    repeated.clear()
    close(logits(model, step), logits(alone, ROWS))
    assert repeated == [True] * GROUPS


def test_an_adapter_that_takes_the_slot_of_another_is_seen(make):
    model, alone = make(), make(fuse=False)
    step = warm(model, ["a", None, None])
    for each in (model, alone):
        each.unload_adapter("b")
        each.add_adapter("c", random_checkpoint(each.base, LINEAR, 3, seed=7))
    step.update(["c", "a", "c"])
    close(logits(model, step), logits(alone, ["c", "a", "c"]))


CHANGES = {
    "written in place": lambda module: module.weight.data.mul_(2),
    "moved": lambda module: setattr(module.weight, "data", module.weight.data * 3),
    "replaced": lambda module: setattr(
        module, "weight", torch.nn.Parameter(module.weight.detach() * 3)
    ),
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "another bias": lambda module: setattr(
        module, "bias", torch.nn.Parameter(torch.ones(module.out_features))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
@pytest.mark.parametrize("base", ["llama", "llama_bias"])
def test_base_weights_that_changed_between_passes_are_seen(make, base, name, change):
    model, alone = make(name=base), make(fuse=False, name=base)
    step = warm(model)
    for each in (model, alone):
        CHANGES[change](getattr(attention(each), name))
    for _ in range(2):
        close(logits(model, step), logits(alone))


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_a_weight_that_was_transposed_where_it_lies_is_seen(make, name):
    model, alone = make(), make(fuse=False)
    step = warm(model)
    for each in (model, alone):
        weight = getattr(attention(each), name).weight

        def transposing(*_, weight=weight):
            weight.data = weight.data.t()

        attention(each).register_forward_pre_hook(transposing)
    close(logits(model, step), logits(alone))


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("name", ["q_proj", "v_proj"])
def test_a_parameter_that_was_cut_where_it_lies_is_seen(make, name, part):
    model, alone = make(name="llama_bias"), make(fuse=False, name="llama_bias")
    step = warm(model)
    for each in (model, alone):
        parameter = getattr(getattr(attention(each), name), part)
        parameter.data = parameter.data[:4]
    for call in (lambda: logits(alone), lambda: logits(model), lambda: logits(model, step)):
        with pytest.raises((LoRABackendError, RuntimeError)):
            call()


@pytest.mark.parametrize("change", ["moved", "replaced", "written in place", "another bias"])
def test_base_weights_that_change_within_a_pass_are_seen(make, change):
    """As code that moves weights to the device for the time in which they are needed does."""
    model, alone = make(), make(fuse=False)
    step = warm(model)

    def changing(module, args):
        CHANGES[change](module.k_proj)

    for each in (model, alone):
        attention(each).register_forward_pre_hook(changing)
    for _ in range(2):
        close(logits(model, step), logits(alone))


@pytest.mark.parametrize("change", ["moved", "replaced"])
def test_a_sibling_whose_weight_is_moved_behind_its_leader_runs_alone(make, change):
    model, alone = make(), make(fuse=False)
    step = warm(model)
    for each in (model, alone):
        k = attention(each).k_proj
        attention(each).q_proj.register_forward_hook(lambda *_, k=k: CHANGES[change](k))
    close(logits(model, step), logits(alone))
    assert model._wrapped.hooked.groups[0].joined is None, "later passes run all of them alone"


def test_an_input_that_changes_in_place_behind_its_leader_is_multiplied_anew(make):
    model, alone = make(), make(fuse=False)
    step = warm(model)
    for each in (model, alone):

        def changing(module, args, output):
            args[0].mul_(2)

        attention(each).q_proj.register_forward_hook(changing)
    close(logits(model, step), logits(alone))


def test_a_sibling_that_is_given_another_tensor_multiplies_it(make):
    model, alone = make(), make(fuse=False)
    step = warm(model)
    for each in (model, alone):
        attention(each).k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    for _ in range(3):
        close(logits(model, step), logits(alone))


def test_gradients_that_are_switched_on_within_a_pass_are_kept(make, repeated):
    model = make()
    step = warm(model)
    handles = [
        attention(model).register_forward_pre_hook(lambda *_: torch.set_grad_enabled(True) and None)
    ]
    repeated.clear()
    assert logits(model, step).requires_grad
    assert True not in repeated
    handles[0].remove()
    repeated.clear()
    logits(model, step)
    assert repeated == [True] * GROUPS


def test_autocast_within_a_pass_gives_what_it_gives_without_repeats(make, repeated):
    model = make()
    step = warm(model)
    x = torch.randn(3, 5, 16)
    found = []
    for _ in range(2):
        with model.using(step), torch.no_grad():
            RUNNING.repeats = step.repeats()  # as in a pass
            with torch.autocast("cpu", torch.bfloat16):
                for module in (attention(model).o_proj, attention(model).q_proj):
                    assert module(x.bfloat16()).dtype == torch.bfloat16
                    assert RUNNING.kept is None
            found.append(attention(model).o_proj(x))
    assert True in repeated and torch.equal(*found)


def test_in_inference_mode_the_logits_are_the_same(make):
    model, alone = make(), make(fuse=False)
    step = warm(model)
    with torch.inference_mode():
        for _ in range(3):
            close(logits(model, step), logits(alone))


def test_a_sibling_of_another_group_computes_for_itself(make):
    model, alone = make(), make(fuse=False)
    step, x = warm(model), torch.randn(3, 5, 16)
    expected = alone.prepare(ROWS, tokens=5)
    with alone.using(expected):
        wanted = [alone.base.model.layers[0].mlp.up_proj(x), attention(alone).k_proj(x)]
    for repeats in (NO_REPEATS, step.repeats()):
        with model.using(step):
            RUNNING.repeats = repeats
            attention(model).q_proj(x)
            close(model.base.model.layers[0].mlp.up_proj(x), wanted[0])
            close(attention(model).k_proj(x), wanted[1])


def test_a_model_that_leaves_outputs_is_no_longer_fused(make, repeated):
    model = make()
    step, x = warm(model), torch.randn(3, 5, 16)
    with model.using(step):
        RUNNING.repeats = step.repeats()
        for _ in range(3):
            attention(model).q_proj(x), attention(model).k_proj(x)
    assert repeated == [True] and model._wrapped.hooked.groups[0].apart


def test_a_block_within_a_pass_runs_its_own_rows(make):
    model = make()
    steps, x, found = (warm(model), warm(model, OTHERS)), torch.randn(3, 5, 16), []
    o_proj = attention(model).o_proj
    with model.using(steps[1]):
        expected = o_proj(x)

    def within(*_):
        with model.using(steps[1]):
            found.append(o_proj(x))

    model.base.model.layers[1].register_forward_pre_hook(within)
    logits(model, steps[0])
    assert torch.equal(*found, expected)


def test_a_pass_that_compiles_kernels_for_graphs_repeats_nothing(make):
    step = warm(make())
    assert step.repeats()
    step.asks_backend = True
    assert step.repeats() is NO_REPEATS


def test_modules_that_are_called_behind_a_pass_run_with_all_checks(make, repeated):
    model = make()
    step = warm(model)
    o_proj = attention(model).o_proj
    x = torch.randn(3, 5, 16)
    with model.using(step):
        model.base(input_ids=IDS, use_cache=False)
        assert repeated == [True] * GROUPS
        assert torch.equal(o_proj(x), o_proj(x))
        assert len(repeated) == GROUPS


def test_a_pass_that_failed_leaves_nothing_to_repeat_outside_of_its_call(make):
    model = make()
    step = warm(model)

    def failing(*_):
        assert RUNNING.repeats is not NO_REPEATS
        raise ZeroDivisionError

    handle = attention(model).register_forward_pre_hook(failing)
    with pytest.raises(ZeroDivisionError):
        logits(model, step)
    assert RUNNING.repeats is NO_REPEATS
    handle.remove()
    close(logits(model, step), logits(make(fuse=False)))


def test_a_model_within_a_pass_of_another_repeats_its_own_calls(make):
    outer, inner = make(), make()
    for parameter in inner.base.parameters():
        parameter.data.mul_(1.5)
    alone = logits(outer, warm(outer)), logits(inner, warm(inner, OTHERS))
    steps, found = (warm(outer), warm(inner, OTHERS)), []
    middle = outer.base.model.layers[1]
    middle.register_forward_pre_hook(lambda *_: found.append(logits(inner, steps[1])) and None)
    for _ in range(2):
        assert torch.equal(logits(outer, steps[0]), alone[0])
        assert torch.equal(found.pop(), alone[1])


def test_a_copy_of_a_module_runs_its_own_weights(make):
    model = make()
    step = warm(model)
    own = attention(model)
    twin = copy.deepcopy(own)
    for parameter in twin.parameters():
        parameter.data.mul_(3)
    x = torch.randn(3, 5, 16)
    with model.using(step):
        for name in ("q_proj", "o_proj"):
            full = getattr(twin, name)(x)
            RUNNING.repeats = step.repeats()
            close(getattr(twin, name)(x), full)
            RUNNING.kept, RUNNING.repeats = None, NO_REPEATS


def test_a_thread_within_a_pass_of_another_runs_its_own_rows(make):
    model, alone = make(), make(fuse=False)
    step, found = warm(model), []
    wanted = logits(alone), logits(alone, OTHERS)

    def meanwhile(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: found.append(logits(model, OTHERS)))
            thread.start()
            thread.join()

    attention(model).register_forward_pre_hook(meanwhile)
    for _ in range(2):
        close(logits(model, step), wanted[0])
        close(found.pop(), wanted[1])


def test_passes_of_generate_repeat_from_the_third_of_a_size_on(make, repeated):
    model, alone = make(), make(fuse=False)
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(IDS, adapters=ROWS, **given)
    assert torch.equal(found, alone.generate(IDS, adapters=ROWS, **given))
    assert repeated == [True] * GROUPS * 3, "of five passes with one token per row"


def test_rows_of_passes_of_other_sizes_are_not_mixed_up(make):
    """The same flat shape holds other rows in a batch of another size."""
    model, alone = make(), make(fuse=False)
    beams = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False, "pad_token_id": 0}
    for rows in (ROWS, OTHERS):
        found = model.generate(IDS, adapters=rows, **beams)
        assert torch.equal(found, alone.generate(IDS, adapters=rows, **beams))


def test_adapters_that_differ_by_token_repeat_nothing(make, repeated):
    model, alone = make(), make(fuse=False)
    rows = [["a"] * 3 + ["b"] * 2, [None] * 4 + ["a"], "b"]
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(IDS, adapters=rows, **given)
    assert torch.equal(found, alone.generate(IDS, adapters=rows, **given))
    assert not repeated


def test_a_program_neither_repeats_nor_keeps(make, repeated, fresh_programs):
    model = make()
    step = warm(model)
    expected = logits(model, step)
    program = torch.compile(model.base, fullgraph=True, backend="eager")
    repeated.clear()
    with model.using(step):
        for _ in range(2):
            close(program(input_ids=IDS, use_cache=False).logits, expected)
    assert not repeated
    assert torch.equal(logits(model, step), expected)
