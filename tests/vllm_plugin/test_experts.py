"""Mixtures of experts as vLLM calls them, and what a batch without adapters costs."""

from types import SimpleNamespace

import pytest
import torch
from helpers.servers.vllm_layers import (
    IDS,
    INDEX_TO_ID,
    RANK,
    SLICES,
    SLOTS,
    WIDTH,
    make_module,
    mapping,
)
from torch.utils._python_dispatch import TorchDispatchMode

EXPERTS, TOP_K, INNER, HIDDEN = 4, 2, 6, WIDTH
TOPK_IDS = torch.tensor([[0, 3], [1, 2], [3, 0], [2, 1], [0, 1], [1, 3], [2, 3]])


def moe_config(dp_size=1, ep_size=1, num_experts=EXPERTS):
    """Return vLLM's configuration of a mixture, of which this process has `EXPERTS` experts."""
    parallel = SimpleNamespace(dp_size=dp_size, ep_size=ep_size, use_ep=ep_size > 1)
    return SimpleNamespace(
        moe_parallel_config=parallel, num_experts=num_experts, num_local_experts=EXPERTS
    )


def make_module_of_experts(shared=False, slices=2, **more):
    """Return a mixture's module with random stacks, gate and up apart, as vLLM keeps them."""
    generator = torch.Generator().manual_seed(5)

    def stack(num_experts, *shape):
        return torch.randn(SLOTS, num_experts, *shape, generator=generator)

    one = 1 if shared else EXPERTS
    module = SimpleNamespace(
        w13_lora_a_stacked=tuple(stack(one, RANK, HIDDEN) for _ in range(slices)),
        w13_lora_b_stacked=tuple(stack(EXPERTS, INNER, RANK) for _ in range(slices)),
        w2_lora_a_stacked=(stack(EXPERTS, RANK, INNER),),
        w2_lora_b_stacked=(stack(one, HIDDEN, RANK),),
        local_num_experts=EXPERTS,
        moe_config=moe_config(),
        set_lora=lambda index, lora_a, lora_b: None,
        reset_lora=lambda index: None,
    )
    vars(module).update(more)
    for half in "ab":  # as `create_lora_weights` of vLLM makes them
        stacks = [getattr(module, f"{site}_lora_{half}_stacked") for site in ("w13", "w2")]
        views = [stack[slot][0] for slot in range(SLOTS) for pair in stacks for stack in pair]
        setattr(module, f"lora_{half}_stacked", views)
    return module


def make_experts(wrapper, **more):
    """Return such a module that the plug-in has adopted."""
    from lora_backends.integrations.vllm import experts

    module = make_module_of_experts(**more)
    assert experts.is_experts(module)
    experts.adopt(module, wrapper)
    return module


def expected_pairs(x, a, b, weights=None, ids=TOPK_IDS):
    """Return the delta of every pair of token and expert by plain products."""
    out = torch.zeros(len(IDS), TOP_K, b.shape[2])
    for token, id_ in enumerate(IDS):
        for j, expert in enumerate(ids[token] if id_ else ()):
            if expert < 0:
                continue
            slot, row = INDEX_TO_ID.index(id_), x[token, j]
            own_a = a[slot, min(int(expert), a.shape[1] - 1)]
            own_b = b[slot, min(int(expert), b.shape[1] - 1)]
            out[token, j] = own_b @ (own_a @ row) * (1 if weights is None else weights[token, j])
    return out


