"""Loading of an adapter's tensors up to the slot, without an engine."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers.servers.vllm_engines import SETTINGS  # noqa: F401  # before vLLM is imported
from helpers.servers.vllm_layers import SLOTS, make_module

EXPERTS, RANK, HIDDEN, INNER = 4, 2, 6, 10
MLP = "model.layers.0.mlp"


def make_manager(*names, packed=None, model=None):
    """Return the parts of vLLM's manager that loading reads, with a layer for each name."""
    layer = SimpleNamespace(
        _apply_lora_to_output=None,
        punica_wrapper=SimpleNamespace(was_run=True),
        lora_backends_layers=[SimpleNamespace(is_called=True)],
        base_layer=SimpleNamespace(),
    )
    return SimpleNamespace(
        model=torch.nn.Module() if model is None else model,
        modules={name: SimpleNamespace(**vars(layer)) for name in names},
        packed_modules=packed or {},
        is_pooling_model=False,
    )


def make_worker(manager, max_rank=8):
    from vllm.lora.lora_model import LoRAModel

    return SimpleNamespace(
        _adapter_manager=manager,
        _lora_model_cls=LoRAModel,
        lora_config=SimpleNamespace(lora_dtype=torch.float32, max_lora_rank=max_rank),
        max_position_embeddings=64,
        vocab_size=32,
    )


def pair(path, rank, wide, high, seed=0):
    """Return the matrices of a module by PEFT's keys."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.{path}.lora_A.weight": torch.randn(rank, wide, generator=generator),
        f"base_model.model.{path}.lora_B.weight": torch.randn(high, rank, generator=generator),
    }


def config(**values):
    return {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "peft_version": "0.19.0",
        **values,
    }


def test_stacked_experts_are_vllms_or_refused_by_name():
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm.adapters.load import load

    worker = make_worker(make_manager(f"{MLP}.experts"))
    tensors = {
        **pair(f"{MLP}.experts.base_layer", RANK * EXPERTS, HIDDEN, 2 * INNER, 1),
        **pair(f"{MLP}.experts", RANK * EXPERTS, INNER, HIDDEN, 2),
    }
    plain = config(target_modules=[], target_parameters=["gate_up_proj", "down_proj"])
    assert len(load(plain, tensors, worker, 1).loras) == 2
    with pytest.raises(UnsupportedInputError, match="stacked experts"):
        load({**plain, "alora_invocation_tokens": [3]}, tensors, worker, 1)


def test_the_tensors_of_the_caller_stay_as_they_are():
    from lora_backends.integrations.vllm.adapters.load import load

    manager = make_manager("model.layers.0.self_attn.q_proj")
    tensors = pair("model.layers.0.self_attn.q_proj", RANK, HIDDEN, HIDDEN)
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    for more in ({}, {"alora_invocation_tokens": [3]}):
        lora = load(config(**more), tensors, make_worker(manager), 1)
        for layer in lora.loras.values():
            layer.optimize()
            layer.lora_a.zero_()
        assert all(torch.equal(tensors[key], before[key]) for key in before)


@pytest.mark.parametrize("more", [{}, {"alora_invocation_tokens": [3]}])
def test_modules_that_the_model_reads_past_are_refused_by_name(more):
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm.adapters.load import load

    class MLAAttention(torch.nn.Module):
        """As vLLM's, by name."""

    model = torch.nn.Module()
    attention = "model.layers.0.self_attn.kv_b_proj"
    manager = make_manager(attention, f"{MLP}.gate", f"{MLP}.shared_expert_gate", model=model)
    worker = make_worker(manager)

    def loaded(path):
        targets = config(target_modules=[path.rpartition(".")[2]], **more)
        return load(targets, pair(path, RANK, HIDDEN, HIDDEN), worker, 1)

    for path in manager.modules:
        assert loaded(path).loras.keys() == {path}
    model.attention = MLAAttention()
    for name in ("gate", "shared_expert_gate"):
        manager.modules[f"{MLP}.{name}"].lora_backends_layers[0].is_called = False
    for path in (*manager.modules, f"{MLP}.another"):
        with pytest.raises(UnsupportedInputError, match=f"would ignore(.|\n)*{path}"):
            loaded(path)


