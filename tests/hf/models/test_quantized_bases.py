"""Quantised base models: rows are those of PEFT, or refused by name."""

import copy
from pathlib import Path

import peft
import pytest
import torch
from helpers.sweeps import sweep, sweep_bases
from helpers.sweeps.architectures import build
from torch import nn

from lora_backends import UnsupportedInputError
from lora_backends.bench.results import read_result
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.layout.quantized_base import packed_size
from lora_backends.hf.layout.sites import base_layer, find_sites, vocabulary_of

IDS = torch.randint(4, 58, (4, 6), generator=torch.Generator().manual_seed(1))
RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "peft_sweep.json"
EXPECTED = {row["name"]: row for row in read_result(RESULT)["rows"]}


def check(name, found):
    if isinstance(found, float):
        assert found <= sweep.BOUND and "worst" in EXPECTED[name]
    else:
        assert found == EXPECTED[name]["refused"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sweep_bases.BASES)
def test_rows_of_a_quantised_base_are_as_the_result_file_says(name):
    if sweep_bases.package_of(name) is None:
        pytest.skip(f"needs {sweep_bases.BASES[name]['package']}")
    check(name, sweep_bases.run(name))


@pytest.mark.parametrize("name", sweep_bases.LAYERS)
def test_rows_of_a_packages_layers_are_as_the_result_file_says(name):
    check(name, sweep_bases.run_layer(name))


@pytest.mark.filterwarnings("ignore")
def test_a_row_of_llm_int8_depends_on_the_others_where_they_have_outliers():
    """Why the sweep compares this base with PEFT's own mixed batch."""
    pytest.importorskip("bitsandbytes")
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    x[1, 3] = 8.0  # over the threshold of 6: column 3 is multiplied in 16 bits, in all rows
    differences = []
    for threshold in (6.0, 0.0):
        layer = sweep_bases._int8(threshold).model.layers[0].self_attn.q_proj
        with torch.no_grad():
            differences.append((layer(x)[0] - layer(x[:1])[0]).abs().max().item())
    assert differences[0] > 1e-3 and differences[1] <= sweep.BOUND


def adapter(targets, seed=1, **settings):
    """Return a random adapter as a PeftModel of the plain model."""
    config = peft.LoraConfig(r=3, target_modules=targets, **settings)
    model = peft.get_peft_model(sweep_bases.plain(), config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model, rows=("a", None, "b", "a")):
    return model(adapters=rows, input_ids=IDS).logits


def wrapped(base, **options):
    model = MultiLoRAModel(base, "torch_ref", max_adapters=2, max_rank=4, **options)
    for seed, name in enumerate("ab"):
        model.add_adapter(name, adapter(["q_proj", "k_proj", "v_proj", "up_proj"], seed))
    return model


EQUAL = [name for name in sweep_bases.LAYERS if "worst" in EXPECTED.get(name, ())]


@pytest.mark.parametrize("options", [{"fuse": True}, {"adapter_dtype": "int8"}])
@pytest.mark.parametrize("name", EQUAL)
def test_layers_of_bits_are_never_joined_and_take_adapters_of_8_bits(name, options):
    base = sweep_bases.LAYERS[name][0]()
    model, same = wrapped(base, **options), wrapped(sweep_bases.unpacked(base), **options)
    torch.testing.assert_close(logits(model), logits(same), rtol=0, atol=sweep.BOUND)
    if "fuse" in options:
        assert same._wrapped.hooked.groups and not model._wrapped.hooked.groups


@pytest.mark.parametrize("name", EQUAL)
def test_prepared_adapters_and_a_detached_base_are_those_of_a_plain_model(name):
    base = sweep_bases.LAYERS[name][0]()
    with torch.no_grad():
        before = base(input_ids=IDS).logits
    model = wrapped(base)
    step = model.prepare([None, "a", "b", "b"], tokens=6)
    assert torch.equal(logits(model, step), logits(model, [None, "a", "b", "b"]))
    with torch.no_grad():
        assert torch.equal(model.detach()(input_ids=IDS).logits, before)


