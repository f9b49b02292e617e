"""Recorded calls: what a backward asks of the engine, what is refused, and torch's surroundings."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

from lora_backends import (
    InvalidInputError,
    LoRABatch,
    LoRAWeights,
    UnsupportedInputError,
    get_backend,
)

ASKED = (
    "run_lora_a",
    "run_lora_b_backward",
    "run_lora_a_backward",
    "run_embedding_backward",
    "embedding_h",
    "sum_tokens",
)
SLOTS = [0, 1, -1, 1]


@pytest.fixture(params=["torch_ref", "numba_cpu"])
def backend(request):
    return get_backend(request.param, "cpu")


def layer(dtype=torch.float32, **more):
    """Return two adapters, 8 to 8 columns: x and y have one shape."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 1, 4, 8, generator=generator).to(dtype)
    b = torch.randn(2, 8, 4, generator=generator).to(dtype)
    return LoRAWeights(a, b, torch.full((2, 1), 4), torch.ones(2, 1), (8,), **more)


def rows(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(
    ("leaf", "asked"),
    [
        ("base_output", []),
        ("bias", ["sum_tokens"]),
        ("lora_b", ["run_lora_a", "run_lora_b_backward"]),
        ("lora_a", ["run_lora_b_backward", "run_lora_a_backward"]),
        ("x", ["run_lora_b_backward", "run_lora_a_backward"]),
    ],
)
def test_nothing_is_computed_for_what_needs_no_gradient(backend, monkeypatch, leaf, asked):
    weights = layer(bias=rows(2, 8))
    tensors = {"x": rows(4, 8), "base_output": rows(4, 8)}
    tensors |= {name: getattr(weights, name) for name in ("lora_a", "lora_b", "bias")}
    tensors[leaf].requires_grad_()
    plan, noted = backend.prepare_batch(LoRABatch(SLOTS, 2)), {}

    def noting(name, method):
        def call(*args, **options):
            noted[name] = options
            return method(*args, **options)

        return call

    base = tensors["base_output"].clone()
    y = backend.run_linear(tensors["x"], weights, plan, base)
    for name in ASKED:
        monkeypatch.setattr(backend, name, noting(name, getattr(backend, name)))
    y.sum().backward()
    if backend.name == "numba_cpu":  # its forward keeps h
        asked = [name for name in asked if name != "run_lora_a"]
    assert list(noted) == asked
    of_b, of_a = noted.get("run_lora_b_backward", {}), noted.get("run_lora_a_backward", {})
    if of_b:
        assert of_b["needs_h"] == (leaf != "lora_b")
        assert (of_b["lora_b"] is not None) == (leaf == "lora_b")
    if of_a:
        assert (of_a["dx"] is not None) == (leaf == "x")
        assert (of_a["lora_a"] is not None) == (leaf == "lora_a")


def test_base_output_may_be_columns_of_a_wider_tensor(backend):
    """autograd takes the gradient of a node's first tensor for that of a view."""
    weights, x = layer(), rows(4, 8).requires_grad_()
    weights.lora_a.requires_grad_()
    plan, grad = backend.prepare_batch(LoRABatch(SLOTS, 2)), rows(4, 12)
    alone = torch.autograd.grad(
        backend.run_linear(x, weights, plan), [x, weights.lora_a], grad[:, 2:10]
    )
    leaf = rows(4, 12).requires_grad_()
    wide = leaf * 1
    backend.run_linear(x, weights, plan, wide[:, 2:10])
    found = torch.autograd.grad(wide, [x, weights.lora_a, leaf], grad)
    assert all(map(torch.equal, found, (*alone, grad)))


def test_a_view_of_a_leaf_is_refused_before_anything_is_written(backend):
    leaf = rows(4, 12).requires_grad_()
    before = leaf.detach().clone()
    plan = backend.prepare_batch(LoRABatch(SLOTS, 2))
    with pytest.raises(InvalidInputError, match=r"or a view of one.*base_output\.clone"):
        backend.run_linear(rows(4, 8), layer(), plan, leaf[:, 2:10])
    assert torch.equal(leaf, before)


def without_grad(view, *shape):
    tensor = rows(*shape)
    with torch.no_grad():
        return view(tensor)


class Viewed(torch.autograd.Function):
    """Returns a view that its own forward made."""

    @staticmethod
    def forward(ctx, x):
        return x.view(4, 8)

    @staticmethod
    def backward(ctx, grad):
        return grad.view(2, 2, 8)


@torch.inference_mode()
def inferred(view, *shape):
    return view(rows(*shape))


FIXED = {
    "chunk": lambda: (rows(4, 16).requires_grad_() * 1).chunk(2, -1)[0],
    "chunk without graph": lambda: rows(4, 16).chunk(2, -1)[0],
    "unbind": lambda: rows(3, 4, 8).unbind()[1],
    "slice of a split": lambda: rows(4, 32).split(16, -1)[1][:, :8],
    "no_grad": lambda: without_grad(lambda tensor: tensor[:, :8], 4, 16),
    "autograd.Function": lambda: Viewed.apply(rows(2, 2, 8).requires_grad_() * 1),
    "inference view": lambda: without_grad(torch.inference_mode()(lambda t: t[:, :8]), 4, 16),
    "inference mode": lambda: inferred(torch.clone, 4, 8),
}


@pytest.mark.parametrize("kind", FIXED)
def test_what_autograd_cannot_change_in_place_is_refused_before_it_is_written(backend, kind):
    y, plan = FIXED[kind](), backend.prepare_batch(LoRABatch(SLOTS, 2))
    before = y.detach().clone()
    for x in (rows(4, 8).requires_grad_(), rows(4, 8)):
        weights = layer(bias=rows(2, 8).requires_grad_())
        with pytest.raises(InvalidInputError, match=r"base_output was made|base_output is a view"):
            backend.run_linear(x, weights, plan, y)
    assert torch.equal(y, before)
    with torch.inference_mode():  # nothing is recorded
        backend.run_linear(x, weights, plan, y)


def test_an_input_of_inference_mode_is_refused_where_a_backward_reads_it(backend):
    x, y, plan = inferred(torch.clone, 4, 8), rows(4, 8), backend.prepare_batch(LoRABatch(SLOTS, 2))
    weights = layer(bias=rows(2, 8).requires_grad_())
    backend.run_linear(x, weights, plan).sum().backward()
    weights.lora_b.requires_grad_()
    with pytest.raises(InvalidInputError, match=r"x of run_linear .* inference mode.*\n.*x\.clone"):
        backend.run_linear(x, weights, plan, y)
    assert torch.equal(y, rows(4, 8))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("dual", ["x", "base_output", "lora_b"])
def test_forward_mode_is_followed_or_refused(backend, dual, recorded):
    tangent = rows(4, 8)[:2, :, None].expand(2, 8, 4) if dual == "lora_b" else rows(4, 8)
    given = {"x": rows(4, 8), "base_output": rows(4, 8), "lora_b": layer().lora_b}
    plan = backend.prepare_batch(LoRABatch(SLOTS, 2))

    def run(x, base_output, lora_b):
        weights = replace(layer(), lora_b=lora_b)
        weights.lora_a.requires_grad_(recorded)
        return backend.run_linear(x, weights, plan, base_output.clone())

    run(**given)  # a kind that has passed
    with forward_ad.dual_level():
        run(**given)
        duals = given | {dual: forward_ad.make_dual(given[dual], tangent)}
        if backend.plain_torch:
            moved = run(**given | {dual: given[dual] + tangent})
            found = forward_ad.unpack_dual(run(**duals)).tangent
            torch.testing.assert_close(found, moved - run(**given))  # linear in each
        else:
            with pytest.raises(InvalidInputError, match=f"{dual} has a tangent"):
                run(**duals)


def test_second_derivatives_are_refused_where_the_gradient_of_y_is_a_constant(backend):
    """It has no gradient itself, so torch's `once_differentiable` lets a zero pass."""
    weights, x = layer(), rows(4, 8).requires_grad_()
    weights.lora_a.requires_grad_()
    y = backend.run_linear(x, weights, backend.prepare_batch(LoRABatch(SLOTS, 2)))
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    penalty = dx.square().sum()
    with pytest.raises(UnsupportedInputError, match="run_linear has no second derivatives"):
        (y.sum() + penalty).backward()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("x", "dL/dy"),
        ("lora_a", "x"),
        ("lora_a", "lora_b"),
        ("lora_b", "x"),
        ("lora_b", "lora_a"),
        ("output_scales", "base_output"),
        ("output_scales", "bias"),
    ],
)
def test_second_derivatives_with_respect_to_any_tensor_are_refused(backend, first, second):
    """Autograd takes what it finds no way to for unused, which `allow_unused` passes as None."""
    weights = layer(bias=rows(2, 8), output_scales=rows(2, 8).abs())
    grad = rows(4, 8)
    leaves = {"x": rows(4, 8), "base_output": rows(4, 8), "dL/dy": grad}
    leaves |= {name: getattr(weights, name) for name in ("lora_a", "lora_b", "bias")}
    leaves["output_scales"] = weights.output_scales
    for name in (first, second):
        leaves[name].requires_grad_()
    plan = backend.prepare_batch(LoRABatch(SLOTS, 2))
    y = backend.run_linear(leaves["x"], weights, plan, leaves["base_output"].clone())
    (once,) = torch.autograd.grad(y, leaves[first], grad, create_graph=True)
    with pytest.raises(UnsupportedInputError, match="run_linear has no second derivatives"):
        torch.autograd.grad(once.square().sum(), leaves[second], allow_unused=True)