def test_a_start_that_is_taken_off_a_tied_weight_is_refused():
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm.adapters.load import load

    model = torch.nn.Module()
    model.config = SimpleNamespace(tie_word_embeddings=True)
    manager = make_manager("lm_head", model=model)
    head = manager.modules["lm_head"]
    head.sharded_to_full_mapping, head.hidden_size = None, HIDDEN
    head.base_layer.org_vocab_size = INNER
    values = config(target_modules=["lm_head"], init_lora_weights="olora")
    with pytest.raises(UnsupportedInputError, match="'olora' of a tied head"):
        load(values, pair("lm_head", RANK, HIDDEN, INNER), make_worker(manager), 1)


def test_modules_of_another_pipeline_stage_are_left_to_it():
    from lora_backends.integrations.vllm.adapters.load import load

    class PPMissingLayer(torch.nn.Module):
        """As vLLM's, by name."""

    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([torch.nn.Identity(), PPMissingLayer()])
    here, there = (f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))
    worker = make_worker(make_manager(here, model=model))
    tensors = {**pair(here, RANK, HIDDEN, HIDDEN), **pair(there, RANK, HIDDEN, HIDDEN)}
    assert here in load(config(), tensors, worker, 1).loras
    dora = load(config(alora_invocation_tokens=[3]), tensors, worker, 1)
    assert dora.loras.keys() == {here}


def test_experts_of_a_blend_are_joined_rank_by_rank():
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights

    from lora_backends.integrations.vllm.adapters.blends import Term, added

    def packed(seed, rank):
        generator = torch.Generator().manual_seed(seed)
        a = [torch.randn(EXPERTS, rank, HIDDEN, generator=generator) for _ in range(3)]
        b = [torch.randn(EXPERTS, INNER, rank, generator=generator) for _ in range(3)]
        layer = PackedLoRALayerWeights("experts", rank, [1] * 3, a, b, scaling=[1] * 3)
        return LoRAModel(1, rank, {"experts": layer})

    parts = [(Term("one", 0.5), packed(1, 2)), (Term("two", -2.0), packed(2, 3))]
    joined = added(parts, 7, 8).loras["experts"]
    for i in range(3):
        wanted = sum(
            term.factor * lora.loras["experts"].lora_b[i] @ lora.loras["experts"].lora_a[i]
            for term, lora in parts
        )
        torch.testing.assert_close(joined.lora_b[i] @ joined.lora_a[i], wanted)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("alice*0.5", [("alice", 0.5)]),
        ("alice*0.5+bob*-.25", [("alice", 0.5), ("bob", -0.25)]),
        ("a+b*1e-2+c*d*3", [("a+b", 0.01), ("c*d", 3.0)]),
        ("alice", None),
        ("alice*", None),
        ("alice*0.5+", None),
        ("alice*0.5+bob", None),
        ("*0.5", None),
        ("", None),
    ],
)
def test_names_of_blends(text, terms):
    from lora_backends.integrations.vllm.adapters.blends import parse

    found = parse(text)
    assert (found and [(term.name, term.factor) for term in found]) == terms


def test_a_blend_that_can_be_read_in_two_ways_is_refused():
    from lora_backends import InvalidInputError
    from lora_backends.integrations.vllm.adapters.blends import check_names

    known = ["a", "b", "a*2", "a*2+b", "c+d"]
    for text in ("a*2+b*0.5", "c+d*1+a*2+b*1"):
        with pytest.raises(InvalidInputError, match="two ways"):
            check_names(f"blend:{text}", known)
    for text in ("a*2+b*0.5", "a*2*0.5", "c+d*1"):
        check_names(f"blend:{text}", ["a", "b", "a*2", "c+d"])


def test_a_blend_cannot_have_the_name_of_a_part():
    from vllm.lora.request import LoRARequest

    from lora_backends import InvalidInputError
    from lora_backends.integrations.vllm.adapters.blends import check_parts

    with pytest.raises(InvalidInputError, match="name of one of its parts"):
        check_parts(LoRARequest("a", 1, "blend:a*2"), {"a": None})
    check_parts(LoRARequest("a*2", 1, "blend:a*2"), {"a": None})


