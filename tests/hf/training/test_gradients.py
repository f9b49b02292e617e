"""Each adapter of a batch gets the gradients that PEFT computes for it alone on its own rows."""

from pathlib import Path

import peft
import pytest
import torch
from helpers.adapters.training import (
    PATTERNS,
    PLAIN,
    WIDE,
    Pair,
    batch,
    shake,
    tiny,
    train_step,
    wrapped,
)
from helpers.engines import ON_GPU, run_interpreted

from lora_backends import InvalidInputError, UnsupportedInputError, backend_names
from lora_backends import unavailable_reasons as reasons

ROWS = ["a", None, "b", "a", "c", "b"]
BOUNDS = {torch.float32: 2e-5, torch.float64: 2e-6}  # norms and scalings are float32
BACKENDS = [name for name in backend_names() if not reasons(name, "cpu")]


def check_gradients(model, pairs, rows, *, bound, seed=1):
    ids, labels = batch(len(rows), seed=seed)
    losses = train_step(model, rows, ids, labels)
    assert list(losses) == [*dict.fromkeys(name for name in rows if name is not None)]
    for pair in pairs:
        expected = pair.backward(rows, ids, labels)
        if expected is not None:
            assert torch.allclose(losses[pair.name], expected, rtol=1e-5)
        pair.check(bound)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_mixed_ranks_and_modules(backend, fuse):
    model = wrapped(tiny(), backend, fuse=fuse)
    configs = {"a": PLAIN, "b": WIDE, "c": PATTERNS}
    pairs = [Pair(model, name, tiny(), config) for name, config in configs.items()]
    check_gradients(model, pairs, ROWS, bound=BOUNDS[torch.float32])
    assert all(parameter.grad is None for parameter in model.base.parameters())


