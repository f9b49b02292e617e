"""The memory pool of SGLang's own classes: rows of A as this library lays them out."""

from types import SimpleNamespace

import pytest
import torch

from lora_backends import LoRAWeights, UnsupportedInputError, get_backend
from lora_backends.batch import LoRABatch
from lora_backends.integrations.sglang import pool as of_plugin

SLOTS, MAX_RANK, WIDTH, OUT = 3, 8, 12, (10, 4, 4)


@pytest.mark.parametrize("rank", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 4])
def test_slices_are_spread_in_place(rank, num_slices):
    values = torch.arange(num_slices * rank * 2.0).view(num_slices, rank, 2) + 1
    rows = torch.full((num_slices * MAX_RANK, 2), -7.0)
    rows[: num_slices * rank] = values.flatten(0, 1)
    of_plugin.spread(rows, rank, MAX_RANK)
    assert torch.equal(rows.view(num_slices, MAX_RANK, 2)[:, :rank], values)


@pytest.fixture
def pool():
    """Return SGLang's pool with the stacks of one fused layer, adopted by a manager."""
    from sglang.srt.lora.mem_pool import LoRAMemoryPool

    made = LoRAMemoryPool.__new__(LoRAMemoryPool)
    made.max_lora_rank, made.max_loras_per_batch, made.num_layer = MAX_RANK, SLOTS, 1
    made.target_modules, made.tp_rank, made.tp_size = {"qkv_proj"}, 0, 1
    made.strict_loading = made.enable_lora_overlap_loading = made.pin_memory_available = False
    made.lora_added_tokens_size, made.base_model = 0, torch.nn.Module()
    made.A_buffer = {"qkv_proj": [torch.zeros(SLOTS, 3 * MAX_RANK, WIDTH)]}
    made.B_buffer = {"qkv_proj": [torch.zeros(SLOTS, sum(OUT), MAX_RANK)]}
    for name in ("embedding_A", "embedding_B", "lm_head_A", "lm_head_B", "new_embeddings"):
        setattr(made, f"{name}_buffer", {})
    seen = []
    backend = SimpleNamespace(adopt=lambda pool, modules: seen.append(pool))
    of_plugin.adopt(SimpleNamespace(lora_modules=[], memory_pool=made, lora_backend=backend))
    assert seen == [made]
    return made


def load(pool, slot, rank, seed):
    """Load an adapter into a slot by SGLang's own method, and return its A and B."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(3 * rank, WIDTH, generator=generator)
    b = torch.randn(sum(OUT), rank, generator=generator)
    name = "layers.0.self_attn.qkv_proj"
    weights = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    adapter = SimpleNamespace(
        config=SimpleNamespace(r=rank, lora_added_tokens_size=0),
        layers=[SimpleNamespace(weights=weights, pinned_weights={})],
        embedding_layers={},
        scaling=1.0,
    )
    module = SimpleNamespace(
        slice_lora_a_weights=lambda weights, *_: weights,
        slice_lora_b_weights=lambda weights, *_: weights,
    )
    pool.load_lora_weight_to_buffer(f"{slot} {seed}", slot, adapter, [{name: module}], None, None)
    return a, b


def test_a_slot_that_is_reloaded_with_a_smaller_rank_has_only_the_new_adapter(pool):
    backend = get_backend("torch_ref", device="cpu")
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(9))
    plan = backend.prepare_batch(LoRABatch([0, 1, 2, 0, 1, 2], SLOTS))
    loaded = {slot: (8, load(pool, slot, 8, slot)) for slot in range(SLOTS)}
    for slot, rank, seed in ((0, 3, 5), (1, 5, 6), (2, 1, 7), (1, 2, 8), (0, 7, 9)):
        loaded[slot] = rank, load(pool, slot, rank, seed)
        ranks = torch.tensor([[loaded[s][0]] * 3 for s in range(SLOTS)], dtype=torch.int32)
        weights = LoRAWeights(
            pool.A_buffer["qkv_proj"][0].view(SLOTS, 3, MAX_RANK, WIDTH),
            pool.B_buffer["qkv_proj"][0],
            ranks,
            torch.ones(SLOTS, 3),
            OUT,
        )
        y = backend.run_linear(x, weights, plan)
        for row in range(6):
            r, (a, b) = loaded[row % SLOTS]
            parts = zip(a.split(r), b.split(OUT), strict=True)
            torch.testing.assert_close(y[row], torch.cat([b @ (a @ x[row]) for a, b in parts]))


def test_a_base_slot_stays_as_sglang_clears_it(pool):
    load(pool, 1, 3, 1)
    pool.load_lora_weight_to_buffer(None, 1, None, [], None, None)
    assert not pool.A_buffer["qkv_proj"][0][1].any()


def test_a_slot_keeps_no_head_of_an_adapter_that_was_in_it_before(pool):
    # SGLang clears neither of them for an adapter with the other one
    pool.base_hf_config = SimpleNamespace(vocab_size=5)
    pool.target_modules |= {"embed_tokens", "lm_head"}
    for name, width in (("embedding", 5), ("lm_head", WIDTH)):
        key = {"embedding": "embed_tokens"}.get(name, name)
        setattr(pool, f"{name}_A_buffer", {key: torch.ones(SLOTS, MAX_RANK, width)})
        setattr(pool, f"{name}_B_buffer", {key: torch.ones(SLOTS, 5, MAX_RANK)})
    ends = {
        "model.embed_tokens.lora_embedding_A": torch.ones(3, 5),
        "model.embed_tokens.lora_embedding_B": torch.full((5, 3), 2.0),
    }
    adapter = SimpleNamespace(
        config=SimpleNamespace(r=3, lora_added_tokens_size=0),
        layers=[SimpleNamespace(weights={}, pinned_weights={})],
        embedding_layers=ends,
        added_tokens_embeddings={},
        pinned_embedding_layers={},
        pinned_added_tokens_embeddings={},
        scaling=1.0,
    )
    pool.load_lora_weight_to_buffer("a", 1, adapter, [{}], None, None)
    assert not pool.lm_head_B_buffer["lm_head"][1].any()
    assert (pool.embedding_B_buffer["embed_tokens"][1, :, :3] == 2).all()
    assert pool.lm_head_B_buffer["lm_head"][0].all(), "other slots stay"


@pytest.mark.parametrize(
    ("name", "kind", "named"),
    [
        ("layers.0.self_attn.kv_b_proj", "ColumnParallelLinearWithLoRA", "kv_b_proj"),
        ("layers.0.mlp", "InklingBatchDenseMLP", "InklingBatchDenseMLP is not known"),
        ("layers.0.mlp.experts", "FusedMoEWithLoRA", "runner"),
    ],
)
def test_layers_that_the_backend_does_not_run_are_refused_by_name(name, kind, named):
    module = type(kind, (), {})()
    manager = SimpleNamespace(lora_modules=[{name: module}], memory_pool=None)
    with pytest.raises(UnsupportedInputError, match=named):
        of_plugin.adopt(manager)


def test_layers_of_an_encoder_take_no_lora_of_the_language_model(pool):
    layers = {
        name: type("QKVParallelLinearWithLoRA", (), {})()
        for name in (
            "vision_tower.vision_model.encoder.layers.0.self_attn.qkv_proj",
            "language_model.model.layers.0.self_attn.qkv_proj",
        )
    }
    tower, language = layers
    seen = []
    backend = SimpleNamespace(adopt=lambda _, modules: seen.extend(modules))
    of_plugin.adopt(SimpleNamespace(lora_modules=[layers], memory_pool=pool, lora_backend=backend))
    assert list(layers) == [language] and seen == [layers[language]]
