"""Every gradient is within its bounds, and exactly zero where it has to be."""

from dataclasses import replace

import pytest
import torch
from helpers.gradients import NUM_SLOTS, Run, assert_within, case, expected, layer

from lora_backends import LoRABatch, LoRAWeights, quantize_weights
from lora_backends.sgmv.backward import rules

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAMES = ("dh", "lora_b", "dx", "lora_a", "embedding", "sums")
LAYERS = {
    "odd f32": {"dtype": F32},
    "even bf16": {"dtype": BF16, "slices": (256,), "max_rank": 16, "inputs": 128},
    "qkv f16": {"dtype": F16, "slices": (48, 16, 16), "max_rank": 8, "inputs": 48},
    "tuples bf16": {
        "dtype": BF16, "slices": (20, 7), "max_rank": 24, "inputs": 33, "tuples": True,
    },
    "high rank bf16": {"dtype": BF16, "slices": (24, 3), "max_rank": 300, "inputs": 40},
    "high rank f32": {"dtype": F32, "slices": (17,), "max_rank": 130, "inputs": 24},
}  # fmt: skip
BLOCKS = [(1, None), (None, None), (4, 16), (None, 8), (3, None)]


def check(run, made, names=NAMES, slots=None):
    """Check the gradients of a case that an engine computes, by name."""
    for name in names:
        dtype = {"dh": F32, "sums": F32, "dx": made.x.dtype}.get(name, run.out_dtype)
        result = getattr(run, name)()
        assert result.dtype == dtype
        assert_within(result, expected(made, name, dtype, slots))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_within_their_bounds(backend, name):
    weights = layer(**LAYERS[name])
    made = case(weights, room=6)
    check(Run(backend, made, weights.dtype), made)


@pytest.mark.parametrize("slots", [(0,), (2, 3), (0, 1, 4)])
def test_only_the_wanted_slots_are_written(backend, slots):
    weights = layer(BF16, (20, 7), 8, 48)
    made = case(weights, scales=True)
    check(Run(backend, made, F32, slots), made, ("lora_a", "lora_b", "embedding", "sums"), slots)


@pytest.mark.parametrize(("dtype", "grad_dtype"), [(BF16, F32), (F32, BF16), (F16, F32)])
def test_grad_may_have_another_dtype_than_the_stacks(backend, dtype, grad_dtype):
    weights = layer(dtype, (33, 64), 12, 40)
    made = case(weights, scales=True, grad_dtype=grad_dtype)
    check(Run(backend, made, F32), made)


@pytest.mark.parametrize("tokens", [0, 1, 15])
def test_few_tokens(backend, tokens):
    made = case(layer(BF16, (16, 8), 8, 32), tokens)
    check(Run(backend, made, BF16), made)


@pytest.mark.parametrize("room", [0, 5])
def test_a_batch_without_adapters_has_zeros(backend, room):
    made = case(layer(F32), slots=[-1] * 9, room=room)
    for name, result in Run(backend, made, F32).all().items():
        assert torch.equal(result, torch.zeros_like(result)), name


def test_adding_to_dx_keeps_rows_without_adapter(backend):
    made = case(layer(BF16, (16, 8), 40, 33), room=3)
    run = Run(backend, made, BF16)
    start = torch.randn(made.rows, 33).to(BF16)
    start[~made.has_adapter] = -0.0
    start[made.batch.token_slots.tolist().index(1)] = -0.0  # of rank 0
    result = run.dx(start.to(backend.device)).cpu()
    assert_within(result, expected(made, "dx", BF16, start=start))
    kept = ~made.has_adapter
    kept[: made.batch.num_tokens] |= made.batch.token_slots == 1
    assert torch.equal(result[kept].view(torch.int16), start[kept].view(torch.int16))