def test_products_with_a_jacobian_or_hessian_are_refused(backend):
    """`torch.autograd.functional` fills in zeros for what it finds unused."""
    plan, weights = backend.prepare_batch(LoRABatch(SLOTS, 2)), layer()
    x, moved = rows(4, 8), rows(4, 8)

    def norm(x):
        return backend.run_linear(x, weights, plan).square().sum()

    with pytest.raises(UnsupportedInputError, match="run_linear has no second derivatives"):
        torch.autograd.functional.hvp(norm, x, moved)
    with pytest.raises(UnsupportedInputError, match="run_linear has no second derivatives"):
        torch.autograd.functional.jvp(lambda x: backend.run_linear(x, weights, plan), x, moved)


def test_batched_gradients_are_refused(backend):
    x = rows(4, 8).requires_grad_()
    y = backend.run_linear(x, layer(), backend.prepare_batch(LoRABatch(SLOTS, 2)))
    with pytest.raises(UnsupportedInputError, match="is_grads_batched"):
        torch.autograd.grad(y, x, torch.ones(3, 4, 8), is_grads_batched=True)


def test_gradients_of_any_form_are_read(backend):
    """Sparse, lazily negated, expanded along either axis."""
    weights, x = layer(), rows(4, 8).requires_grad_()
    plan, grad = backend.prepare_batch(LoRABatch(SLOTS, 2)), rows(4, 8)

    def dx(grad):
        return torch.autograd.grad(backend.run_linear(x, weights, plan), x, grad)[0]

    negated = torch.complex(torch.zeros(4, 8), -grad).conj().imag
    assert negated.is_neg()
    assert torch.equal(dx(negated), dx(grad))
    assert torch.equal(dx(grad[:1].expand(4, -1)), dx(grad[:1].repeat(4, 1)))
    assert torch.equal(dx(grad[:, :1].expand(-1, 8)), dx(grad[:, :1].repeat(1, 8)))
    y = backend.run_linear(x, weights, plan)
    picked = torch.nn.functional.embedding(torch.tensor([0, 3]), y, sparse=True)
    dense = torch.zeros(4, 8).index_fill_(0, torch.tensor([0, 3]), 1.0)
    assert torch.equal(torch.autograd.grad(picked.sum(), x)[0], dx(dense))