PLACES = {"fp8": sweep_bases._fp8, "packed": sweep_bases.LAYERS["GPTQ, AWQ, AQLM, VPTQ"][0]}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (sweep_bases.SAVED, "weight of its own for .*up_proj, which is quantized"),
        (sweep_bases.PISSA, "pissa.* whose base weight is quantized"),
    ],
)
def test_adapters_that_need_the_plain_weight_are_refused_by_name(make, config, message, tmp_path):
    sweep.adapt(sweep_bases.plain(), str(tmp_path), 1, **config)
    model = MultiLoRAModel(make(), "torch_ref")
    with pytest.raises(UnsupportedInputError, match=message):
        model.load_adapter("a", tmp_path)
    assert model.adapters == []


class EightBitEmbedding(nn.Embedding):
    """Transformers' FP8Embedding: the values lack a scale."""

    def forward(self, ids):
        return super().forward(ids).float() * 2


def test_rows_of_a_quantised_embedding_are_not_replaced(tmp_path):
    base = sweep_bases.plain()
    embedding = EightBitEmbedding(64, 64)
    embedding.weight = nn.Parameter((base.model.embed_tokens.weight / 2).to(torch.float8_e4m3fn))
    embedding.weight.requires_grad = False
    config = {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}
    sweep.adapt(base, str(tmp_path), 1, **config)
    base.set_input_embeddings(embedding.eval())
    model = wrapped(base)
    assert logits(model).dtype == torch.float32
    with pytest.raises(UnsupportedInputError, match="embed_tokens, which is quantized"):
        model.load_adapter("c", tmp_path)


def test_a_quantised_linear_layer_beside_experts_is_no_router():
    base = build("qwen2_moe")
    for layer in base.model.layers:
        layer.mlp.shared_expert_gate = sweep_bases.Derived(layer.mlp.shared_expert_gate).eval()
    same = copy.deepcopy(base)
    for layer in same.model.layers:
        gate = nn.Linear(16, 1, bias=False).eval()
        gate.weight.data = layer.mlp.shared_expert_gate(torch.eye(16)).detach().T.contiguous()
        layer.mlp.shared_expert_gate = gate
    config = peft.LoraConfig(r=3, target_modules=["shared_expert_gate"])
    truth = peft.get_peft_model(same, config).eval()
    for name, parameter in truth.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    model = MultiLoRAModel(base, "torch_ref")
    model.add_adapter("a", truth)
    with torch.no_grad():
        expected = truth(input_ids=IDS).logits
    torch.testing.assert_close(logits(model, ["a"] * 4), expected, rtol=0, atol=sweep.BOUND)


class Params4bit(nn.Parameter):
    """bitsandbytes' parameter; `bnb_4bit_quant_storage` chooses the dtype that its bits lie in."""

    quant_state = None


