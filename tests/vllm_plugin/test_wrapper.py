"""The methods that vLLM calls, on stacks laid out as vLLM does, against plain products."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.servers.vllm_layers import (
    IDS,
    INDEX_TO_ID,
    RANK,
    RANKS,
    SLICES,
    SLOTS,
    WIDTH,
    delta,
    make_module,
    mapping,
)


def test_a_backend_without_the_features_that_vllm_needs_is_refused(wrapper, monkeypatch):
    from lora_backends import UnsupportedInputError

    backend = type(wrapper.tokens.backend)
    monkeypatch.setattr(backend, "features", backend.features - {"slice_tensors"})
    with pytest.raises(UnsupportedInputError, match="'torch_ref'(.|\n)*lacks: slice_tensors"):
        type(wrapper)(64, 16, "cpu", lora_config=SimpleNamespace(max_loras=SLOTS))


@pytest.fixture
def settings(monkeypatch):
    """Return what a wrapper that is made takes for vLLM's settings."""
    from lora_backends.integrations.vllm import wrapper as module

    model = SimpleNamespace(model="tiny", is_encoder_decoder=False, enable_prompt_embeds=False)
    made = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        parallel_config=SimpleNamespace(use_ubatching=False),
        compilation_config=None,
        speculative_config=None,
    )
    monkeypatch.setattr(module, "get_current_vllm_config_or_none", lambda: made)
    return made


def test_a_model_with_an_encoder_whose_rows_vllm_does_not_announce_is_refused(wrapper, settings):
    from lora_backends import UnsupportedInputError

    settings.model_config.is_encoder_decoder = True
    with pytest.raises(UnsupportedInputError, match="given: tiny, with an encoder"):
        type(wrapper)(64, 16, "cpu", lora_config=SimpleNamespace(max_loras=SLOTS))


def test_a_linear_layer_of_several_slices_is_added_to_y(wrapper, x):
    module = make_module(wrapper)
    y = torch.ones(len(IDS), sum(SLICES))
    args = module.lora_a_stacked, module.lora_b_stacked, 1.0, SLICES
    wrapper.add_lora_linear(y, x, *args)
    torch.testing.assert_close(y, 1 + delta(module, x, IDS))
    assert torch.equal(y[0], torch.ones(sum(SLICES)))
    alone = torch.zeros_like(y)
    wrapper.add_lora_linear(alone, x, *args, add_inputs=False)
    torch.testing.assert_close(alone, delta(module, x, IDS))


def test_a_layer_that_has_passed_the_checks_is_refused_what_they_refuse(wrapper, x):
    from lora_backends import InvalidInputError, UnsupportedInputError

    module = make_module(wrapper)
    args = module.lora_a_stacked, module.lora_b_stacked, 1.0, SLICES
    y = torch.zeros(len(IDS), sum(SLICES))
    wrapper.add_lora_linear(y, x, *args)
    expected = y.clone()
    for given_x, given_y in [
        (x.to(torch.int32), y),
        (x[:, :-1], y),
        (x, y[:-1]),
        (x[None], y[None]),
        (x, y.to(torch.int32)),
    ]:
        with pytest.raises((InvalidInputError, UnsupportedInputError)):
            wrapper.add_lora_linear(given_y, given_x, *args)
    wide_x, wide_y = torch.zeros(len(IDS), WIDTH + 1), torch.zeros(len(IDS), sum(SLICES) + 1)
    wide_x[:, :-1] = x
    wrapper.add_lora_linear(wide_y[:, :-1], wide_x[:, :-1], *args)
    torch.testing.assert_close(wide_y[:, :-1], expected)
    assert wide_y[:, -1].eq(0).all()