def test_tensors_may_be_views(backend):
    weights = layer(BF16, (16, 8), 8, 32)
    made = case(weights)
    run = Run(backend, made, F32)
    for name, pad in (("x", 3), ("grad", 8)):
        values = getattr(run.made, name)
        wide = torch.full((made.rows, values.shape[1] + pad), float("nan"), dtype=values.dtype)
        view = wide.to(values.device)[:, pad:]
        setattr(run.made, name, view.copy_(values))
    run.made.h = run.made.h.transpose(1, 2).contiguous().transpose(1, 2)
    run.made.dh = run.made.dh.transpose(0, 1).contiguous().transpose(0, 1)
    check(run, made)


def test_results_may_be_views(backend):
    made = case(layer(F32))
    run = Run(backend, made, F32)
    new = run._new
    run._new = lambda *shape, **options: new(*shape[:-1], 2 * shape[-1], **options)[..., ::2]
    check(run, made, ("lora_a", "lora_b", "embedding", "sums"))


def test_strided_ranks_and_scalings(backend):
    weights = layer(F32, (16, 8), 8, 32)
    made = case(weights)
    run = Run(backend, made, F32)
    ranks, scalings = (
        t.repeat_interleave(2, 1)[:, ::2]
        for t in (run.made.weights.ranks, run.made.weights.scalings)
    )
    run.made.weights = replace(run.made.weights, ranks=ranks, scalings=scalings)
    assert not run.made.weights.ranks.is_contiguous()
    check(run, made)


@pytest.mark.parametrize("operation", ["run_linear", "run_qkv", "run_logits", "run_embedding"])
def test_the_forward_returns_its_bits_and_an_h_for_the_backward(make, operation):
    backend = make(tiles="rules")
    weights = layer(BF16, (16, 8, 8), 8, 256)
    weights = replace(weights, lora_a=weights.lora_a.round())  # so that h is exact
    made = case(weights, tokens=37, room=4, scales=True)
    made.x.round_()
    run = Run(backend, made, F32)
    moved, base = run.made, torch.randn(made.rows, 32).to(BF16)
    first = moved.token_ids if operation == "run_embedding" else moved.x
    plain = getattr(backend, operation)(first, moved.weights, run.plan, base.to(backend.device))
    result, h = backend.forward_with_h(
        operation, first, moved.weights, run.plan, base.to(backend.device)
    )
    assert torch.equal(result.view(torch.int16), plain.view(torch.int16))
    if operation == "run_embedding":
        exact = backend.embedding_h(first, moved.weights, run.plan)
    else:
        exact = backend.run_lora_a(first, moved.weights, run.plan)
    assert torch.equal(run.lora_b(h), run.lora_b(exact))
    assert h.ndim == 4