@pytest.mark.parametrize("kind", ["qwen", "gpt2", "llama"])
def test_gradients_in_float64(kind):
    dtype = torch.float64
    model = wrapped(tiny(kind, dtype))
    targets = ["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "v_proj", "lm_head"]
    head = [] if kind == "gpt2" else ["embed_tokens"]
    configs = {
        "a": {"r": 4, "target_modules": targets},
        "b": {"r": 5, "target_modules": "all-linear", "lora_alpha": 3},
        "c": {"r": 2, "target_modules": [*targets[:1], *head]},
    }
    pairs = [Pair(model, name, tiny(kind, dtype), config) for name, config in configs.items()]
    check_gradients(model, pairs, ROWS, bound=BOUNDS[dtype])


def test_gradients_accumulate_over_batches_in_which_an_adapter_is_absent():
    model = wrapped(tiny(dtype=torch.float64))
    pairs = [Pair(model, n, tiny(dtype=torch.float64), c) for n, c in (("a", PLAIN), ("b", WIDE))]
    for seed, rows in enumerate([["a", "b"], ["a", None], ["a", "a"]]):
        check_gradients(model, pairs, rows, bound=BOUNDS[torch.float64], seed=seed)
    absent = Pair(model, "c", tiny(dtype=torch.float64), PLAIN)
    check_gradients(model, [*pairs, absent], ["b", None], bound=BOUNDS[torch.float64])
    assert all(parameter.grad is None for parameter in absent.ours.values())


def test_two_forwards_before_their_backwards():
    model = wrapped(tiny(dtype=torch.float64))
    pairs = [Pair(model, n, tiny(dtype=torch.float64), c) for n, c in (("a", PLAIN), ("b", WIDE))]
    batches = [(["a", "b", None], 1), (["b", "b", "a"], 2)]
    pending = []
    for rows, seed in batches:
        ids, labels = batch(len(rows), seed=seed)
        logits = model(adapters=rows, input_ids=ids).logits
        pending.append(model.adapter_losses(logits, labels, adapters=rows))
        for pair in pairs:
            pair.backward(rows, ids, labels)
    for losses in reversed(pending):
        sum(losses.values()).backward()
    for pair in pairs:
        pair.check(BOUNDS[torch.float64])


def test_a_step_of_one_adapter_leaves_the_graph_of_another():
    model = wrapped(tiny())
    a, b = (Pair(model, n, tiny(), PLAIN) for n in "ab")
    ids, labels = batch(2)
    first = model(adapters=["a", "a"], input_ids=ids).logits
    second = model(adapters=["b", "b"], input_ids=ids).logits
    first.sum().backward()
    torch.optim.SGD(a.ours.values(), lr=0.1).step()
    model.new_adapter("late", peft.LoraConfig(**WIDE))
    model.unload_adapter("late")
    model.adapter_losses(second, labels, adapters=["b", "b"])["b"].backward()
    b.backward(["b", "b"], ids, labels)
    b.check(BOUNDS[torch.float32])
    third = model(adapters=["a", "b"], input_ids=ids).logits
    torch.optim.SGD(a.ours.values(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        third.sum().backward()


@pytest.mark.parametrize("change", ["unload", "reload", "evict"])
def test_a_backward_after_the_adapter_has_left_is_refused(change, tmp_path):
    model = wrapped(tiny(), max_adapters=2)
    Pair(model, "a", tiny(), PLAIN)
    Pair(model, "b", tiny(), PLAIN)
    model.save_adapter("b", tmp_path)
    if change == "evict":
        model.unload_adapter("b")
        model.load_adapter("b", tmp_path)
    ids, _ = batch(2)
    logits = model(adapters=["a", "b"], input_ids=ids).logits
    if change == "evict":
        model.load_adapter("c", tmp_path)
    else:
        model.unload_adapter("b")
    if change == "reload":
        model.load_adapter("b", tmp_path, trainable=True)
    with pytest.raises(InvalidInputError, match="between its forward"):
        logits.sum().backward()


def test_rows_of_adapters_that_are_not_trained_pass_gradients_on(tmp_path):
    """Per token, a frozen adapter's tokens lie between those of one that is trained."""
    model = wrapped(tiny(dtype=torch.float64))
    Pair(model, "a", tiny(dtype=torch.float64), WIDE, std=0.2)
    Pair(model, "b", tiny(dtype=torch.float64), PLAIN)
    model.save_adapter("b", tmp_path)
    ids, labels = batch(2, length=6)
    rows = [["a", "b", "b", None, "a", "b"], "a"]

    def loss():
        return model(adapters=rows, input_ids=ids).logits[..., :5].square().mean()

    expected = torch.autograd.grad(loss(), list(model.adapter_parameters("a").values()))
    model.unload_adapter("b")
    model.load_adapter("b", tmp_path)
    with pytest.raises(InvalidInputError, match="not trained"):
        model.adapter_parameters("b")
    found = torch.autograd.grad(loss(), list(model.adapter_parameters("a").values()))
    assert all(map(torch.equal, expected, found))
    with pytest.raises(UnsupportedInputError, match="one per token"):
        model.adapter_losses(torch.zeros(2, 6, 3), labels, adapters=rows)


def test_values_of_other_adapters_never_reach_a_gradient():
    model = wrapped(tiny(), "torch_ref")
    pairs = [Pair(model, n, tiny(), PLAIN) for n in "ab"]
    with torch.no_grad():
        for parameter in pairs[1].ours.values():
            parameter.fill_(torch.nan)
    ids, labels = batch(4)
    rows = ["a", "b", "a", None]
    losses = train_step(model, rows, ids, labels)
    pairs[0].backward(rows, ids, labels)
    pairs[0].check(BOUNDS[torch.float32])
    assert losses["b"].isnan()


def test_a_base_whose_parameters_are_trained_too_gets_its_gradients():
    for fuse in (False, True):
        model = wrapped(tiny(dtype=torch.float64), fuse=fuse)
        pair = Pair(model, "a", tiny(dtype=torch.float64), WIDE)
        weights = [
            model.base.model.layers[0].self_attn.q_proj.weight,
            pair.peft.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight,
        ]
        for weight in weights:
            weight.requires_grad_()
        ids, labels = batch(2)
        train_step(model, ["a", "a"], ids, labels)
        pair.backward(["a", "a"], ids, labels)
        pair.check(BOUNDS[torch.float64])
        assert torch.allclose(weights[0].grad, weights[1].grad, rtol=1e-5, atol=1e-9)


def flat_gradients(parameters):
    return torch.cat([p.grad.flatten().float() for p in parameters.values()])


def assert_as_near_as_peft(ours, theirs, exact):
    """Rounding errors of the same kind: at most half as large again, over all parameters."""
    errors = [(flat_gradients(each) - exact).norm() / exact.norm() for each in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1] and 1e-5 < errors[1] < 0.2, errors


def test_autocast_gives_the_base_in_16_bits_and_the_adapters_their_gradients():
    for fuse in (False, True):
        model = wrapped(tiny(), fuse=fuse)
        pair = Pair(model, "a", tiny(), WIDE)
        ids, labels = batch(2)
        rows = ["a", "a"]
        pair.backward(rows, ids, labels)
        exact = flat_gradients(pair.theirs)
        for parameter in pair.theirs.values():
            parameter.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            losses = train_step(model, rows, ids, labels)
            pair.backward(rows, ids, labels)
        assert losses["a"].dtype == torch.float32
        assert {parameter.grad.dtype for parameter in pair.ours.values()} == {torch.float32}
        assert_as_near_as_peft(pair.ours, pair.theirs, exact)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_16_bit_parameters_and_their_masters(dtype, fuse):
    model = wrapped(tiny(dtype=torch.bfloat16), fuse=fuse)
    ids, labels = batch(3)
    rows = ["a", None, "a"]
    pair = Pair(model, "a", tiny(dtype=torch.bfloat16), WIDE, dtype=dtype)
    pair.peft.to(torch.bfloat16)  # PEFT computes with 32-bit adapters, the engines with 16
    exact = Pair(wrapped(tiny()), "a", tiny(), WIDE)
    for each in (pair, exact):
        each.backward(rows, ids, labels)
    train_step(model, rows, ids, labels)
    assert {p.grad.dtype for p in pair.ours.values()} == {dtype or torch.bfloat16}
    assert_as_near_as_peft(pair.ours, pair.theirs, flat_gradients(exact.theirs))


def test_masters_beside_parameters_of_16_bits_keep_their_precision():
    found = []
    for other in ({}, {"dtype": torch.float32}):
        model = wrapped(tiny(dtype=torch.bfloat16))
        base = tiny(dtype=torch.bfloat16)
        Pair(model, "first", base, PLAIN, **other)
        b = Pair(model, "b", tiny(dtype=torch.bfloat16), WIDE, dtype=torch.float32)
        ids, labels = batch(2)
        train_step(model, ["first", "b"], ids, labels)
        found.append({key: p.grad for key, p in b.ours.items()})
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert any((g != g.bfloat16()).any() for g in found[0].values())


def _called(model, ids):
    return model(adapters=["a"], input_ids=ids).logits[:, -1]


def _generated(model, ids):
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(adapters=["a"], input_ids=ids, **options).logits[0]


def _prepared(step):
    return lambda model, ids: model(adapters=step, input_ids=ids).logits[:, -1]


def _in_a_block(step):
    def run(model, ids):
        with model.using(step):
            return model.base(input_ids=ids).logits[:, -1]

    return run


@torch.no_grad()
def test_changes_through_data_reach_the_stacks_of_masters(tmp_path):
    """Such a change has no version, which torch counts; it may follow a call without a step."""
    model, other = (wrapped(tiny(dtype=torch.bfloat16)) for _ in range(2))
    pair, (ids, labels) = Pair(model, "a", tiny(), PLAIN, dtype=torch.float32), batch(1)
    step = model.prepare(["a"], tokens=ids.shape[1])
    for turn, run in enumerate((_called, _generated, _prepared(step), _in_a_block(step))):
        if turn % 2:
            with torch.enable_grad():
                train_step(model, ["a"], ids, labels)
        before = _called(model, ids)
        for parameter in pair.ours.values():
            parameter.data.mul_(1.5)
        model.save_adapter("a", tmp_path / f"{turn}")
        other.load_adapter("a", tmp_path / f"{turn}", replace_existing=True)
        assert torch.equal(run(model, ids), _called(other, ids))
        assert not torch.equal(run(model, ids), before)


def test_without_grad_mode_or_a_trained_adapter_there_is_no_graph():
    model = wrapped(tiny())
    Pair(model, "a", tiny(), PLAIN)
    ids, _ = batch(2)
    with torch.no_grad():
        without = model(adapters=["a", None], input_ids=ids).logits
    with torch.inference_mode():
        model(adapters=["a", None], input_ids=ids)
    graph = model(adapters=["a", None], input_ids=ids).logits
    assert graph.requires_grad and not without.requires_grad
    assert torch.equal(graph, without)
    assert not model(adapters=[None, None], input_ids=ids).logits.requires_grad
    step = model.prepare(["a", None], tokens=9)
    assert not model(adapters=step, input_ids=ids).logits.requires_grad


def test_blends_split_and_compiled_models_are_refused():
    model = wrapped(tiny())
    Pair(model, "a", tiny(), PLAIN)
    ids, _ = batch(1)
    with pytest.raises(UnsupportedInputError, match="blends or strengths"):
        model(adapters=[{"a": 0.5}], input_ids=ids)
    with pytest.raises(UnsupportedInputError, match="split=True"):
        model(adapters=["a"], input_ids=ids, split=True)
    with torch.no_grad():
        model(adapters=[{"a": 0.5}], input_ids=ids)
    model.base.model.layers[0].compile()
    with pytest.raises(UnsupportedInputError, match="compiled in place"):
        model(adapters=["a"], input_ids=ids)


INTERPRETED = """
import sys
sys.path.insert(0, sys.argv[1])
from helpers.adapters.training import Pair, batch, tiny, train_step, wrapped
model = wrapped(tiny(), "triton", max_adapters=2, max_rank=4, fuse=True)
layers = {"layers_to_transform": [1], "target_modules": ["q_proj", "v_proj", "o_proj"]}
pairs = [Pair(model, name, tiny(), {"r": r, **layers}) for name, r in (("a", 4), ("b", 2))]
rows = ["b", None, "a"]
ids, labels = batch(len(rows), length=3)
train_step(model, rows, ids, labels)
for pair in pairs:
    pair.backward(rows, ids, labels)
    pair.check(2e-4)
"""


@pytest.mark.skipif(ON_GPU, reason="tests of the GPU run the kernels themselves")
def test_an_engine_of_triton_in_the_interpreter():
    run_interpreted("-c", INTERPRETED, str(Path(__file__).parents[2]))


def test_shaken_parameters_differ():
    """The helper must give values that count."""
    model = wrapped(tiny())
    pair = Pair(model, "a", tiny(), PLAIN, std=0)
    ids, _ = batch(1)
    plain = model(adapters=["a"], input_ids=ids).logits
    shake(pair.ours)
    assert not torch.allclose(plain, model(adapters=["a"], input_ids=ids).logits)