def test_the_checks_of_a_layer_are_made_once(wrapper, x, monkeypatch):
    from lora_backends.dispatch import wrap

    module, calls, guard = make_module(wrapper), [], wrap.check_operation
    monkeypatch.setattr(wrap, "check_operation", lambda *args: calls.append(args) or guard(*args))
    args = module.lora_a_stacked, module.lora_b_stacked, 1.0, SLICES
    y = torch.zeros(len(IDS), sum(SLICES))
    wrapper.add_lora_linear(y, x, *args)
    torch.testing.assert_close(y, delta(module, x, IDS))
    made = len(calls)
    wrapper.add_lora_linear(y, x, *args)
    assert len(calls) == made
    wrapper.add_lora_linear(y.double(), x, *args)
    assert len(calls) > made, "y of another dtype has not passed them"


def test_rows_that_pad_a_captured_graph_have_no_adapter(wrapper, x):
    module = make_module(wrapper)
    padded = torch.cat([x, x[1:4]])
    y = torch.ones(len(padded), sum(SLICES))
    wrapper.add_lora_linear(y, padded, module.lora_a_stacked, module.lora_b_stacked, 1.0, SLICES)
    torch.testing.assert_close(y[: len(x)], 1 + delta(module, x, IDS))
    assert torch.equal(y[len(x) :], torch.ones(3, sum(SLICES)))


def test_a_batch_of_other_rows_than_announced_is_refused(wrapper, x):
    from lora_backends import InvalidInputError

    module = make_module(wrapper)
    args = module.lora_a_stacked, module.lora_b_stacked, 1.0, SLICES
    for rows in (x[:3], x.repeat(10, 1)):
        y = torch.ones(len(rows), sum(SLICES))
        with pytest.raises(InvalidInputError, match="7 to 64 rows"):
            wrapper.add_lora_linear(y, rows, *args)
        assert torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize(
    "ids",
    [[7] * 300 + [0] * 200 + [5] * 150, [0] * 700, (IDS * 200)[:700], [7, *IDS, *[7] * 600], []],
    ids=["runs", "none", "mixed", "long and short runs", "no rows"],
)
def test_every_row_of_a_prefill_has_the_slot_of_its_adapter(wrapper, ids):
    """Torch's default device may be another one; vLLM passes integers of numpy."""
    made = type(wrapper)(1000, 16, "cpu", lora_config=SimpleNamespace(max_loras=SLOTS))
    given = [np.int32(id_) for id_ in ids]
    with torch.device("meta"):
        made.update_metadata(mapping(given, given[::50]), INDEX_TO_ID, SLOTS + 1, 100)
    slots = [INDEX_TO_ID.index(id_) if id_ else -1 for id_ in ids]
    assert list(made.tokens.slots) == slots and list(made.sampled.slots) == slots[::50]
    assert made.tokens.is_idle == (not any(ids))
    made.update_metadata(mapping(given), INDEX_TO_ID, SLOTS + 1, 100)
    assert list(made.sampled.slots) == slots


@pytest.mark.parametrize("rows", [7, 600])
def test_an_adapter_without_a_slot_is_refused_and_leaves_the_last_batch(wrapper, rows):
    from lora_backends import InvalidInputError

    def held():
        return wrapper.tokens.slots, wrapper.sampled.slots, wrapper.is_prefill

    before = held()
    for ids in (([8] * rows,), ([5] * rows, [8]), ([-5] * rows,)):
        batch = mapping(*ids, prefill=not wrapper.is_prefill)
        with pytest.raises(InvalidInputError, match="no adapter of this id"):
            wrapper.update_metadata(batch, INDEX_TO_ID, SLOTS + 1, 100)
        assert held() == before