def test_bits_in_a_float_dtype_are_no_values(tmp_path):
    base = sweep_bases.plain().to(torch.bfloat16)
    projection = base.model.layers[0].self_attn.q_proj
    projection.weight = Params4bit(torch.zeros(1024, 1), requires_grad=False)
    sites = find_sites(base, torch.bfloat16, torch.device("cpu"))
    site = sites["model.layers.0.self_attn.q_proj"]
    assert site.refusal is None  # its dtype is that of the storage
    with pytest.raises(UnsupportedInputError, match="DoRA.*its base weight is quantized"):
        base_layer(sites, site.path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_bits_of_bitsandbytes_in_a_float_dtype_are_those_in_bytes(storage, tmp_path):
    pytest.importorskip("bitsandbytes")
    model, same = (
        MultiLoRAModel(sweep_bases._nf4(rows_as_on_a_gpu=True, **settings), "torch_ref")
        for settings in ({"bnb_4bit_quant_storage": storage}, {})
    )
    for each in (model, same):
        each.add_adapter("a", adapter(["q_proj", "up_proj"], use_dora=True))
    assert torch.equal(logits(model, ["a"] * 4), logits(same, ["a"] * 4))
    for config in (sweep_bases.SAVED, sweep_bases.PISSA):
        sweep.adapt(sweep_bases.plain(), str(tmp_path), 1, **config)
        with pytest.raises(UnsupportedInputError, match="is quantized"):
            model.load_adapter("b", tmp_path)


def test_bits_of_hqq_in_a_float_dtype_are_those_in_bytes():
    pytest.importorskip("hqq")
    model, same = (
        MultiLoRAModel(sweep_bases._hqq(4, view_as_float=as_float), "torch_ref")
        for as_float in (True, False)
    )
    for each in (model, same):
        each.add_adapter("a", adapter(["q_proj", "up_proj"], use_dora=True))
    assert torch.equal(logits(model, ["a"] * 4), logits(same, ["a"] * 4))


class FloatBits(nn.Module):
    """hqq's layer, whose bits lie in a float dtype."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 8, 4
        self.W_q = nn.Parameter(torch.zeros(8, 1), requires_grad=False)


def test_a_layer_of_hqq_is_known_by_its_bits_in_any_dtype():
    assert packed_size(FloatBits()) == (8, 4)


class Projector(nn.Module):
    """A block of a model with the sizes of a linear layer."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 8, 4
        self.inner = nn.Linear(8, 4)


class Stacked(nn.Module):
    """A product for each of several inputs, with the sizes of a linear layer."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 8, 4
        self.weight = nn.Parameter(torch.zeros(3, 4, 8))
        self.register_buffer("places", torch.arange(3))


@pytest.mark.parametrize("make", [Projector, Stacked, lambda: nn.Bilinear(8, 8, 4)])
def test_a_module_with_sizes_but_without_bits_is_no_linear_layer(make):
    assert packed_size(make()) is None


class BufferEmbedding(nn.Module):
    """A packed token embedding without parameters."""

    def __init__(self, embedding):
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        bits, scales = sweep_bases._bits(embedding)
        self.register_buffer("bits", bits)
        self.register_buffer("scales", scales)

    def forward(self, ids):
        return self.bits[ids] * self.scales[ids]


class FlatEmbedding(nn.Embedding):
    """bitsandbytes' Embedding4bit: the shape of its weight is that of the bits."""

    def __init__(self, embedding):
        super().__init__(*embedding.weight.shape)
        bits, self.scales = sweep_bases._bits(embedding)
        self.weight = nn.Parameter(bits.view(-1, 1), requires_grad=False)

    def forward(self, ids):
        return self.weight.view(self.num_embeddings, -1)[ids] * self.scales[ids]


@pytest.mark.parametrize("make", [BufferEmbedding, FlatEmbedding])
def test_a_packed_embedding_tells_its_tokens(make):
    base, same = sweep_bases.plain(), sweep_bases.plain()
    packed = make(base.get_input_embeddings()).eval()
    base.set_input_embeddings(packed)
    same.get_input_embeddings().weight.data = packed(torch.arange(64)).detach()
    assert vocabulary_of(base) == vocabulary_of(same) == 64
    torch.testing.assert_close(
        logits(wrapped(base)), logits(wrapped(same)), rtol=0, atol=sweep.BOUND
    )


class QuantizedEmbedding(nn.Embedding):
    """An embedding whose values are read as hqq's are."""

    W_q = None

    def dequantize(self):
        return self.weight * torch.full((64, 1), 0.5)


def test_dora_reads_a_quantised_embedding_as_it_reads_a_plain_one():
    base = sweep_bases.plain()
    embedding = QuantizedEmbedding(64, 64)
    embedding.weight = nn.Parameter(torch.arange(64 * 64).view(64, 64), requires_grad=False)
    base.set_input_embeddings(embedding)
    sites = find_sites(base, torch.float32, torch.device("cpu"))
    found = base_layer(sites, "model.embed_tokens").weight
    assert torch.equal(found, embedding.dequantize().T)


def test_weights_that_a_cpu_has_packed_anew_refuse_dora():
    pytest.importorskip("bitsandbytes")
    base = sweep_bases._nf4(rows_as_on_a_gpu=True)
    model = MultiLoRAModel(base, "torch_ref")
    base.model.layers[0].self_attn.q_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnsupportedInputError, match="q_proj: its base weight is quantized"):
        model.add_adapter("a", adapter(["q_proj"], use_dora=True))


def test_a_model_that_is_yet_to_be_decompressed_is_refused():
    base = sweep_bases.plain()
    base.ct_decompress_hook = base.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(UnsupportedInputError, match="compressed-tensors.* until its first"):
        MultiLoRAModel(base, "torch_ref")
