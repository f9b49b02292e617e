"""Embeddings and encoders get the adapters of their rows from vLLM's own code around them."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from helpers.servers.vllm_engines import SETTINGS  # noqa: F401  # before vLLM is imported
from helpers.servers.vllm_layers import (
    INDEX_TO_ID,
    RANK,
    SLICES,
    SLOTS,
    WIDTH,
    delta,
    make_module,
    mapping,
)

ITEMS = [  # of requests in turn: modality, adapter, rows
    ("image", 9, 4),
    ("video", 5, 6),
    ("image", 0, 2),
    ("image", 7, 4),
    ("video", 5, 8),
    ("video", 9, 6),
]


@pytest.fixture
def wrappers(monkeypatch):
    """Return the wrappers of a multimodal model: its language model, tower and connector."""
    monkeypatch.setenv("LORA_BACKENDS_VLLM", "torch_ref")
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

    from lora_backends.integrations.vllm.wrapper import BackendWrapper

    config = SimpleNamespace(max_loras=SLOTS)
    return {
        name: BackendWrapper(capacity, 16, "cpu", lora_config=config)
        for name, capacity in (("language", 64), ("tower", 8), ("connector", 8))
    }


@pytest.fixture
def manager(wrappers):
    """Return vLLM's own manager as far as it announces batches."""
    from vllm.lora.model_manager import LoRAModelManager

    made = object.__new__(LoRAModelManager)
    vars(made).update(
        lora_config=SimpleNamespace(max_loras=SLOTS),
        supports_mm=True,
        supports_tower_connector_lora=True,
        supported_modules_to_save=set(),
        mm_mapping=SimpleNamespace(
            language_model=["language"], tower_model=["tower"], connector=["connector"]
        ),
        punica_wrapper_mapping=wrappers,
        lora_index_to_id=INDEX_TO_ID,
        vocab_size=100,
        _classification_head=None,
        _last_mapping=None,
        _last_slot_layout=None,
    )
    return made


class Model:
    """A model whose tower has a row more than vLLM counts, and whose encoder embeds a separator."""

    _processor_factory = SimpleNamespace()

    def __init__(self, wrappers):
        self.wrappers = wrappers
        self.tower = make_module(wrappers["tower"])
        self.connector = make_module(wrappers["connector"])
        table = torch.ones(SLOTS * 2, RANK)  # of two tokens
        self.embedding = make_module(wrappers["language"], slices=(12,), lora_a_stacked_2d=table)

    def get_mm_mapping(self):
        return SimpleNamespace(connector=["connector"], tower_model=["tower"])

    def get_mm_lora_token_counts(self, *, modality, mm_kwargs, num_mm_embeds):
        return 1, 1

    def run(self, part, x):
        module = getattr(self, part)
        y = torch.zeros(len(x), sum(SLICES))
        stacks = module.lora_a_stacked, module.lora_b_stacked
        self.wrappers[part].add_lora_linear(y, x, *stacks, 1.0, SLICES)
        return y

    def embed_multimodal(self, pixels):
        from lora_backends.integrations.vllm import operation

        separator, ids = torch.ones(3, 12), torch.ones(3, dtype=torch.int64)
        operation.run(separator, ids, self.embedding.lora_b_stacked[0], operation.TOKENS)
        assert separator.eq(1).all(), "what an encoder embeds belongs to no row of the batch"
        images = [torch.cat([each.view(-1, WIDTH), each.view(-1, WIDTH)[:1]]) for each in pixels]
        counts = [len(each) for each in images]
        tower = self.run("tower", torch.cat(images)).split(counts)
        halves = [each[::2] for each in images]
        connector = self.run("connector", torch.cat(halves)).split([len(each) for each in halves])
        return [torch.cat(both) for both in zip(tower, connector, strict=True)]


def make_item(rows, seed):
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    data = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return MultiModalKwargsItem(pixels=MultiModalFieldElem(data, MultiModalBatchedField()))


def wanted(model, item, id_):
    """Return what the encoder adds to an item alone, by plain products."""
    x = item["pixels"].data
    x = torch.cat([x, x[:1]])
    tower = delta(model.tower, x, [id_] * len(x))
    return torch.cat([tower, delta(model.connector, x[::2], [id_] * len(x[::2]))])