@pytest.fixture
def vllms(monkeypatch):
    """Return vLLM's wrapper for CPUs, of the class that a `BackendWrapper` then makes."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from lora_backends.integrations.vllm import plugin

    name = f"{PunicaWrapperCPU.__module__}.{PunicaWrapperCPU.__name__}"
    monkeypatch.setattr(plugin, "own_wrapper_name", lambda: name)
    return PunicaWrapperCPU(64, 16, "cpu", lora_config=SimpleNamespace(max_loras=SLOTS))


def test_indices_that_a_layer_reads_are_those_of_vllm_for_every_batch(wrapper, vllms):
    """All tensors of vLLM's wrapper are compared: a version may add one.

    A layer first reads them in inference mode; later batches may come outside of it.
    """
    tensors = {key for key, value in vars(vllms).items() if isinstance(value, torch.Tensor)}
    assert tensors and not tensors & vars(wrapper).keys(), "a batch rewrites none of them"
    for ids in (IDS, IDS[::-1], [5] * 9):
        vllms.update_metadata(mapping(ids), INDEX_TO_ID, SLOTS + 1, 100)
        wrapper.update_metadata(mapping(ids), INDEX_TO_ID, SLOTS + 1, 100)
        with torch.inference_mode():
            assert wrapper.indices_len == vllms.indices_len
            for index in ("token_lora_indices", "sampler_indices"):
                assert torch.equal(getattr(wrapper, index), getattr(vllms, index))
            count = len(ids)
            for each in tensors & {"_sampler_indices_padded", "_embeddings_indices"}:
                found, wanted = getattr(wrapper, each), getattr(vllms, each)
                assert torch.equal(found[..., :count], wanted[..., :count]), each
            pairs = zip(wrapper.prefill_metadata, vllms.prefill_metadata, strict=True)
            assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in pairs)


def test_indices_have_the_slots_of_the_time_when_the_batch_was_announced(wrapper, vllms):
    slots = list(INDEX_TO_ID)
    wrapper.update_metadata(mapping(IDS), slots, SLOTS + 1, 100)
    slots[:] = [None, None, 7]  # vLLM writes into its list when it loads or removes adapters
    vllms.update_metadata(mapping(IDS), INDEX_TO_ID, SLOTS + 1, 100)
    assert torch.equal(wrapper.token_lora_indices, vllms.token_lora_indices)


def test_indices_that_a_graph_would_read_of_one_batch_alone_are_refused(
    wrapper, vllms, monkeypatch
):
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm import wrapper as module

    with monkeypatch.context() as patch:
        patch.setattr(module, "is_capturing", lambda device: True)
        with pytest.raises(UnsupportedInputError, match="captures a layer of vLLM's own"):
            wrapper.token_lora_indices  # noqa: B018
    first = wrapper.token_lora_indices
    monkeypatch.setattr(module, "is_capturing", lambda device: True)
    assert wrapper.token_lora_indices.data_ptr() == first.data_ptr()


def test_each_batch_replaces_the_last_one(wrapper, x):
    module = make_module(wrapper)
    for ids in (IDS[::-1], [0] * len(IDS), [9] * len(IDS), IDS):
        wrapper.update_metadata(mapping(ids), INDEX_TO_ID, SLOTS + 1, 100)
        y = torch.zeros(len(ids), sum(SLICES))
        wrapper.add_lora_linear(y, x, module.lora_a_stacked, module.lora_b_stacked, 1.0, SLICES)
        torch.testing.assert_close(y, delta(module, x, ids))


def test_a_slot_that_is_rewritten_or_reset_is_followed(wrapper, x):
    module = make_module(wrapper)
    layer = module.lora_backends_layers[0]
    assert layer.weights.ranks.tolist() == [RANKS[id_] for id_ in INDEX_TO_ID]
    module.reset_lora(0)
    assert layer.weights.ranks[0].tolist() == [0, 0, 0]
    y = torch.zeros(len(IDS), sum(SLICES))
    wrapper.add_lora_linear(y, x, module.lora_a_stacked, module.lora_b_stacked, 1.0, SLICES)
    torch.testing.assert_close(y, delta(module, x, IDS))
    assert not y[1].any() and y[2].any()


def test_an_adapter_is_right_after_sleep_has_discarded_all_memory(wrapper, x):
    weight = torch.ones(SLOTS, 1, 8, WIDTH)
    module = make_module(wrapper, slices=(8,), full_weight_stacked=weight)
    wanted = delta(module, x, IDS)
    lora = [
        ([a[:rank]], [b[:, :rank]])
        for slot, rank in enumerate(RANKS[id_][0] for id_ in INDEX_TO_ID)
        for a, b in [(module.lora_a_stacked[0][slot, 0], module.lora_b_stacked[0][slot, 0])]
    ]
    lora = [([a[0].clone()], [b[0].clone()]) for a, b in lora]
    for layer in module.lora_backends_layers:
        layer.weights.ranks.zero_()
        layer.weights.scalings.zero_()
    for slot, (a, b) in enumerate(lora):
        module.set_lora(slot, a, b)
    y = torch.zeros(len(IDS), 8)
    wrapper.add_lora_linear(y, x, module.lora_a_stacked, module.lora_b_stacked, 1.0, (8,))
    torch.testing.assert_close(y, wanted)
    head = module.lora_backends_layers[1].weights
    assert head.ranks.eq(8).all() and head.scalings.eq(1).all()


def test_a_graph_captured_before_any_batch_is_refused(wrapper, x, monkeypatch):
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations import plans

    new = type(wrapper)(64, 16, "cpu", lora_config=SimpleNamespace(max_loras=SLOTS))
    module = make_module(new)
    y = torch.ones(len(IDS), sum(SLICES))
    args = y, x, module.lora_a_stacked, module.lora_b_stacked, 1.0, SLICES
    new.add_lora_linear(*args)
    assert y.eq(1).all()
    monkeypatch.setattr(plans, "is_capturing", lambda device: True)
    with pytest.raises(UnsupportedInputError, match="has not announced(.|\n)*cudagraph_mm_encoder"):
        new.add_lora_linear(*args)
    new.update_metadata(mapping([0] * len(IDS)), INDEX_TO_ID, SLOTS + 1, 100)
    new.add_lora_linear(*args)
    assert y.eq(1).all()


def test_matrices_sharded_by_rank_are_refused(wrapper):
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm import layers

    module = make_module(wrapper)
    module.lora_a_stacked = tuple(a[:, :, : RANK // 2] for a in module.lora_a_stacked)
    with pytest.raises(UnsupportedInputError, match="unknown layout"):
        layers.adopt(module, wrapper)


@pytest.mark.parametrize("shape", [(-1,), (1, -1), (-1, 1)])
def test_token_ids_of_more_axes_are_embedded_with_each_tokens_adapter(wrapper, shape):
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA

    from lora_backends import InvalidInputError

    generator, base = torch.Generator().manual_seed(3), torch.nn.Embedding(50, 12)
    base.org_vocab_size = 50
    module = VocabParallelEmbeddingWithLoRA(base)
    settings = SimpleNamespace(max_lora_rank=RANK, lora_dtype=torch.float32)
    module.create_lora_weights(SLOTS, settings)
    module.set_mapping(wrapper)
    lora = [
        [torch.randn(size, generator=generator) for size in ((RANK, 50), (12, RANK))]
        for _ in range(SLOTS)
    ]
    for slot, (a, b) in enumerate(lora):
        module.set_lora(slot, a, b)
    wrapper.update_metadata(mapping(IDS), INDEX_TO_ID, SLOTS + 1, 50)
    ids = 3 * torch.arange(len(IDS)).view(shape)
    with torch.no_grad():
        wanted = base.weight[ids.flatten()].clone()
        for row, (id_, token) in enumerate(zip(IDS, ids.flatten(), strict=True)):
            if id_:
                a, b = lora[INDEX_TO_ID.index(id_)]
                wanted[row] += b @ a[:, token]
        found = torch.compile(module, backend="eager", fullgraph=True)(ids)
    torch.testing.assert_close(found, wanted.view(*ids.shape, 12))
    with pytest.raises(InvalidInputError, match="given: 3 rows\n  allowed: 7 to 64 rows"):
        module(ids.flatten()[:3])


def test_x_of_another_dtype_is_rounded_to_the_adapters(wrapper, x):
    """As with a router that computes in another dtype, or another `lora_dtype`; PEFT does so."""
    module = make_module(wrapper)
    args = module.lora_a_stacked, module.lora_b_stacked, 1.0
    half = x.bfloat16()
    wanted = delta(module, half.float(), IDS)
    y = torch.ones(len(IDS), sum(SLICES))
    wrapper.add_lora_linear(y, half, *args, SLICES)
    torch.testing.assert_close(y, 1 + wanted)
    head = make_module(wrapper, slices=(20,))
    y = torch.zeros(len(IDS), 20)
    wrapper.add_lora_logits(y, half, head.lora_a_stacked[0], head.lora_b_stacked[0], 1.0)
    torch.testing.assert_close(y, delta(head, half.float(), IDS))


def test_logits_use_the_sampled_rows_and_leave_padding(wrapper, x):
    module = make_module(wrapper, slices=(20,))
    stacks = module.lora_a_stacked[0], module.lora_b_stacked[0]
    prompts = [9, 0, 5]
    wrapper.update_metadata(mapping(IDS, prompts), INDEX_TO_ID, SLOTS + 1, 100)
    y = torch.ones(3, 24)  # the table of logits is wider than the vocabulary
    wrapper.add_lora_logits(y, x[:3], *stacks, 1.0)
    torch.testing.assert_close(y[:, :20], 1 + delta(module, x[:3], prompts))
    assert y[:, 20:].eq(1).all()


def test_layers_that_no_adapter_has_run_in_graphs_alone(wrapper, x, monkeypatch):
    from lora_backends.integrations.vllm import operation

    module, calls, backend = make_module(wrapper, slices=(20,)), [], wrapper.tokens.backend
    for name in ("run_linear", "run_logits"):
        monkeypatch.setattr(backend, name, lambda *_, name=name: calls.append(name))

    def call():
        calls.clear()
        y = torch.zeros(len(IDS), 20)
        args = module.lora_a_stacked, module.lora_b_stacked
        wrapper.add_lora_linear(y, x, *args, 1.0, (20,))
        wrapper.add_lora_logits(y, x, args[0][0], args[1][0], 1.0)
        return calls

    both = ["run_linear", "run_logits"]
    for slot in (0, 1):  # the adapter of slot 2 has rank 0 here
        assert call() == both
        module.reset_lora(slot)
    assert call() == ["run_linear"], "a graph of so many rows may be captured"
    sizes = SimpleNamespace(cudagraph_capture_sizes=[8])
    monkeypatch.setattr(wrapper.tokens, "_compilation", sizes)
    assert call() == []
    monkeypatch.setattr(operation, "is_capturing", lambda device: True)
    assert call() == both, "a graph runs the adapters to come"
    monkeypatch.undo()
    module.set_lora(1, [torch.ones(2, WIDTH)], [torch.ones(20, 2)])
    y = torch.zeros(len(IDS), 20)
    wrapper.add_lora_logits(y, x, module.lora_a_stacked[0], module.lora_b_stacked[0], 1.0)
    torch.testing.assert_close(y, delta(module, x, IDS))


def test_logits_of_a_prompts_tokens_have_those_tokens_adapters(wrapper, x):
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm import prompts

    module = make_module(wrapper, slices=(20,))
    wrapper.update_metadata(mapping(IDS, [9, 0, 5]), INDEX_TO_ID, SLOTS + 1, 100)

    def compute_logits(hidden):
        y = torch.ones(len(hidden), 20)
        stacks = module.lora_a_stacked[0], module.lora_b_stacked[0]
        return wrapper.add_lora_logits(y, hidden * 1, *stacks, 1.0)  # a model may scale them

    compute = prompts.by_token(compute_logits, x)
    for first, end in ((1, 5), (4, 7), (0, 3)):
        wanted = 1 + delta(module, x[first:end], IDS[first:end])
        torch.testing.assert_close(compute(x[first:end]), wanted)
    torch.testing.assert_close(compute_logits(x[:3]), 1 + delta(module, x[:3], [9, 0, 5]))
    with pytest.raises(UnsupportedInputError, match="no slice of the batch's hidden states"):
        compute(x[1:3].clone())
    assert prompts.first_token() is None


def test_prompt_logprobs_of_one_engine_leave_the_samples_of_another_thread_alone(wrapper, x):
    from lora_backends.integrations.vllm import prompts

    module = make_module(wrapper, slices=(20,))
    wrapper.update_metadata(mapping(IDS, [9, 0, 5]), INDEX_TO_ID, SLOTS + 1, 100)

    def sample():
        stacks = module.lora_a_stacked[0], module.lora_b_stacked[0]
        return wrapper.add_lora_logits(torch.ones(3, 20), x[:3], *stacks, 1.0)

    def while_another_engine_computes(part):
        with ThreadPoolExecutor(1) as engine:
            return engine.submit(sample).result()

    sampled = prompts.by_token(while_another_engine_computes, x)(x[2:5])
    torch.testing.assert_close(sampled, 1 + delta(module, x[:3], [9, 0, 5]))
    place = SimpleNamespace(cu_num_logits_np=torch.tensor([0, 3, 4, 6]).numpy())
    sampled = prompts._sample(lambda *_: while_another_engine_computes(x), None, x, place)
    torch.testing.assert_close(sampled, 1 + delta(module, x[:3], [9, 0, 5]))


def test_both_model_runners_compute_prompt_logprobs_by_token(monkeypatch):
    from lora_backends.integrations.vllm import prompts

    class GPUModelRunner:
        model = SimpleNamespace(compute_logits=lambda hidden: prompts.first_token())

        def _get_prompt_logprobs_dict(self, hidden, num_tokens):
            return self.model.compute_logits(hidden[3:5])

    class PromptLogprobsWorker:
        def compute_prompt_logprobs(self, logits_fn, hidden, batch):
            return logits_fn(hidden[2:4])

    for place, owner in (
        ("vllm.v1.worker.gpu_model_runner", GPUModelRunner),
        ("vllm.v1.worker.gpu.sample.prompt_logprob", PromptLogprobsWorker),
    ):
        monkeypatch.setitem(sys.modules, place, SimpleNamespace(**{owner.__name__: owner}))
    prompts.follow()
    prompts.follow()
    hidden = torch.zeros(6, 4)
    first = GPUModelRunner.model.compute_logits
    assert GPUModelRunner()._get_prompt_logprobs_dict(hidden, {}) == 3
    assert GPUModelRunner.model.compute_logits is first
    worker = PromptLogprobsWorker()
    assert worker.compute_prompt_logprobs(lambda part: prompts.first_token(), hidden, None) == 2


@pytest.mark.parametrize(
    ("place", "owner", "name"),
    [
        ("gpu_model_runner", "GPUModelRunner", "_get_prompt_logprobs_dict"),
        ("gpu.sample.prompt_logprob", "PromptLogprobsWorker", "compute_prompt_logprobs"),
        ("gpu.model_runner", "GPUModelRunner", "sample"),
    ],
)
def test_a_model_runner_whose_logits_cannot_be_followed_is_refused(monkeypatch, place, owner, name):
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm import prompts

    module = f"vllm.v1.worker.{place}"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{owner: type(owner, (), {})}))
    with pytest.raises(UnsupportedInputError, match=f"{place} without {owner}.{name}"):
        prompts.follow()


def test_several_rows_of_logits_per_request_have_the_requests_adapter(wrapper, x, monkeypatch):
    from lora_backends import InvalidInputError
    from lora_backends.integrations.vllm import prompts

    module = make_module(wrapper, slices=(20,))
    stacks = module.lora_a_stacked[0], module.lora_b_stacked[0]

    class GPUModelRunner:  # speculative decoding: one adapter per request, a row per draft and one
        def sample(self, hidden, batch, grammar):
            return wrapper.add_lora_logits(torch.ones(len(hidden), 20), hidden, *stacks, 1.0)

    place = "vllm.v1.worker.gpu.model_runner"
    monkeypatch.setitem(sys.modules, place, SimpleNamespace(GPUModelRunner=GPUModelRunner))
    prompts.follow()
    wrapper.update_metadata(mapping(IDS, [9, 0, 5]), INDEX_TO_ID, SLOTS + 1, 100)
    for counts in ([3, 1, 2], [1, 1, 1], [0, 2, 1]):
        ids = [id_ for id_, count in zip([9, 0, 5], counts, strict=True) for _ in range(count)]
        batch = SimpleNamespace(cu_num_logits_np=torch.tensor([0, *counts]).cumsum(0).numpy())
        y = GPUModelRunner().sample(x[: len(ids)], batch, None)
        torch.testing.assert_close(y, 1 + delta(module, x[: len(ids)], ids))
    with pytest.raises(InvalidInputError, match="given: 4 rows\n  allowed: 3 rows of 3 requests"):
        GPUModelRunner().sample(x[:4], batch, None)
    assert prompts.rows_per_request() is None


def test_a_classification_head_of_an_adapters_own_replaces_its_rows(wrapper, x):
    weight = torch.randn(SLOTS, 1, 5, WIDTH, generator=torch.Generator().manual_seed(4))
    bias, enabled = torch.randn(SLOTS, 5), torch.tensor([True, False, True])
    make_module(wrapper, slices=(5,), full_weight_stacked=weight)
    y = torch.ones(len(IDS), 5)
    wrapper.apply_lora_full_linear(y, x, weight, bias, enabled)
    for row, id_ in enumerate(IDS):
        slot = INDEX_TO_ID.index(id_) if id_ else None
        own = slot is not None and enabled[slot]
        wanted = weight[slot, 0] @ x[row] + bias[slot] if own else torch.ones(5)
        torch.testing.assert_close(y[row], wanted)


def test_a_head_of_an_adapters_own_multiplies_every_token(wrapper, x):
    weight = torch.randn(SLOTS, 1, 5, WIDTH, generator=torch.Generator().manual_seed(4))
    make_module(wrapper, slices=(5,), full_weight_stacked=weight)
    wrapper.update_metadata(mapping(IDS, [9]), INDEX_TO_ID, SLOTS + 1, 100)
    y = torch.zeros(1, len(IDS) + 1, 5)
    wrapper.add_shrink(y, torch.cat([x, x[:1]]), (weight,), 1.0)  # the last row pads the batch
    for row, id_ in enumerate([*IDS, 0]):
        wanted = weight[INDEX_TO_ID.index(id_), 0] @ x[row] if id_ else torch.zeros(5)
        torch.testing.assert_close(y[0, row], wanted)


def test_scales_and_buffers_of_a_caller_are_refused(wrapper, x):
    from lora_backends import UnsupportedInputError

    module = make_module(wrapper)
    y = torch.zeros(len(IDS), sum(SLICES))
    args = module.lora_a_stacked, module.lora_b_stacked
    with pytest.raises(UnsupportedInputError, match=r"scale 0\.5"):
        wrapper.add_lora_linear(y, x, *args, 0.5, SLICES)
    with pytest.raises(UnsupportedInputError, match="buffer a tensor"):
        wrapper.add_lora_linear(y, x, *args, 1.0, SLICES, buffer=y)


def test_stacks_that_no_layer_has_announced_are_refused(wrapper, x):
    from lora_backends import InvalidInputError

    stray = (torch.zeros(SLOTS, 1, RANK, WIDTH),)
    with pytest.raises(InvalidInputError, match="no layer that it announced"):
        wrapper.add_lora_linear(torch.zeros(len(x), 8), x, stray, stray, 1.0, (8,))


def test_layers_end_with_their_module(wrapper):
    from lora_backends.integrations.vllm import layers

    gc.collect()
    before = len(layers._LAYERS)
    module = make_module(wrapper)
    assert len(layers._LAYERS) == before + 2
    del module
    gc.collect()
    assert len(layers._LAYERS) == before


def test_methods_of_a_later_vllm_run_on_its_own_wrapper():
    import vllm.lora.punica_wrapper.punica_base as base

    from lora_backends.integrations.vllm import wrapper as module

    assert not module.BackendWrapper.__abstractmethods__
    known = {name for name in vars(base.PunicaWrapperBase) if name.startswith(("add_", "apply_"))}
    assert known <= set(vars(module.BackendWrapper))