@pytest.mark.parametrize("shared", [False, True])
def test_experts_add_gate_and_up_and_the_weighted_second_product(wrapper, x, shared):
    module = make_experts(wrapper, shared=shared)
    for slot in range(SLOTS):  # after set_lora, at full rank
        module.set_lora(slot, [torch.ones(1, RANK, 1), None, torch.ones(1, RANK, 1)], [])
    weights = torch.rand(len(IDS), TOP_K)
    # vLLM passes what is shared as views of no stride
    a13 = tuple(a.expand(-1, EXPERTS, -1, -1) for a in module.w13_lora_a_stacked)
    b2 = tuple(b.expand(-1, EXPERTS, -1, -1) for b in module.w2_lora_b_stacked)
    y = torch.ones(len(IDS), TOP_K, 2 * INNER)
    more = [None, None, None, len(IDS), TOP_K, SLOTS, None, EXPERTS, TOP_K, 2, False, False]
    x = x.bfloat16().float()  # of the model's dtype, which is not the adapters'
    handed_on = wrapper.add_lora_w13(
        y, x.bfloat16(), a13, module.w13_lora_b_stacked, TOPK_IDS, weights, *more
    )
    pairs = x[:, None].expand(-1, TOP_K, -1)
    wanted = [
        expected_pairs(pairs, a, b)
        for a, b in zip(module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True)
    ]
    torch.testing.assert_close(y, 1 + torch.cat(wanted, -1))
    inner = torch.randn(len(IDS) * TOP_K, INNER).bfloat16()
    y = torch.ones(len(IDS), TOP_K, HIDDEN)
    more = [len(IDS), None, None, TOP_K, SLOTS, None, TOP_K, False, 0, False]
    wrapper.add_lora_w2(y, inner, module.w2_lora_a_stacked, b2, weights, *handed_on, *more)
    wanted = expected_pairs(
        inner.float().view(len(IDS), TOP_K, INNER),
        module.w2_lora_a_stacked[0],
        module.w2_lora_b_stacked[0],
        weights,
    )
    torch.testing.assert_close(y, 1 + wanted)


def first_product(wrapper, x, stacks):
    """Return what the first product adds to zeros, for stacks as vLLM passes them."""
    columns = sum(b.shape[2] for b in stacks[1])
    y, weights = torch.zeros(len(IDS), TOP_K, columns), torch.ones(len(IDS), TOP_K)
    wrapper.add_lora_w13(y, x, *stacks, TOPK_IDS, weights)
    return y


def full_experts(wrapper, **more):
    module = make_experts(wrapper, **more)
    for slot in range(SLOTS):
        module.set_lora(slot, [torch.ones(1, RANK, 1)], [])
    return module


@pytest.mark.parametrize("shared", [False, True])
def test_gate_and_up_read_x_once(wrapper, x, monkeypatch, shared):
    module, backend, calls = full_experts(wrapper, shared=shared), wrapper.tokens.backend, []
    run = backend.run_experts
    monkeypatch.setattr(
        type(backend), "run_experts", lambda _, *args: calls.append(args[1]) or run(*args)
    )
    first_product(wrapper, x, (module.w13_lora_a_stacked, module.w13_lora_b_stacked))
    assert [site.output_slices for site in calls] == [(INNER, INNER)]


@pytest.mark.parametrize("slices", [1, 2])
def test_columns_follow_the_order_of_the_stacks(wrapper, x, slices):
    """FlashInfer wants up before gate; a layer without gate has a single slice."""
    module = full_experts(wrapper, slices=slices)
    pairs = x[:, None].expand(-1, TOP_K, -1)
    for step in (1, -1):
        stacks = module.w13_lora_a_stacked[::step], module.w13_lora_b_stacked[::step]
        wanted = [expected_pairs(pairs, a, b) for a, b in zip(*stacks, strict=True)]
        torch.testing.assert_close(first_product(wrapper, x, stacks), torch.cat(wanted, -1))