def encode_with_the_first_runner(model, manager, features):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    requests = {str(i): SimpleNamespace(mm_features=[each]) for i, each in enumerate(features)}
    scheduled = SimpleNamespace(
        scheduled_encoder_inputs={name: [0] for name in requests},
        ec_manager_metadata=None,
        free_encoder_mm_hashes=[],
    )
    runner = object.__new__(GPUModelRunner)
    vars(runner).update(
        model=model,
        requests=requests,
        device=torch.device("cpu"),
        lora_config=True,
        lora_manager=SimpleNamespace(
            supports_tower_connector_lora=lambda: True,
            set_active_adapters=lambda requests, mapping: manager.set_adapter_mapping(mapping),
        ),
        input_batch=SimpleNamespace(
            req_id_to_index={name: i for i, name in enumerate(requests)},
            request_lora_mapping=[id_ for _, id_, _ in ITEMS],
            lora_id_to_lora_request={},
        ),
        observability_config=None,
        is_multimodal_pruning_enabled=False,
        requires_sequential_video_encoding=False,
        encoder_cudagraph_manager=None,
        encoder_cache={},
        maybe_save_ec_to_connector=lambda *_: None,
    )
    GPUModelRunner._execute_mm_encoder(runner, scheduled)
    return [runner.encoder_cache[each.identifier] for each in features]


def encode_with_the_second_runner(model, manager, features):
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

    names = [str(i) for i in range(len(features))]
    embedded = SimpleNamespace(data=torch.ones(2, 24))
    place = features[0].mm_position
    others = [  # which it announces and does not encode: a prompt that is embedded, a known item
        SimpleNamespace(
            modality="prompt_embeds",
            identifier="e",
            data={"embedding": embedded},
            mm_position=place,
        ),
        SimpleNamespace(modality="image", identifier="k", data=make_item(2, 9), mm_position=place),
    ]
    cache = SimpleNamespace(
        mm_features={n: [f, *others] for n, f in zip(names, features, strict=True)},
        encoder_outputs={"k": torch.ones(2, 24)},
    )
    scheduled = {name: [1, 2, 0] if name == "1" else [0] for name in names}
    model_runner.set_active_mm_loras(
        model=model,
        lora_manager=SimpleNamespace(
            supports_tower_connector_lora=lambda: True,
            set_active_adapters=lambda requests, mapping: manager.set_adapter_mapping(mapping),
        ),
        encoder_cache=cache,
        req_id_to_index={name: i for i, name in enumerate(names)},
        lora_state=SimpleNamespace(lora_ids=[id_ for _, id_, _ in ITEMS], lora_requests={}),
        scheduled_encoder_inputs=scheduled,
    )
    runner = object.__new__(EncoderRunner)
    device = torch.device("cpu")
    vars(runner).update(model=model, device=device, cudagraph_manager=None, encoder_cache=cache)
    hashes, items = runner.prepare_mm_inputs(scheduled)
    outputs = dict(zip(hashes, runner.execute_mm_encoder(items), strict=True))
    return [outputs[each.identifier] for each in features]


@pytest.mark.parametrize("encode", [encode_with_the_first_runner, encode_with_the_second_runner])
def test_items_of_an_encoder_have_their_requests_adapter(wrappers, manager, encode):
    """Of several modalities and shapes, so that vLLM runs the encoder several times."""
    from lora_backends.integrations.vllm import operation

    model = Model(wrappers)
    features = [
        SimpleNamespace(
            modality=modality,
            identifier=str(i),
            data=make_item(rows, i),
            mm_position=SimpleNamespace(get_num_embeds=lambda: 1),
        )
        for i, (modality, _, rows) in enumerate(ITEMS)
    ]
    manager.set_adapter_mapping(mapping([7, 0, 5, 9, 0, 7, 7, 5]))
    for _ in range(2):  # the second time vLLM has the same to announce
        found = encode(model, manager, features)
        for i, (_, id_, _) in enumerate(ITEMS):
            torch.testing.assert_close(found[i], wanted(model, features[i].data, id_))
    separator, ids = torch.ones(8, 12), torch.ones(8, dtype=torch.int64)
    operation.run(separator, ids, model.embedding.lora_b_stacked[0], operation.TOKENS)
    assert separator[0].ne(1).any() and separator[1].eq(1).all(), "and the batch has its own again"