def test_a_part_is_loaded_again_as_it_was_asked_for(monkeypatch):
    from vllm.lora.request import LoRARequest

    from lora_backends.integrations.vllm.adapters import follow

    asked = LoRARequest("part", 1, "/folder", is_3d_lora_weight=True)
    manager = SimpleNamespace(get_adapter=lambda _: None, _create_merged_loras_inplace=lambda _: 0)
    worker = type("Worker", (), {"_load_adapter": lambda *_: None})()
    worker._load_adapter.__func__.__wrapped__ = None
    worker._adapter_manager, worker.lora_backends_requests = manager, {"part": asked}
    worker.lora_config = SimpleNamespace(max_lora_rank=8)
    seen = []

    def read(_, __, request):
        seen.append(request)
        return SimpleNamespace(loras={})

    monkeypatch.setattr(follow, "_read", read)
    follow._load_adapter(None, worker, LoRARequest("part*2", 2, "blend:part*2"))
    assert [request.is_3d_lora_weight for request in seen] == [True]


def test_an_invocation_in_a_pooling_model_is_refused():
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm.adapters.load import load

    path = "model.layers.0.self_attn.q_proj"
    manager, tensors = make_manager(path), pair(path, RANK, HIDDEN, HIDDEN)
    manager.is_pooling_model = True
    with pytest.raises(UnsupportedInputError, match="pooling model"):
        load(config(alora_invocation_tokens=[3]), tensors, make_worker(manager), 1)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_a_head_is_tied_if_the_model_or_its_text_part_says_so(own, text):
    from lora_backends.integrations.vllm.adapters.load import _Loading

    model = torch.nn.Module()
    part = SimpleNamespace(tie_word_embeddings=text)
    model.config = SimpleNamespace(tie_word_embeddings=own, get_text_config=lambda: part)
    loading = _Loading(make_worker(make_manager(model=model)), None, None)
    assert loading._is_tied is (own or text)