@pytest.mark.parametrize("rank", [8, 24])
def test_the_padding_of_h_reaches_no_result(make, rank, monkeypatch):
    empty = torch.empty

    def nans(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    backend, weights = make(tiles="rules"), layer(BF16, (16, 8), rank, 256)
    made = case(weights, tokens=37)
    run = Run(backend, made, F32)
    base = torch.zeros(made.rows, 24, dtype=BF16, device=backend.device)
    chosen = [[t % 3, 3 + t % 2] for t in range(37)]  # several adapters of a token
    together, x = LoRABatch(chosen, NUM_SLOTS), run.made.x.nan_to_num()

    def results():
        _, h = backend.forward_with_h("run_linear", run.made.x, run.made.weights, run.plan, base)
        assert h.shape[-1] == rank
        blended = backend.run_linear(x, run.made.weights, backend.prepare_batch(together))
        return run.lora_b(h), blended

    wanted = results()
    monkeypatch.setattr(torch, "empty", nans)
    for found, value in zip(results(), wanted, strict=True):
        assert value.isfinite().all() and torch.equal(found, value)


def test_h_of_an_embedding_is_a_column_of_a(backend):
    weights = layer(BF16, (16, 8), 24, 32)
    made = case(weights, room=3)
    run = Run(backend, made, F32)
    h = backend.embedding_h(run.made.token_ids, run.made.weights, run.plan)
    wanted = torch.zeros(2, made.rows, 24)
    for t, slot in enumerate(made.batch.token_slots.tolist()):
        for s in range(2):
            rank = int(weights.ranks[slot, s]) if slot >= 0 else 0
            wanted[s, t, :rank] = weights.lora_a[slot, s, :rank, made.token_ids[t]].float()
    assert torch.equal(h.cpu(), wanted)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_stacks_have_dh_and_dx(backend, stored, block):
    weights = quantize_weights(layer(BF16, (20, 12), 9, 40), stored, block)
    made = case(weights, tokens=40, scales=True)
    check(Run(backend, made, F32), made, ("dh", "dx"))


def test_8_bit_stacks_of_one_tensor_per_slice(backend):
    weights = layer(BF16, (20, 12), 16, 48, tuples=True)
    made = case(quantize_weights(weights, torch.int8, (4, 16)))
    check(Run(backend, made, F32), made, ("dh", "dx"))


def test_many_columns_of_few_tokens_are_shared_out(make):
    backend = make(tiles="rules")
    made = case(layer(F32, (4096, 40), 8, 24), tokens=20, room=3)
    run = Run(backend, made, F32)
    result = run.dh()
    assert_within(result, expected(made, "dh", F32))
    assert bool((result[:, ~made.has_adapter] == 0).all())


def test_the_sum_of_an_id_spans_blocks_of_tokens(backend):
    made = case(layer(F32, inputs=3), slots=[0, 2] * 80)
    made.token_ids = torch.arange(160) // 140  # 70 of each slot have one id
    check(Run(backend, made, F32), made, ("embedding",))


@pytest.mark.parametrize("piece", [1, 32, 64])
@pytest.mark.parametrize("slots", [None, (0, 2)])
def test_long_slots_are_summed_in_pieces(backend, monkeypatch, piece, slots):
    monkeypatch.setattr(rules, "piece_tokens", lambda *sizes: piece)
    generator = torch.Generator().manual_seed(piece)
    made = case(
        layer(F32, (20, 7), 8, 24),
        slots=torch.tensor([0, 0, 0, 2, 4, -1])[torch.randint(0, 6, (300,), generator=generator)],
        scales=True,
    )
    with fresh_kernels():
        check(Run(backend, made, F32, slots), made, ("lora_a", "lora_b", "sums"), slots)


class fresh_kernels:
    """Forget kernels before and after: their pieces come from other rules."""

    def __enter__(self):
        from lora_backends.sgmv.backward import launch

        self._cached = launch._outer_kernel
        self._cached.cache_clear()

    def __exit__(self, *_):
        self._cached.cache_clear()


def test_an_override_of_the_forward_is_called(make):
    base = type(make())

    class Doubled(base):
        name = f"doubled-{base.name}"

        def run_linear(self, x, weights, plan, base_output=None):
            y = super().run_linear(x, weights, plan, base_output)
            return y.mul_(2)

    made = case(layer(F32, (16,), 8, 32))
    backend = Doubled(make().device)
    run = Run(backend, made, F32)
    for operation in ("run_linear", "run_logits"):
        result, h = backend.forward_with_h(operation, run.made.x, run.made.weights, run.plan, None)
        assert h is None
        assert torch.equal(result, backend.run_linear(run.made.x, run.made.weights, run.plan))


def test_slots_of_tokens(backend):
    plan = backend.prepare_batch(LoRABatch([2, -1, 0], NUM_SLOTS), capacity=7)
    slots = backend.token_slots(plan, 5, NUM_SLOTS)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [2, -1, 0, -1, -1]


def test_only_half_of_a_layer(backend):
    weights = layer(F32)
    made = case(weights)
    run = Run(backend, made, F32)
    both = run.made.weights
    fields = {name: getattr(both, name) for name in ("ranks", "scalings", "output_slices")}
    run.made.weights = LoRAWeights(None, both.lora_b, **fields)
    check(run, made, ("dh", "lora_b"))
    run.made.weights = LoRAWeights(both.lora_a, None, **fields)
    check(run, made, ("dx", "lora_a"))