def test_weights_in_other_memory_are_refused_in_the_backward(backend):
    weights, x = layer(), rows(4, 8).requires_grad_()
    y = backend.run_linear(x, weights, backend.prepare_batch(LoRABatch(SLOTS, 2)))
    weights.lora_b.data = torch.zeros(2, 8, 4)
    with pytest.raises(InvalidInputError, match="other memory than the forward read"):
        y.sum().backward()


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("name", ["lora_a", "lora_b", "scalings", "ranks"])
def test_weights_changed_before_the_backward_are_refused(backend, name, hooks):
    """Under hooks torch checks no version of what it saves."""
    weights, x = layer(), rows(4, 8).requires_grad_()
    plan = backend.prepare_batch(LoRABatch(SLOTS, 2))
    copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy)
    with copies if hooks else contextlib.nullcontext():
        y = backend.run_linear(x, weights, plan)
    getattr(weights, name).mul_(1)
    with pytest.raises(InvalidInputError, match=f"{name} of run_linear was changed in place"):
        y.sum().backward()


def test_a_tensor_that_the_backward_does_not_read_may_change(backend):
    weights = layer(bias=rows(2, 8))
    weights.lora_b.requires_grad_()
    y = backend.run_linear(rows(4, 8), weights, backend.prepare_batch(LoRABatch(SLOTS, 2)))
    with torch.no_grad():
        weights.lora_b.mul_(2)
        weights.bias.mul_(2)
    h = backend.run_lora_a(rows(4, 8), weights, backend.prepare_batch(LoRABatch(SLOTS, 2)))
    y.sum().backward()
    wanted = torch.stack(
        [h[0, [at for at, s in enumerate(SLOTS) if s == own]].sum(0) for own in (0, 1)]
    )
    torch.testing.assert_close(weights.lora_b.grad, wanted[:, None].expand(-1, 8, -1))