@pytest.fixture
def wrapper(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_VLLM", "torch_ref")
    from lora_backends.integrations.vllm.wrapper import BackendWrapper

    return lambda: BackendWrapper(64, 16, "cpu", lora_config=SimpleNamespace(max_loras=SLOTS))


def test_dora_needs_room_in_captured_graphs(wrapper, monkeypatch):
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm.adapters.load import Factors
    from lora_backends.integrations.vllm.layers import set_factors

    made = wrapper()
    monkeypatch.setattr(type(made), "captures_graphs", True)
    module = make_module(made)
    width = module.lora_b_stacked[0].shape[2]
    factors = Factors(torch.full((width,), 2.0), torch.ones(width))
    with pytest.raises(UnsupportedInputError, match="LORA_BACKENDS_VLLM_FACTORS=1"):
        set_factors(module, 1, 0, factors)
    monkeypatch.setenv("LORA_BACKENDS_VLLM_FACTORS", "1")
    module = make_module(wrapper())
    b = module.lora_backends_layers[0].weights
    assert b.output_scales.eq(1).all() and b.bias.eq(0).all()
    set_factors(module, 1, 0, factors)
    assert module.lora_backends_layers[0].weights is b, "graphs read the tensors of the start"
    assert b.output_scales[1, :width].eq(2).all() and b.output_scales[1, width:].eq(1).all()
    assert b.bias[1, :width].eq(1).all() and b.bias[0].eq(0).all()
    module.reset_lora(1)
    assert b.output_scales.eq(1).all() and b.bias.eq(0).all()


def announced(manager, mapping):
    """Return the adapters that are announced for a mapping, by token and by sampled row."""
    from lora_backends.integrations.vllm.adapters import invocations

    seen = []
    invocations._from_invocation(lambda _, given: seen.append(given), manager, mapping)
    return list(seen[0].index_mapping), list(seen[0].prompt_mapping)


def test_the_second_runner_tells_where_each_request_is():
    from vllm.lora.layers import LoRAMapping

    from lora_backends.integrations.vllm.adapters import invocations
    from lora_backends.integrations.vllm.adapters.load import Extras

    lora = SimpleNamespace(lora_backends_extras=Extras(invocation=(7, 8)))
    registered = {1: lora, 2: SimpleNamespace()}
    manager = SimpleNamespace(_registered_adapters=SimpleNamespace(cache=registered))
    invocations.note_activated(manager, lora.lora_backends_extras)
    prompts = {"a": [1, 7, 8, 2, 7, 8], "b": [7, 8, 1], "c": [1, 2, 3, 4], "d": [7, 8]}
    runner = SimpleNamespace(req_states=SimpleNamespace(req_id_to_index=dict.fromkeys(prompts, 0)))
    new = [
        SimpleNamespace(
            req_id=name, prompt_token_ids=prompt, lora_request=None if name == "d" else 1
        )
        for name, prompt in prompts.items()
    ]
    scheduled = SimpleNamespace(scheduled_new_reqs=new)
    invocations._note_prompts(lambda *_: None, runner, scheduled)
    # a: its last four prompt tokens; b: a generated one; c: no invocation; d: another adapter
    counts, firsts, ids = [4, 1, 2, 2], [2, 5, 0, 0], [1, 1, 1, 2]
    batch = SimpleNamespace(
        req_ids=list("abcd"), num_computed_tokens_np=firsts, num_scheduled_tokens=counts
    )
    tokens = [id_ for id_, count in zip(ids, counts, strict=True) for _ in range(count)]
    mapping = LoRAMapping(tuple(tokens), tuple(ids), is_prefill=True)
    invocations._second_runner(lambda *_: batch, runner)
    assert announced(manager, mapping) == ([0, 0, 1, 1, 1, 0, 0, 2, 2], [1, 1, 0, 2])
    invocations._done(lambda *_: None, runner)
    assert announced(manager, mapping) == (tokens, ids), "a dummy batch has no requests"
    # The next step has another request with the id of an old one: its own invocation counts.
    again = SimpleNamespace(req_id="a", prompt_token_ids=[7, 8, 3, 3], lora_request=1)
    invocations._note_prompts(lambda *_: None, runner, SimpleNamespace(scheduled_new_reqs=[again]))
    batch.req_ids, batch.num_computed_tokens_np, batch.num_scheduled_tokens = ["a"], [0], [4]
    invocations._second_runner(lambda *_: batch, runner)
    one = LoRAMapping((1,) * 4, (1,), is_prefill=True)
    assert announced(manager, one) == ([1, 1, 1, 1], [1])
    invocations._done(lambda *_: None, runner)
    runner.req_states.req_id_to_index.clear()
    base = SimpleNamespace(req_id="e", prompt_token_ids=[1], lora_request=None)
    invocations._note_prompts(lambda *_: None, runner, SimpleNamespace(scheduled_new_reqs=[base]))
    assert not runner.lora_backends_prompts


def test_new_adapters_load_in_one_order_on_every_process():
    from lora_backends.integrations.vllm.adapters.follow import _in_order

    requests = [SimpleNamespace(lora_int_id=i) for i in (3, 1, 2)]
    seen = []
    worker = SimpleNamespace()
    _in_order(lambda _, given, __: seen.extend(given), worker, [*requests, None], None)
    assert [request.lora_int_id for request in seen] == [1, 2, 3]


def test_blocks_that_start_to_be_the_adapters_in_other_places_have_other_keys(tmp_path):
    from vllm.lora.request import LoRARequest
    from vllm.v1.core import kv_cache_utils

    from lora_backends.integrations.vllm.adapters import invocations

    invocations.follow_hashes()
    (tmp_path / "adapter_config.json").write_text('{"alora_invocation_tokens": [7, 8]}')
    adapter = LoRARequest("alora", 1, str(tmp_path))

    def keys(prompt, first, lora=adapter):
        request = SimpleNamespace(
            lora_request=lora, prompt_token_ids=prompt, mm_features=[], cache_salt="salt"
        )
        request.prompt_embeds = None
        return kv_cache_utils.generate_block_hash_extra_keys(request, first, first + 4, 0)[0]

    base = keys([1] * 12, 0, None), keys([1] * 12, 4, None)
    assert keys([1, 2, 3, 4, 5, 7, 8, 9], 0) == base[0]
    behind = keys([1, 2, 3, 4, 5, 7, 8, 9], 4)
    assert behind != base[1] and keys([1, 2, 3, 4, 5, 7, 8, 9, 9], 4) == behind
    # the tokens behind the first prompt are generated: equal tokens, which begin elsewhere
    assert keys([7, 8], 0) != keys([7, 8, 7, 8], 0)
    assert keys([1, 2, 3], 0) == base[0], "without an invocation it is the base model"


def test_an_invocation_follows_the_file_that_a_trainer_writes_anew(tmp_path):
    from lora_backends.integrations.vllm.adapters.invocations import invocation_at

    assert invocation_at(str(tmp_path)) == (), "nothing is there yet"
    for tokens in ([7, 8], [7, 8, 9]):
        config = json.dumps({"alora_invocation_tokens": tokens})
        (tmp_path / "adapter_config.json").write_text(config)
        assert invocation_at(str(tmp_path)) == tuple(tokens)