@pytest.mark.parametrize("inference", [False, True])
def test_every_holder_of_a_stack_sees_what_vllm_writes(wrapper, inference):
    """Stacks keep their objects and values, and nothing keeps the memory that they had before."""
    from lora_backends.integrations.vllm import experts

    with torch.inference_mode(inference):
        module = make_module_of_experts()
    # as contexts of vLLM do
    held = {half: getattr(module, f"w13_lora_{half}_stacked") for half in "ab"}
    views = [*module.lora_a_stacked, *module.lora_b_stacked]
    before = [each.clone() for each in (*held["a"], *held["b"], *views)]
    experts.adopt(module, wrapper)
    experts.adopt(module, wrapper)  # as vLLM may, with another wrapper
    for now, then in zip((*held["a"], *held["b"], *views), before, strict=True):
        assert torch.equal(now, then)
    site = module.lora_backends_layers[0]
    memory = {each.untyped_storage().data_ptr() for each in (site.lora_a, site.lora_b)}
    second = {
        each[0].untyped_storage().data_ptr()
        for each in (module.w2_lora_a_stacked, module.w2_lora_b_stacked)
    }
    assert {v.untyped_storage().data_ptr() for v in views} == memory | second
    for half, whole in (("a", site.lora_a), ("b", site.lora_b.unflatten(2, (2, INNER)))):
        for s, stack in enumerate(held[half]):
            with torch.inference_mode():
                stack[1] = 0
                stack[2, :, :2].copy_(torch.full_like(stack[2, :, :2], 7 + s))
            assert whole[1, :, s].eq(0).all() and whole[2, :, s, :2].eq(7 + s).all()


def test_experts_of_other_processes_are_left_out(wrapper, x):
    module = make_experts(wrapper, moe_config=moe_config(ep_size=2, num_experts=8))
    for slot in range(SLOTS):
        module.set_lora(slot, [torch.ones(1, RANK, 1), None, torch.ones(1, RANK, 1)], [])
    # eight experts, of which this process has the odd ones, the last one first
    expert_map = torch.tensor([-1, 3, -1, 2, -1, 1, -1, 0])
    given_ids = torch.tensor([[0, 3], [1, 2], [3, 6], [2, 1], [7, 1], [1, 5], [4, 6]])
    weights = torch.rand(len(IDS), TOP_K)
    stacks = module.w13_lora_a_stacked, module.w13_lora_b_stacked
    y = torch.zeros(len(IDS), TOP_K, 2 * INNER)
    handed_on = wrapper.add_lora_w13(y, x, *stacks, given_ids, weights, expert_map)
    here = expert_map[given_ids]
    pairs = x[:, None].expand(-1, TOP_K, -1)
    wanted = torch.cat(
        [expected_pairs(pairs, a, b, ids=here) for a, b in zip(*stacks, strict=True)], -1
    )
    torch.testing.assert_close(y, wanted)
    assert y[here < 0].eq(0).all() and not y[here >= 0].eq(0).all()
    inner, second = torch.randn(len(IDS), TOP_K, INNER), torch.zeros(len(IDS), TOP_K, HIDDEN)
    stacks = module.w2_lora_a_stacked, module.w2_lora_b_stacked
    wrapper.add_lora_w2(second, inner.flatten(0, 1), *stacks, weights, *handed_on)
    wanted = expected_pairs(inner, stacks[0][0], stacks[1][0], weights, ids=here)
    torch.testing.assert_close(second, wanted)


def test_a_layer_of_experts_is_routed_once(wrapper, x, monkeypatch):
    module, routings = make_experts(wrapper), []
    backend = wrapper.tokens.backend
    prepare = backend.prepare_experts
    monkeypatch.setattr(
        type(backend),
        "prepare_experts",
        lambda _, *args, **out: routings.append(prepare(*args, **out)) or routings[-1],
    )
    y, weights = torch.ones(len(IDS), TOP_K, 2 * INNER), torch.ones(len(IDS), TOP_K)
    stacks = module.w13_lora_a_stacked, module.w13_lora_b_stacked
    handed_on = wrapper.add_lora_w13(y, x, *stacks, TOPK_IDS, weights)
    second, inner = torch.ones(len(IDS), TOP_K, HIDDEN), torch.ones(len(IDS) * TOP_K, INNER)
    stacks = module.w2_lora_a_stacked, module.w2_lora_b_stacked
    wrapper.add_lora_w2(second, inner, *stacks, weights, *handed_on)
    assert len(routings) == 1


