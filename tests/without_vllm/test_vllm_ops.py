"""vLLM's LoRA operators by their signatures, against plain products; vLLM is not needed."""

import math

import pytest
import torch
import vllm_ops as ops

from lora_backends import InvalidInputError, UnsupportedInputError, get_backend

SLOTS, RANK, INNER = 3, 8, 48
WIDTHS = (32, 20, 24)
TOKENS = [2, -1, 0, 2, 0, -1, 2]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture
def backend():
    return get_backend("torch_ref", device="cpu")


def metadata(slots, num_slots=SLOTS, room=0, active=None):
    """Return what vLLM's LoRAKernelMeta.meta_args does; `room` rows after the batch are stale."""
    slots = torch.tensor(slots, dtype=torch.int32)
    ids, counts = slots.unique(return_counts=True)
    padded = [torch.full((num_slots + 1,), fill, dtype=torch.int32) for fill in (-1, 0)]
    padded[0][: len(ids)], padded[1][: len(ids)] = ids, counts.to(torch.int32)
    starts = torch.zeros(num_slots + 2, dtype=torch.int32)
    starts[1 : len(ids) + 1] = counts.cumsum(0)
    stale = torch.zeros(room, dtype=torch.int32)
    order = slots.argsort(stable=True).to(torch.int32)
    flag = torch.tensor([bool((slots == -1).all())])
    active = torch.tensor([num_slots + 1 if active is None else active], dtype=torch.int32)
    first = torch.cat([slots, stale]), torch.cat([order, stale])
    return *first, padded[1], starts, padded[0], flag, active