WRAPPED = [
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_preprocess"),
    ("vllm.v1.worker.gpu_model_runner", "", "group_and_batch_mm_kwargs"),
    ("vllm.v1.worker.gpu.mm.encoder_runner", "", "group_and_batch_mm_kwargs"),
    ("vllm.v1.worker.gpu.model_runner", "", "set_active_mm_loras"),
    ("vllm.v1.worker.mm_encoder_model_runner", "", "set_active_mm_loras"),
    ("vllm.lora.model_manager", "LoRAModelManager", "set_adapter_mapping"),
    ("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer", "load_model"),
    ("vllm.v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator", "load_model"),
]


@pytest.mark.parametrize(("module", "owner", "name"), WRAPPED)
def test_a_vllm_without_what_is_wrapped_is_refused_by_name(
    wrappers, monkeypatch, module, owner, name
):
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm import inputs

    found = import_module(module)
    monkeypatch.delattr(getattr(found, owner) if owner else found, name)
    with pytest.raises(
        UnsupportedInputError, match=f"{module} without {owner}{owner and '.'}{name}"
    ):
        inputs.follow()


@pytest.mark.parametrize("module", ["encoder_runner", "llm_base_proposer", "speculator"])
def test_a_runner_without_a_module_of_its_own_is_refused_by_its_name(wrappers, monkeypatch, module):
    from lora_backends import UnsupportedInputError
    from lora_backends.integrations.vllm import inputs, methods

    (name,) = {name for name, *_ in WRAPPED if name.endswith(module)}

    def renamed(asked_for):
        if asked_for == name:
            raise ModuleNotFoundError(name)
        return import_module(asked_for)

    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(methods, "import_module", renamed)
    with pytest.raises(UnsupportedInputError, match=f"given: {name} without"):
        inputs.follow()


def test_the_same_items_are_announced_again_without_a_connector(wrappers, manager):
    from vllm.lora.layers.utils import LoRAMapping, LoRAMappingType
    from vllm.v1.worker.gpu_model_runner import group_and_batch_mm_kwargs

    model = Model(wrappers)
    items = [("image", make_item(2, 0)), ("image", make_item(2, 1))]
    for _ in range(2):
        manager.set_adapter_mapping(LoRAMapping((9, 5), (9, 5), type=LoRAMappingType.TOWER))
        found = [
            model.run("tower", each["pixels"][0]) for *_, each in group_and_batch_mm_kwargs(items)
        ]
        for y, (_, item), id_ in zip(found, items, (9, 5), strict=True):
            torch.testing.assert_close(y, wanted(model, item, id_)[: len(y)])


def test_a_manager_that_notes_its_last_batch_elsewhere_is_refused_by_name(wrappers, manager):
    from vllm.lora.layers.utils import LoRAMapping, LoRAMappingType

    from lora_backends import UnsupportedInputError

    del manager._last_mapping
    with pytest.raises(UnsupportedInputError, match="without LoRAModelManager._last_mapping"):
        manager.set_adapter_mapping(LoRAMapping((9,), (9,), type=LoRAMappingType.TOWER))


def test_other_items_than_announced_are_refused(wrappers, manager):
    from vllm.lora.layers.utils import LoRAMapping, LoRAMappingType
    from vllm.v1.worker.gpu_model_runner import group_and_batch_mm_kwargs

    from lora_backends import InvalidInputError

    items = [("image", make_item(2, 0))] * 3
    for ids in ((9, 5), (9, 9)):
        manager.set_adapter_mapping(LoRAMapping(ids, ids, type=LoRAMappingType.TOWER))
        if ids == (9, 9):
            assert sum(count for _, count, _ in group_and_batch_mm_kwargs(items)) == 3
            continue
        with pytest.raises(InvalidInputError, match="given: 3 items\n  allowed: 2 items"):
            list(group_and_batch_mm_kwargs(items))


def test_a_drafter_that_shares_the_embedding_gets_it_without_lora(monkeypatch):
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA

    from lora_backends.integrations.vllm import inputs

    shared = VocabParallelEmbeddingWithLoRA(torch.nn.Embedding(5, 4))

    class Drafter:
        def load_model(self, target):
            self.model = torch.nn.Module()
            self.model.model = torch.nn.Module()
            self.model.model.embed_tokens = self.model.lm_head = target

    for place, owner in (
        ("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer"),
        ("vllm.v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator"),
    ):
        kind = type(owner, (Drafter,), {})
        monkeypatch.setitem(sys.modules, place, SimpleNamespace(**{owner: kind}))
        inputs.follow()
        drafter = kind()
        drafter.load_model(shared)
        assert drafter.model.model.embed_tokens is drafter.model.lm_head is shared.base_layer
