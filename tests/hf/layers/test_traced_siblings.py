"""q, k, v and gate, up in a program of torch.compile: one call, and what modules alone compute."""

import copy

import pytest
import torch
from helpers.adapters.deltas import random_checkpoint

from lora_backends import InvalidInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.calls.running import RUNNING
from lora_backends.hf.hooks import siblings
from lora_backends.torch_ref import TorchRefBackend

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROWS = ["a", None, "b"]
IDS = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(1))
X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2))

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.usefixtures("fresh_programs"),
]


@pytest.fixture
def make(make_base):
    def make(fuse=True, name="llama", backend=None):
        base = make_base(name)
        del base.model.layers[1:]
        model = MultiLoRAModel(base, backend or TorchRefBackend(), 3, 4, fuse=fuse)
        for seed, adapter in enumerate("ab"):
            model.add_adapter(adapter, random_checkpoint(base, LINEAR, 4 - seed, seed))
        return model

    return make


class Noting(TorchRefBackend):
    """Notes the slices of each call."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def run_linear(self, x, weights, plan, base_output=None):
        self.noted.append(weights.num_slices)
        return super().run_linear(x, weights, plan, base_output)


def logits(model, rows):
    return model(adapters=rows, input_ids=IDS, use_cache=False).logits


def projections(base):
    attention = base.model.layers[0].self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj


def compiled(function, **options):
    return torch.compile(function, **{"backend": "aot_eager", **options})


def assert_like_modules_alone(found, function, alone):
    """Compare with what `function` of q, k, v and an input gives where they are never joined."""
    with alone.prepare(ROWS, tokens=5) as step, alone.using(step):
        expected = function(*projections(alone.base), X.clone())
    for y, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(y, wanted, rtol=0, atol=2e-5)


def test_a_program_computes_siblings_in_one_call_and_follows_updates(make):
    model = make(backend=Noting())
    program, noted = compiled(model.base, fullgraph=True), model.backend.noted
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        expected = logits(model, step)
        assert torch.equal(program(input_ids=IDS, use_cache=False).logits, expected)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (["b", "b", None], [None] * 3):
                step.update(rows)
                expected = logits(model, step)
                noted.clear()
                assert torch.equal(program(input_ids=IDS, use_cache=False).logits, expected)
                assert noted == [3, 1, 2, 1]
    assert RUNNING.kept is None


def test_a_layer_is_four_operations_and_four_products_without_copies(make, monkeypatch):
    monkeypatch.setattr(siblings, "_columns", lambda y, widths: y.split(widths, -1))  # on a GPU
    model, graphs = make(), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep)
    program = compiled(model.base, fullgraph=True, backend=backend)
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        program(input_ids=IDS, use_cache=False)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count("auto_functionalized_v2") == 4
    assert called.count("aten.mm.default") == 5  # the head is the fifth
    assert not {"aten.clone.default", "aten.copy_.default", "lora_backends.note.default"} & {
        *called
    }


def in_turn(q, k, v, x):
    return q(x), k(x), v(x)


def with_breaks(q, k, v, x):
    y = q(x)
    torch._dynamo.graph_break()
    z = k(x)
    torch._dynamo.graph_break()
    return y, z, v(x)


def another_order(q, k, v, x):
    z = k(x)
    return q(x), z, v(x), k(x)


def changed_between(q, k, v, x):
    y = q(x)
    x.mul_(2)
    return y, k(x), v(x)


def changed_through_a_view(q, k, v, x):
    y = q(x)
    x.view(-1)[3:].mul_(2)
    return y, k(x), v(x)


def changed_behind_a_break(q, k, v, x):
    h = x + 1
    y = q(h)
    torch._dynamo.graph_break()
    h.mul_(2)
    return y, k(h), v(h)


def changed_by_an_eager_part(q, k, v, x):
    y = q(x)
    torch.compiler.disable(x.mul_)(2)
    return y, k(x), v(x)


def other_inputs(q, k, v, x):
    return q(x), k(x.clone()), v(x[:])


USES = [
    in_turn,
    with_breaks,
    another_order,
    changed_between,
    changed_through_a_view,
    changed_behind_a_break,
    changed_by_an_eager_part,
    other_inputs,
]


@pytest.mark.parametrize("function", USES, ids=lambda function: function.__name__)
def test_lora_is_added_once_whatever_a_program_does_between_siblings(function, make):
    model, alone = make(name="llama_bias"), make(name="llama_bias", fuse=False)
    program = compiled(function)
    with model.prepare(ROWS, tokens=5) as step:
        for _ in range(2):
            with model.using(step):
                found = program(*projections(model.base), X.clone())
            assert_like_modules_alone(found, function, alone)


@pytest.mark.parametrize("function", [in_turn, changed_between])
def test_changes_are_seen_in_inference_mode(function, make):
    model, alone = make(), make(fuse=False)
    with torch.inference_mode():
        with model.prepare(ROWS, tokens=5) as step, model.using(step):
            found = compiled(function)(*projections(model.base), X.clone())
        assert_like_modules_alone(found, function, alone)


def move(linear):
    linear.weight.data = linear.weight.data * 2


def replace(linear):
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)


@pytest.mark.parametrize("change", [move, replace])
def test_a_program_reads_weights_that_were_moved(change, make):
    model, alone = make(), make(fuse=False)
    program = compiled(in_turn, fullgraph=True)
    step = model.prepare(ROWS, tokens=5)
    with model.using(step):
        program(*projections(model.base), X)
    for base in (model.base, alone.base):
        change(projections(base)[1])
    with model.using(step):
        found = program(*projections(model.base), X)
    assert_like_modules_alone(found, in_turn, alone)


@pytest.mark.parametrize("change", [move, replace])
def test_a_block_whose_programs_missed_a_moved_weight_ends_with_an_error(change, make):
    model = make()
    program = compiled(in_turn, fullgraph=True)
    step = model.prepare(ROWS, tokens=5)
    with pytest.raises(InvalidInputError, match="were moved or replaced, and a compiled"):
        with model.using(step):
            program(*projections(model.base), X)
            change(projections(model.base)[1])


@pytest.mark.parametrize("change", [move, replace])
def test_a_call_looks_for_moved_weights_where_a_part_of_the_model_is_compiled(change, make):
    model, alone = make(), make(fuse=False)
    for layer in model.base.model.layers:
        layer.compile(backend="aot_eager")
    steps = [model.prepare(ROWS, tokens=5) for _ in range(2)]
    before = logits(model, steps[0])
    for base in (model.base, alone.base):
        change(projections(base)[1])
    with pytest.raises(InvalidInputError, match="were moved or replaced, and a compiled"):
        logits(model, steps[1])  # its first pass looks behind the program
    wanted = logits(alone, ROWS)
    assert not torch.allclose(wanted, before)
    for base in (model.base, alone.base):
        change(projections(base)[2])
    wanted = logits(alone, ROWS)
    for step in steps:
        torch.testing.assert_close(logits(model, step), wanted, rtol=0, atol=2e-5)


def test_weights_that_move_within_a_call_of_a_program_end_it_with_an_error(make):
    model, alone = make(), make(fuse=False)
    for layer in model.base.model.layers:
        layer.compile(backend="aot_eager")
    step = model.prepare(ROWS, tokens=5)
    logits(model, step)
    for base in (model.base, alone.base):
        base.model.embed_tokens.register_forward_pre_hook(
            lambda *_, base=base: move(projections(base)[1])
        )
    with pytest.raises(InvalidInputError, match="were moved or replaced, and a compiled"):
        logits(model, step)
    logits(alone, ROWS)
    torch.testing.assert_close(logits(model, step), logits(alone, ROWS), rtol=0, atol=2e-5)


def test_a_block_without_programs_may_move_weights(make):
    model = make()
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        model.base(input_ids=IDS, use_cache=False)
        move(projections(model.base)[1])


def test_weights_written_in_place_are_seen_by_a_program(make):
    model, alone = make(), make(fuse=False)
    program = compiled(in_turn)
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        program(*projections(model.base), X)
        for base in (model.base, alone.base):
            projections(base)[2].weight.mul_(2)
        found = program(*projections(model.base), X)
    assert_like_modules_alone(found, in_turn, alone)


def test_a_copy_in_the_same_program_computes_with_its_own_weights(make):
    model = make()
    twin = copy.deepcopy(model.base)
    for parameter in twin.parameters():
        parameter.mul_(2)
    program = compiled(in_turn)
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        for base in (model.base, twin, model.base):
            for y, wanted in zip(
                program(*projections(base), X), in_turn(*projections(base), X), strict=True
            ):
                torch.testing.assert_close(y, wanted, rtol=0, atol=2e-5)