def test_layers_whose_batches_overlap_are_refused(wrapper, x):
    from lora_backends import UnsupportedInputError

    modules = [full_experts(wrapper) for _ in range(2)]
    weights, handed_on = torch.ones(len(IDS), TOP_K), []
    for module in modules:
        y = torch.ones(len(IDS), TOP_K, 2 * INNER)
        stacks = module.w13_lora_a_stacked, module.w13_lora_b_stacked
        handed_on.append(wrapper.add_lora_w13(y, x, *stacks, TOPK_IDS, weights))
    second, inner = torch.ones(len(IDS), TOP_K, HIDDEN), torch.ones(len(IDS) * TOP_K, INNER)
    stacks = modules[0].w2_lora_a_stacked, modules[0].w2_lora_b_stacked
    with pytest.raises(UnsupportedInputError, match="another layer"):
        wrapper.add_lora_w2(second, inner, *stacks, weights, *handed_on[0])
    assert second.eq(1).all()
    wrapper.add_lora_w2(second, inner, *stacks, weights, *handed_on[1])


@pytest.mark.parametrize(
    ("moe", "settings", "refused"),
    [
        ({"dp_size": 2}, {}, "data parallelism: vLLM sends slots"),
        ({"ep_size": 2, "num_experts": 7}, {}, "7 experts over 2 processes"),
        ({"ep_size": 2, "num_experts": 8}, {"enable_eplb": True}, "enable_eplb: vLLM moves"),
        (
            {"ep_size": 2, "num_experts": 8},
            {"expert_placement_strategy": "round_robin"},
            "expert_placement_strategy",
        ),
        ({"ep_size": 2, "num_experts": 8}, {"expert_placement_strategy": "linear"}, ""),
        ({}, {"enable_eplb": True, "expert_placement_strategy": "round_robin"}, ""),
    ],
)
def test_adapters_whose_experts_vllm_would_mix_up_are_refused(
    wrapper, monkeypatch, moe, settings, refused
):
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm.adapters.targets import Targets

    monkeypatch.setattr(wrapper, "own", lambda reason: None)
    wrapper.parallel = SimpleNamespace(**settings)
    name = "model.layers.0.mlp.experts"
    manager = SimpleNamespace(
        modules={name: make_experts(wrapper, moe_config=moe_config(**moe))},
        packed_modules={name: [f"{name}.0.{part}_proj" for part in ("gate", "down", "up")]},
        model=SimpleNamespace(),
        is_pooling_model=False,
    )
    if refused:
        with pytest.raises(UnsupportedInputError, match=f"or run them wrong(.|\n)*{refused}"):
            Targets(manager).check("folder", [f"{name}.0.up_proj"])
    else:
        Targets(manager).check("folder", [f"{name}.0.up_proj"])