def random(*shape, seed=1, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stacks(shapes, dtype=torch.bfloat16):
    return [random(SLOTS, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def products(x, matrices, slots, scaling=1.0):
    """Return ``scaling * x[t] @ m[slot].T`` of each row in float64, zero without adapter."""
    rows = [
        torch.zeros(matrices.shape[1], dtype=torch.float64)
        if slot < 0
        else scaling * matrices[slot].double() @ row.double()
        for row, slot in zip(x, slots, strict=True)
    ]
    return torch.stack(rows)


def close(found, wanted, tolerance=1e-2):
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_a_shrink_multiplies_each_token_by_its_own_a(backend):
    x, a = random(7, INNER), stacks([(RANK, INNER)] * 3)
    out = torch.full((3, 7, RANK), math.nan)
    ops.lora_shrink(x, a, out, *metadata(TOKENS), 0.5, backend=backend)
    for s in range(3):
        close(out[s], products(x, a[s], TOKENS, 0.5), 1e-4)
    four_axes = torch.zeros_like(out)
    ops.lora_shrink(
        x, [each[:, None] for each in a], four_axes, *metadata(TOKENS), 0.5, backend=backend
    )
    assert torch.equal(four_axes, out)


def test_an_expand_adds_to_the_slices_columns_or_overwrites_them(backend):
    h, b = random(3, 7, RANK, dtype=torch.float32), stacks([(w, RANK) for w in WIDTHS])
    wanted = torch.cat([products(h[s], b[s], TOKENS) for s in range(3)], 1)
    for add in (True, False):
        out = torch.ones(7, sum(WIDTHS) + 5, dtype=torch.bfloat16)
        ops.lora_expand(h, b, out, *metadata(TOKENS), 3, add, backend=backend)
        live = torch.tensor(TOKENS) >= 0
        close(out[live, 3:-2], wanted[live] + add, 2e-2)
        assert out[~live].eq(1).all() and out[:, :3].eq(1).all() and out[:, -2:].eq(1).all()


def test_rows_behind_the_batch_and_idle_batches_keep_their_bits(backend):
    h, b = random(1, 9, RANK, dtype=torch.float32), stacks([(32, RANK)])
    out = torch.ones(9, 32)
    ops.lora_expand(h, b, out, *metadata(TOKENS, room=2), add_inputs=True, backend=backend)
    close(out[:7], 1 + products(h[0, :7], b[0], TOKENS), 1e-4)
    assert out[7:].eq(1).all()
    shrunk = torch.full((1, 2, RANK), 3.0)
    ops.lora_shrink(
        random(2, INNER), stacks([(RANK, INNER)]), shrunk, *metadata([-1, -1]), 1.0, backend=backend
    )
    assert shrunk.eq(3).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": [2, -1, 0, 3, 0, -1, 2]}, "slots below 3"),
        ({"slots": TOKENS[:-1]}, r"allowed: \[7\]"),
        ({"active": 2}, "of 2 active ones"),
        ({"out": torch.zeros(3, 7, RANK + 1)}, "output tensor does not fit"),
        ({"out": torch.zeros(3, 7, RANK, dtype=torch.int32)}, "output tensor does not fit"),
        ({"a": torch.zeros(SLOTS, RANK, INNER)}, "no list of stacks"),
    ],
)
def test_contradictions_are_refused_before_anything_is_written(change, words):
    x, a = random(7, INNER), stacks([(RANK, INNER)] * 3)
    out = change.get("out", torch.ones(3, 7, RANK))
    before = out.clone()
    slots = change.get("slots", TOKENS)
    meta = metadata(slots, 4 if 3 in slots else SLOTS, active=change.get("active"))
    with pytest.raises(InvalidInputError, match=words):
        ops.lora_shrink(x, change.get("a", a), out, *meta, 1.0, backend=get_backend("torch_ref"))
    assert torch.equal(out, before)


def test_without_a_backend_the_configured_one_runs(monkeypatch):
    from vllm_ops.metadata import backend_for

    monkeypatch.setenv("LORA_BACKENDS_BACKEND", "torch_ref")
    assert backend_for(torch.device("cpu", 0), None).name == "torch_ref"
    with pytest.raises(InvalidInputError, match="None, or a backend on cpu"):
        backend_for(torch.device("cpu"), "torch_ref")


MODES = {
    "tensor": {},
    "channel": {"per_channel_quant": True},
    "block": {"group_k": 3, "group_n": 5},
}


def quantized(values, mode, dtype, weights=True):
    """Return stored values, scales in vLLM's shapes, and the values they stand for, in float64."""
    rows, columns = values.shape[-2:]
    block = {"tensor": (rows, columns), "channel": (1, columns), "block": (5, 3)}[mode]
    n, k = block if weights or mode != "block" else (1, 3)
    groups = math.ceil(rows / n), math.ceil(columns / k)
    scales = torch.rand(*values.shape[:-2], *groups, generator=torch.Generator().manual_seed(7))
    scales = 0.5 + scales
    wide = scales.repeat_interleave(n, -2)[..., :rows, :]
    wide = wide.repeat_interleave(k, -1)[..., :columns]
    stored = (values.float() / wide).to(dtype)
    if mode == "tensor":
        scales = scales.reshape(values.shape[:-2]) if weights else scales.reshape(1)
    elif mode == "channel" and weights:
        scales = scales[..., 0]
    return stored, scales, stored.double() * wide.double()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("x_dtype", "a_dtype"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_a_shrink_of_8_bits_multiplies_stored_values_by_their_scales(
    backend, mode, x_dtype, a_dtype
):
    x, x_scales, x_values = quantized(random(7, INNER), mode, x_dtype, weights=False)
    made = [quantized(each, mode, a_dtype) for each in stacks([(RANK, INNER)] * 3)]
    out = torch.full((3, 7, RANK), math.nan)
    ops.lora_shrink_fp8(
        x,
        [each[0] for each in made],
        out,
        *metadata(TOKENS),
        0.5,
        [each[1] for each in made],
        a_scale=x_scales,
        use_fp8_w8a8=True,
        backend=backend,
        **MODES[mode],
    )
    for s, (_, _, values) in enumerate(made):
        close(out[s], products(x_values, values, TOKENS, 0.5), 1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_expand_of_8_bits_takes_the_scales_of_each_slice(backend, mode, dtype):
    """The slices differ in width, so in the strides of their scales."""
    h = random(3, 7, RANK)
    _, scales, _ = quantized(h[0], mode, dtype, weights=False)
    wide = scales.reshape(1, 1) if mode == "tensor" else scales
    wide = wide.repeat_interleave(3, 1)[:, :RANK] if mode == "block" else wide
    stored = (h.float() / wide).to(dtype)
    values = stored.double() * wide.double()
    made = [quantized(each, mode, dtype) for each in stacks([(w, RANK) for w in WIDTHS])]
    out = torch.ones(7, sum(WIDTHS))
    ops.lora_expand_fp8(
        stored,
        [each[0] for each in made],
        out,
        *metadata(TOKENS),
        [each[1] for each in made],
        a_scale=scales,
        add_inputs=True,
        use_fp8_w8a8=True,
        backend=backend,
        **MODES[mode],
    )
    wanted = torch.cat([products(values[s], made[s][2], TOKENS) for s in range(3)], 1)
    close(out, 1 + wanted, 1e-3)


def test_token_scales_of_one_axis_are_each_tokens_own():
    x, x_scales, values = quantized(random(7, INNER), "channel", E4M3, weights=False)
    a, a_scales, a_values = quantized(stacks([(RANK, INNER)])[0], "channel", E4M3)
    out = torch.zeros(1, 7, RANK)
    more = {"use_fp8_w8a8": True, "per_channel_quant": True, "backend": get_backend("torch_ref")}
    meta = metadata(TOKENS)
    ops.lora_shrink_fp8(x, [a], out, *meta, 1.0, [a_scales], x_scales[:, 0], **more)
    close(out[0], products(values, a_values, TOKENS), 1e-3)


def test_scales_of_tokens_without_adapter_are_not_read(backend):
    x, a = random(7, INNER).to(E4M3), [random(SLOTS, RANK, INNER).to(E4M3)]
    scales = torch.where(torch.tensor(TOKENS) < 0, math.nan, 0.5)[:, None]
    out = torch.ones(1, 7, RANK)
    ops.lora_shrink_fp8(
        x, a, out, *metadata(TOKENS), 2.0, [torch.ones(SLOTS, RANK)], scales, use_fp8_w8a8=True,
        per_channel_quant=True, backend=backend,
    )  # fmt: skip
    close(out[0], products(x.float(), a[0].float(), TOKENS), 1e-4)


def test_wide_stacks_without_8_bits_run_as_they_are(backend):
    x, a = random(7, INNER), stacks([(RANK, INNER)] * 3)
    found, wanted = torch.zeros(3, 7, RANK), torch.zeros(3, 7, RANK)
    ops.lora_shrink_fp8(x, a, found, *metadata(TOKENS), 1.0, [], backend=backend)
    ops.lora_shrink(x, a, wanted, *metadata(TOKENS), 1.0, backend=backend)
    assert torch.equal(found, wanted) and found.any()
    b, out = stacks([(w, RANK) for w in WIDTHS]), torch.zeros(7, sum(WIDTHS))
    ops.lora_expand_fp8(found, b, out, *metadata(TOKENS), [], add_inputs=True, backend=backend)
    close(out, torch.cat([products(found[s], b[s], TOKENS) for s in range(3)], 1), 1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_k": 16}, "mode of the scales is contradictory"),
        ({"group_k": 16, "group_n": 4, "per_channel_quant": True}, "contradictory"),
        ({"a_scale": torch.ones(7, 1)}, r"a_scale has the wrong shape(.|\n)*per tensor"),
        ({"a_scale": None}, "a_scale has the wrong shape"),
        ({"b_scale": [torch.ones(SLOTS, RANK)]}, r"b_scale\[0\] has the wrong shape"),
        ({"b_scale": []}, "allowed: a list of 1"),
        ({"use_fp8_w8a8": False}, "pass use_fp8_w8a8=True"),
        ({"x": torch.zeros(7, INNER)}, "inputs cannot be used with use_fp8_w8a8"),
    ],
)
def test_scales_that_do_not_fit_are_refused(change, words):
    given = {"a_scale": torch.ones(1), "b_scale": [torch.ones(SLOTS)], "use_fp8_w8a8": True}
    given |= change
    x = given.pop("x", random(7, INNER).to(E4M3))
    out = torch.ones(1, 7, RANK)
    a = [stacks([(RANK, INNER)])[0].to(E4M3)]
    with pytest.raises(InvalidInputError, match=words):
        ops.lora_shrink_fp8(
            x, a, out, *metadata(TOKENS), 1.0, backend=get_backend("torch_ref"), **given
        )
    assert out.eq(1).all()


EXPERTS, TOP_K = 5, 2
IDS = torch.tensor([[0, 3], [1, 2], [4, 0], [2, 1], [0, 1], [1, 3], [2, 4]], dtype=torch.int32)


def run_experts(backend, x, a, b, out, *, block=None, enabled=None, slots=TOKENS, **more):
    """Call the operator as vLLM does: with pairs that are sorted in blocks, or as they are."""
    mapping = torch.tensor(slots, dtype=torch.int32)
    enabled = torch.tensor([1] * (SLOTS + 1) if enabled is None else enabled, dtype=torch.int32)
    ids = torch.full((SLOTS + 1,), -1, dtype=torch.int32)
    unique = mapping.unique()
    ids[: len(unique)] = unique
    tables = None, IDS.reshape(-1), None
    if block:
        tables = align(IDS, mapping, block, enabled, ids)
    sizes = [block or 16, 32, 64, 1, 4, 3, 1] * 2
    weights = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(3))
    active = torch.tensor([SLOTS + 1], dtype=torch.int32)
    rest = mapping, a[0].shape[2], TOP_K, ids, active, enabled, *sizes
    ops.fused_moe_lora(out, x, a, b, weights, *tables, *rest, backend=backend, **more)
    return weights


def align(
    topk_ids, mapping, block, enabled, ids, width=None, blocks=None, dtype=torch.int32, **more
):
    width = topk_ids.numel() + EXPERTS * (block - 1) if width is None else width
    blocks = -(-width // block) if blocks is None else blocks
    tables = [torch.full((SLOTS * n,), -7, dtype=dtype) for n in (width, blocks, 1)]
    arguments = topk_ids, mapping, EXPERTS, block, SLOTS, width, blocks, *tables, enabled, ids
    ops.moe_lora_align_block_size(*arguments, **more)
    return tables[0].view(SLOTS, -1), tables[1].view(SLOTS, -1), tables[2]


def pair_products(x, a, b, slots, weights=None):
    out = torch.zeros(*IDS.shape, b.shape[2], dtype=torch.float64)
    for t, slot in enumerate(slots):
        for j, e in enumerate(IDS[t].tolist() if slot >= 0 else ()):
            out[t, j] = b[slot, e].double() @ (a[slot, e].double() @ x[t, j].double())
            out[t, j] *= 1 if weights is None else weights[t, j].item()
    return out


def expert_stacks(inner=INNER, widths=WIDTHS[:2]):
    a = stacks([(EXPERTS, RANK, inner)] * len(widths))
    return a, stacks([(EXPERTS, width, RANK) for width in widths])


@pytest.mark.parametrize("block", [None, 4, 16])
@pytest.mark.parametrize("add_inputs", [True, False])
def test_experts_add_the_product_of_each_pair(backend, block, add_inputs):
    (a, b), x = expert_stacks(), random(7, INNER)
    out = torch.ones(7, TOP_K, sum(WIDTHS[:2]) + 5)
    run_experts(backend, x, a, b, out, block=block, offset=2, add_inputs=add_inputs)
    rows = x[:, None].expand(-1, TOP_K, -1)
    parts = [pair_products(rows, *each, TOKENS) for each in zip(a, b, strict=True)]
    live = torch.tensor(TOKENS) >= 0
    close(out[live, :, 2:-3], torch.cat(parts, -1)[live] + add_inputs, 3e-2)
    assert out[~live].eq(1).all() and out[..., :2].eq(1).all() and out[..., -3:].eq(1).all()


@pytest.mark.parametrize("block", [None, 4])
def test_experts_of_the_second_product_are_weighted_and_have_a_row_per_pair(backend, block):
    (a, b), x = expert_stacks(widths=(32,)), random(14, INNER)
    out = torch.zeros(7, TOP_K, 32)
    weights = run_experts(backend, x, a, b, out, block=block, mul_routed_weight=True)
    close(out, pair_products(x.view(7, TOP_K, -1), a[0], b[0], TOKENS, weights), 3e-2)


@pytest.mark.parametrize("block", [None, 4])
def test_a_slot_that_is_switched_off_adds_nothing(backend, block):
    (a, b), x, out = expert_stacks(), random(7, INNER), torch.ones(7, TOP_K, sum(WIDTHS[:2]))
    run_experts(backend, x, a, b, out, block=block, enabled=[1, 1, 0, 1])
    off = torch.tensor(TOKENS) != 0
    assert out[off].eq(1).all() and not out[~off].eq(1).any()


def test_experts_refuse_what_they_cannot_run_right():
    (a, b), x, out = expert_stacks(), random(7, INNER), torch.ones(7, TOP_K, sum(WIDTHS[:2]))
    backend = get_backend("torch_ref")
    with pytest.raises(UnsupportedInputError, match="fully_sharded=True"):
        run_experts(backend, x, a, b, out, fully_sharded=True)
    with pytest.raises(InvalidInputError, match="columns from 1 on"):
        run_experts(backend, x, a, b, out, offset=1)
    with pytest.raises(InvalidInputError, match="allowed: 14, one per pair"):
        run_experts(backend, x, a, b, out, mul_routed_weight=True)
    tables = torch.zeros(SLOTS, 24, dtype=torch.int32), torch.zeros(SLOTS, 1, dtype=torch.int32)
    more = torch.tensor(TOKENS), RANK, TOP_K, torch.arange(4), 4, torch.ones(4), *[24, 1, 1] * 4
    weights = torch.ones(7, TOP_K)
    rest = torch.full((SLOTS,), 24), *more, 1, 1
    with pytest.raises(InvalidInputError, match="pair 0 of token 0"):
        ops.fused_moe_lora(out, x, a, b, weights, *tables, *rest, backend=backend)
    with pytest.raises(InvalidInputError, match="shrink_block_size_m=24"):
        ops.fused_moe_lora(
            out, x, a, b, weights, tables[0][:, :16], tables[1][:, :0], *rest, backend=backend
        )
    assert out.eq(1).all()


@pytest.mark.parametrize("with_map", [False, True])
def test_aligned_blocks_hold_each_live_pair_once(with_map):
    mapping = torch.tensor(TOKENS, dtype=torch.int32)
    ids, enabled = torch.tensor([-1, 0, 2, 9]), torch.ones(4, dtype=torch.int32)
    expert_map = torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32) if with_map else None
    rows, experts, lengths = align(IDS, mapping, 4, enabled, ids, expert_map=expert_map)
    local = (expert_map if with_map else torch.arange(EXPERTS))[IDS.long()].reshape(-1).tolist()
    for slot in (0, 2):
        length = lengths[slot].item()
        held = rows[slot].tolist()
        assert length % 4 == 0 and all(pair == IDS.numel() for pair in held[length:])
        found = {p: experts[slot, i // 4].item() for i, p in enumerate(held) if p < IDS.numel()}
        own = [p for p in range(IDS.numel()) if TOKENS[p // TOP_K] == slot and local[p] >= 0]
        assert found == {pair: local[pair] for pair in own}
        assert experts[slot, length // 4 :].eq(-1).all()
        counts = [[local[pair] for pair in own].count(e) for e in set(local)]
        assert length == sum(-(-count // 4) * 4 for count in counts)
    assert rows[1].eq(-7).all() and experts[1].eq(-7).all() and lengths[1] == -7


def test_alignment_leaves_slots_that_are_switched_off_or_refuses_small_tables():
    mapping = torch.tensor(TOKENS, dtype=torch.int32)
    ids, enabled = torch.arange(4), torch.tensor([0, 1, 1])
    rows, _, lengths = align(IDS, mapping, 4, enabled, ids)
    assert rows[0].eq(-7).all() and lengths.tolist()[:2] == [-7, 0]
    with pytest.raises(InvalidInputError, match="tables are too small"):
        align(IDS, mapping, 4, enabled, ids, width=24)
    with pytest.raises(InvalidInputError, match="block_size=0"):
        align(IDS, mapping, 0, enabled, ids, width=24, blocks=3)
    with pytest.raises(InvalidInputError, match=r"topk_ids has the wrong shape\n  given: \[14\]"):
        align(IDS.reshape(-1), mapping, 4, enabled, ids)
    with pytest.raises(InvalidInputError, match=r"topk_ids does not hold ints(.|\n)*float16"):
        align(IDS.half(), mapping, 4, enabled, ids)
    with pytest.raises(InvalidInputError, match=r"token_lora_mapping does not hold(.|\n)*bool"):
        align(IDS, mapping > 0, 4, enabled, ids)
    with pytest.raises(InvalidInputError, match=r"sorted_token_ids does not hold ints"):
        align(IDS, mapping, 4, enabled, ids, dtype=torch.float16)  # which does not hold 2049


@pytest.mark.parametrize("wrong", [torch.tensor([True, False, True, False]), torch.tensor(3)])
def test_slots_that_are_no_list_of_ints_are_refused(wrong):
    meta = list(metadata(TOKENS))
    meta[4] = wrong
    out = torch.ones(1, 7, RANK)
    with pytest.raises(InvalidInputError, match="lora_ids does not fit the batch"):
        ops.lora_shrink(random(7, INNER), stacks([(RANK, INNER)]), out, *meta, 1.0)
    assert out.eq(1).all()