def test_hooks_on_saved_tensors_see_no_stack(backend):
    weights, x, seen = layer(), rows(4, 8).requires_grad_(), []
    weights.lora_a.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        backend.run_linear(x, weights, backend.prepare_batch(LoRABatch(SLOTS, 2)))
    assert seen == [x.shape]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit_and_casts_x(backend, given, recorded):
    weights = layer(bias=rows(2, 8))
    x = rows(4, 8, dtype=torch.bfloat16).to(given).requires_grad_(recorded)
    plan = backend.prepare_batch(LoRABatch(SLOTS, 2))
    wanted = backend.run_linear(x.float(), weights, plan)
    out = torch.empty(1, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = backend.run_linear(x, weights, plan)
        h = backend.run_lora_a(x, weights, plan)
        again = backend.run_lora_b(h, weights, plan, torch.zeros(4, 8))
        qkv = backend.run_logits(x, weights, plan)
        ids = backend.run_embedding(torch.arange(4), weights, plan)
        backend.run_lora_a(x.detach(), weights, plan, out=out)
        with pytest.raises(InvalidInputError, match="in_features"):
            backend.run_linear(x[:, 1:], weights, plan)
    assert y.dtype == qkv.dtype == torch.float32
    for each in (y, qkv):
        assert torch.equal(each, wanted)
    torch.testing.assert_close(again, wanted)
    assert torch.equal(out, h)
    assert torch.equal(ids, backend.run_embedding(torch.arange(4), weights, plan))
    if recorded:
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        (right,) = torch.autograd.grad(wanted, x, torch.ones_like(y))
        assert dx.dtype == given
        assert torch.equal(dx, right)


def test_under_autocast_several_adapters_and_quantised_stacks_take_any_x(backend):
    plan = backend.prepare_batch(LoRABatch([[0, 1], [1, -1]], 2))
    x = rows(2, 8, dtype=torch.bfloat16)
    wanted = backend.run_linear(x.float(), layer(), plan)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(backend.run_linear(x, layer(), plan), wanted)
        narrow = backend.run_linear(x.float(), layer(torch.bfloat16), plan)
    assert narrow.dtype == torch.bfloat16


def test_without_autocast_another_dtype_is_refused(backend):
    plan = backend.prepare_batch(LoRABatch(SLOTS, 2))
    with pytest.raises(InvalidInputError, match=r"x\.dtype is bfloat16"):
        backend.run_linear(rows(4, 8, dtype=torch.bfloat16), layer(), plan)


def test_sums_of_float64_are_float64():
    """Of dbias, and of products of float64 weights with a float32 gradient."""
    backend = get_backend("torch_ref", "cpu")
    weights = layer(torch.float64, bias=torch.zeros(2, 8, dtype=torch.float64, requires_grad=True))
    plan, x = backend.prepare_batch(LoRABatch([0] * 4, 2)), rows(4, 8, dtype=torch.float64)
    weights.lora_b.requires_grad_()
    grad = rows(4, 8, dtype=torch.float64) + 1e-9
    y = backend.run_linear(x, weights, plan)
    (dbias,) = torch.autograd.grad(y, weights.bias, grad)
    torch.testing.assert_close(dbias[0], grad.sum(0), rtol=1e-14, atol=0)
    y = backend.run_linear(x, weights, plan, torch.zeros(4, 8))
    (db,) = torch.autograd.grad(y, weights.lora_b, grad.float())
    h = x @ weights.lora_a[0, 0].T
    torch.testing.assert_close(db[0], grad.float().double().T @ h, rtol=1e-13, atol=1e-13)


def test_equal_token_ids_are_summed_in_one_order(backend):
    """With many values torch adds them by atomics, from several threads."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1, 1, 64, 5, generator=generator).requires_grad_()
    weights = LoRAWeights(a, torch.randn(1, 16, 64), torch.tensor([[64]]), torch.ones(1, 1), (16,))
    ids = torch.randint(5, (2000,), generator=generator)
    plan = backend.prepare_batch(LoRABatch([0] * 2000, 1))
    grad, threads = torch.randn(2000, 16, generator=generator), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 2):
            y = backend.run_embedding(ids, weights, plan)
            dh = grad @ weights.lora_b[0]  # one product, whose order may follow the threads
            out = torch.empty(1, 1, 64, 5)
            torch.set_num_threads(count)
            backend.run_embedding_backward(dh[None], ids, weights, plan, lora_a=out)
            found.append(out)
            torch.set_num_threads(1)
    finally:
        torch.set_num_threads(threads)
    assert y.shape == (2000, 16)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


def test_a_layer_may_be_replaced_between_forward_and_backward(backend):
    weights, x = layer(), rows(4, 8).requires_grad_()
    plan = backend.prepare_batch(LoRABatch(SLOTS, 2))
    y = backend.run_linear(x, weights, plan)
    other = replace(weights, scalings=weights.scalings * 2)
    backend.run_linear(x, other, plan)
    y.sum().backward()
    assert x.grad is not None