class Operations(TorchDispatchMode):
    """Records every operation of torch except views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_batch_without_adapters_runs_nothing(wrapper, x):
    from lora_backends.integrations.vllm import layers, operation

    linear, mixture = make_module(wrapper), make_experts(wrapper)
    vocabulary = 20
    embedding = SimpleNamespace(
        lora_a_stacked=torch.ones(SLOTS, vocabulary, RANK),
        lora_a_stacked_2d=torch.ones(SLOTS * vocabulary, RANK),
        lora_b_stacked=torch.ones(SLOTS, 1, WIDTH, RANK),
        base_layer=torch.nn.Embedding(vocabulary, WIDTH).requires_grad_(False),
        set_lora=lambda *args: None,
        reset_lora=lambda index: None,
    )
    layers.adopt(embedding, wrapper)
    operation.embed_by_token(embedding)
    ids, weights = torch.arange(len(IDS)), torch.ones(len(IDS), TOP_K)
    y, two = torch.ones(len(IDS), sum(SLICES)), torch.ones(len(IDS), TOP_K, 2 * INNER)
    second, inner = torch.ones(len(IDS), TOP_K, HIDDEN), torch.ones(len(IDS) * TOP_K, INNER)

    def step():
        stacks = linear.lora_a_stacked, linear.lora_b_stacked
        wrapper.add_lora_linear(y, x, *stacks, 1.0, SLICES)
        wrapper.add_lora_logits(y, x, stacks[0][0], stacks[1][0], 1.0)
        embedding.forward(ids)
        first = mixture.w13_lora_a_stacked, mixture.w13_lora_b_stacked
        handed_on = wrapper.add_lora_w13(two, x, *first, TOPK_IDS, weights)
        last = mixture.w2_lora_a_stacked, mixture.w2_lora_b_stacked
        wrapper.add_lora_w2(second, inner, *last, weights, *handed_on)

    embedding.set_lora(1, torch.ones(RANK, vocabulary), None)
    with torch.no_grad(), Operations() as busy:
        step()
    assert len(busy.names) > 10
    wrapper.update_metadata(mapping([0] * len(IDS)), INDEX_TO_ID, SLOTS + 1, 100)
    with torch.no_grad(), Operations() as idle:
        step()
    assert idle.names == ["aten.embedding.default"], "the model's own"


def test_experts_are_right_after_sleep_has_discarded_all_memory(wrapper):
    module = make_experts(wrapper)
    for site in module.lora_backends_layers:
        site.scalings.zero_()
    module.set_lora(1, [torch.ones(1, RANK, 1)], [])
    assert all(site.scalings[1].eq(1).all() for site in module.lora_backends_layers)


def test_experts_of_tokens_of_other_processes_are_refused(wrapper, x):
    from lora_backends import UnsupportedInputError

    module = make_experts(wrapper)
    y = torch.ones(len(IDS), TOP_K, 2 * INNER)
    stacks = module.w13_lora_a_stacked, module.w13_lora_b_stacked
    given = TOPK_IDS, torch.ones(len(IDS), TOP_K)
    with pytest.raises(UnsupportedInputError, match="token_lora_mapping"):
        wrapper.add_lora_w13(y, x, *stacks, *given, token_lora_mapping=torch.zeros(7))


def test_experts_without_an_adapter_add_nothing(wrapper, x):
    module = make_experts(wrapper)  # no set_lora: rank 0, whatever the stacks hold
    y = torch.ones(len(IDS), TOP_K, 2 * INNER)
    stacks = module.w13_lora_a_stacked, module.w13_lora_b_stacked
    wrapper.add_lora_w13(y, x, *stacks, TOPK_IDS, torch.ones(len(IDS), TOP_K))
    assert y.eq(1).all()


def test_experts_of_data_parallel_processes_stay_with_vllms_wrapper(wrapper, x, monkeypatch):
    own = SimpleNamespace(update_metadata=lambda *args, **kwargs: seen.append(args))
    own.add_lora_w13 = lambda *args, **kwargs: ("own", len(args))
    own.token_mapping_meta = "vLLM's own"
    seen, logged = [], []
    monkeypatch.setattr(
        "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU", lambda *args, **kwargs: own
    )
    monkeypatch.setattr(
        "lora_backends.integrations.vllm.plugin.own_wrapper_name",
        lambda: "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU",
    )
    monkeypatch.setattr(
        "lora_backends.integrations.vllm.plugin.logger",
        lambda: SimpleNamespace(warning_once=lambda text, *args: logged.append(text % args)),
    )
    module = make_experts(wrapper, moe_config=moe_config(dp_size=2))
    assert "data parallelism" in logged[0] and len(logged) == 1
    assert seen[0][1] == INDEX_TO_ID, "it takes the batch of now"
    stacks = module.w13_lora_a_stacked, module.w13_lora_b_stacked
    y = torch.ones(len(IDS), TOP_K, 2 * INNER)
    assert wrapper.add_lora_w13(y, x, *stacks, TOPK_IDS, y, 1, 2) == ("own", 8)
    wrapper.update_metadata(mapping(IDS[::-1]), INDEX_TO_ID, SLOTS + 1, 100)
    assert len(seen) == 2, "and each batch after it"
    assert wrapper.token_mapping_meta == "vLLM's own"
