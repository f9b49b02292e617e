"""Quantised base models, in a mixed batch, against PEFT.

`BASES` are quantised by the packages themselves. `LAYERS` are layers with what the library sees of
a package that does not run here: the class it derives from, sizes, and where the bits lie. PEFT
runs those as plain layers of the same values.
"""

import contextlib
import functools
import importlib.util
import io
import re
import tempfile
import warnings
from importlib.metadata import version

import torch
import transformers
from torch import nn
from torch.nn import functional

from helpers.sweeps.sweep import LENGTH, ROWS, adapt, compare
from lora_backends import LoRABackendError
from lora_backends.hf import MultiLoRAModel

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,  # packages divide rows into blocks of 32 or 64
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], None),
}
ALL = {
    "target_modules": """q_proj k_proj v_proj o_proj gate_proj up_proj down_proj""".split(),
}
DORA = {**ALL, "use_dora": True}
LAST = {"target_modules": ["down_proj"], "layers_to_transform": [1], "use_dora": True}
"""DoRA after the last product that rounds its input.

Two ways to compute DoRA differ in the last bits; where such a product follows, one of them may move
a step of its rounding, 1/127 of the largest input of a token.
"""

PISSA = {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}
SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["up_proj"]}
OF_PLAIN = (PISSA, SAVED, {"target_modules": ["q_proj"]})
"""Adapters that PEFT makes on plain weights alone."""


class Fresh:
    """A base that is made anew where others are copied: some packages' tensors have no copies."""

    def __init__(self, make):
        self._make = make

    def __deepcopy__(self, memo):
        return self._make()


def plain():
    """Return a small random model whose inputs have outliers, which LLM.int8 treats apart."""
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        else:
            parameter.data *= 5
    return model


def inputs():
    """Return the inputs of all bases."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 58, (len(ROWS), LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@functools.cache
def _folder():
    folder = tempfile.TemporaryDirectory()
    with contextlib.redirect_stderr(io.StringIO()):
        plain().save_pretrained(folder.name)
    return folder


def _loaded(config, folder=None):
    """Return the plain model as Transformers loads it with a quantisation."""
    name = (folder or _folder()).name
    settings = {"dtype": torch.float32, "device_map": "cpu"}
    if config is not None:  # else a checkpoint says it
        settings["quantization_config"] = config
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(name, **settings)
    return model.eval()


def _replaced(layer):
    """Return the plain model with other layers in the place of the linear ones in its blocks."""
    model = plain()
    for path, module in [*model.model.named_modules()]:
        if type(module) is nn.Linear:
            model.model.set_submodule(path, layer(module))
    return model.eval()


def _bitsandbytes(rows_as_on_a_gpu=False, **settings):
    config = transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **settings)
    model = _loaded(config)
    for module in model.modules():
        if rows_as_on_a_gpu and hasattr(module, "support_avx512bf16_for_cpu"):
            # Else a first pass lays the bits out anew, and PEFT's norm is that of other values.
            module.support_avx512bf16_for_cpu = False
    return model


def _nf4(**settings):
    return _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", **settings)


def _int8(threshold=0.0):
    return _bitsandbytes(load_in_8bit=True, llm_int8_threshold=threshold)


def _torchao(kind, **settings):
    import torchao.quantization as torchao

    if "group" in settings:
        granularity = torchao.PerGroup(settings.pop("group"))
        settings = {"weight_dtype": torch.int4, "granularity": granularity}
    return _loaded(transformers.TorchAoConfig(getattr(torchao, f"{kind}Config")(**settings)))


def _quanto(weights):
    return _loaded(transformers.QuantoConfig(weights=weights))


def _hqq(bits, **settings):
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=bits, group_size=64, **settings)
    return _replaced(
        lambda linear: HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
    )


@functools.cache
def _compressed_folder(inputs):
    """Save the plain model as compressed-tensors does: 4 bits, or 8 bits with rounded inputs."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    bits = {"num_bits": 8, "strategy": "channel"}
    if not inputs:
        bits = {"num_bits": 4, "strategy": "group", "group_size": 32}
    scheme = {"targets": ["Linear"], "weights": bits}
    if inputs:
        scheme["input_activations"] = {"num_bits": 8, "strategy": "token", "dynamic": True}
    config = QuantizationConfig(
        config_groups={"all": scheme},
        ignore=["lm_head"],
        format="int-quantized" if inputs else "pack-quantized",
        quantization_status="compressed",
    )
    model, folder = plain(), tempfile.TemporaryDirectory()
    with contextlib.redirect_stderr(io.StringIO()):
        apply_quantization_config(model, config)
        for module in model.model.modules():
            if isinstance(module, nn.Linear):
                blocks = module.weight.data.reshape(*module.weight_scale.shape, -1)
                module.weight_scale.data = blocks.abs().amax(-1) / (2 ** (bits["num_bits"] - 1) - 1)
        compressor = ModelCompressor(quantization_config=config)
        compressor.compress_model(model)
        model.save_pretrained(folder.name)
        compressor.update_config(folder.name)
    return folder


def _compressed(inputs_too=False, passes=1):
    model = _loaded(None, _compressed_folder(inputs_too))
    with contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
        for _ in range(passes):  # the first decompresses; before it PEFT finds no weights
            model(**inputs())
    return model


def _case(package, make, config=ALL, generate=True, together=False):
    return {
        "package": package,
        "make": make,
        "config": config,
        "generate": generate,
        "together": together,
    }


_bnb = functools.partial(_case, "bitsandbytes")
_ao = functools.partial(_case, "torchao")

BASES = {
    "bitsandbytes nf4": _bnb(_nf4),
    "bitsandbytes nf4, scales quantised": _bnb(lambda: _nf4(bnb_4bit_use_double_quant=True)),
    "bitsandbytes fp4": _bnb(lambda: _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4")),
    "bitsandbytes nf4 with DoRA": _bnb(lambda: _nf4(rows_as_on_a_gpu=True), DORA),
    "bitsandbytes LLM.int8": _bnb(_int8),
    # PEFT's layer loses its scales when it generates with DoRA on a CPU.
    "bitsandbytes LLM.int8 with DoRA": _bnb(_int8, LAST, generate=False),
    "bitsandbytes LLM.int8 with outliers": _bnb(lambda: _int8(6.0), together=True),
    "PiSSA on bitsandbytes nf4": _bnb(_nf4, PISSA),
    "modules_to_save on bitsandbytes nf4": _bnb(_nf4, SAVED),
    "torchao int8 weights": _ao(lambda: _torchao("Int8WeightOnly")),
    "torchao int8 weights with DoRA": _ao(lambda: _torchao("Int8WeightOnly"), DORA),
    "torchao int8 weights and inputs": _ao(lambda: _torchao("Int8DynamicActivationInt8Weight")),
    "torchao int8 weights and inputs with DoRA": _ao(
        lambda: _torchao("Int8DynamicActivationInt8Weight"), LAST
    ),
    "torchao int4 weights": _ao(lambda: _torchao("IntxWeightOnly", group=32)),
    "torchao float8 weights": _ao(lambda: _torchao("Float8WeightOnly")),
    **{
        f"quanto {kind}": _case("optimum-quanto", functools.partial(_quanto, kind))
        for kind in ("int8", "int4", "int2", "float8")
    },
    "quanto int4 with DoRA": _case("optimum-quanto", lambda: _quanto("int4"), DORA),
    **{f"hqq {bits} bits": _case("hqq", functools.partial(_hqq, bits)) for bits in (8, 4, 2)},
    "hqq 4 bits with DoRA": _case("hqq", lambda: _hqq(4), DORA),
    "compressed-tensors 4 bits": _case("compressed-tensors", _compressed),
    "compressed-tensors 4 bits with DoRA": _case("compressed-tensors", _compressed, DORA),
    "compressed-tensors 8 bits and inputs": _case("compressed-tensors", lambda: _compressed(True)),
    "compressed-tensors before its first pass": _case(
        "compressed-tensors", lambda: _compressed(passes=0), OF_PLAIN[2]
    ),
}
MODULES = {"optimum-quanto": "optimum.quanto", "compressed-tensors": "compressed_tensors"}


def package_of(name):
    """Return the package of a base with its version, or None where it is not installed."""
    package = BASES[name]["package"]
    try:
        found = importlib.util.find_spec(MODULES.get(package, package))
    except ModuleNotFoundError:
        found = None
    return None if found is None else f"{package} {version(package)}"


@torch.no_grad()
def run(name):
    """Return the result of a base: a difference, or the line of a refusal."""
    case = BASES[name]
    config = case["config"]
    try:
        if config in OF_PLAIN:
            return _loaded_with(case["make"](), config)
        base, second = Fresh(case["make"]), {**config, "r": 2, "use_rslora": True}
        settings = {"generate": case["generate"], "together": case["together"]}
        return compare(base, inputs(), config, second, **settings)
    except LoRABackendError as error:
        return _told(error)


def _told(error):
    """Return the first line of an error, without the folder of the adapter."""
    return re.sub(r"/\S*/a\b", "the adapter", str(error).splitlines()[0])


def _loaded_with(base, config):
    """Load an adapter of the plain model, which has to be refused."""
    with tempfile.TemporaryDirectory() as parent:
        adapt(plain(), f"{parent}/a", 1, **config)
        MultiLoRAModel(base, "torch_ref").load_adapter("a", f"{parent}/a")
    raise AssertionError("it was loaded")


def _bits(linear):
    """Return whole numbers [out_features, in_features] and the scale of each row."""
    weight = linear.weight.detach()
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round().to(torch.int8), scales


class Packed(nn.Module):
    """Sizes, and bits under a name of their own: GPTQ, AWQ, AQLM, VPTQ."""

    bits_name = "qweight"

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bits, scales = _bits(linear)
        self.register_buffer(self.bits_name, bits)
        self.register_buffer("scales", scales)

    def forward(self, x):
        return functional.linear(x, getattr(self, self.bits_name) * self.scales)


class PackedWeight(Packed):
    """Sizes, and a weight of bits: HIGGS, BitNet, NVFP4, GGUF."""

    bits_name = "weight"


class EetqLinear(nn.Module):
    """No sizes, and a weight [in_features, out_features]."""

    def __init__(self, linear):
        super().__init__()
        bits, scales = _bits(linear)
        self.weight = nn.Parameter(bits.T.contiguous(), requires_grad=False)
        self.weight_scales = nn.Parameter(scales)

    def forward(self, x):
        return functional.linear(x, self.weight.T * self.weight_scales)


class Derived(nn.Linear):
    """A linear layer whose weight has other values: Metal, and those of 8-bit floats."""

    def __init__(self, linear, dtype=None):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        bits, scales = _bits(linear)
        if dtype is not None:
            scales = linear.weight.detach().abs().max() / torch.finfo(dtype).max
            bits = (linear.weight.detach() / scales).to(dtype)
        self.weight = nn.Parameter(bits, requires_grad=False)
        self.weight_scale = nn.Parameter(scales)

    def forward(self, x):
        return functional.linear(x, self.weight.to(x.dtype) * self.weight_scale)


class PackedEmbedding(nn.Module):
    """A token embedding whose rows are unpacked as they are read: GGUF, Gemma."""

    def __init__(self, embedding):
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        bits, scales = _bits(embedding)
        self.weight = nn.Parameter(bits, requires_grad=False)
        self.scales = nn.Parameter(scales)

    def forward(self, ids):
        return self.weight[ids] * self.scales[ids]


def _with_embedding():
    model = _replaced(PackedWeight)
    model.set_input_embeddings(PackedEmbedding(model.get_input_embeddings()))
    return model.eval()


def _fp8():
    return _replaced(lambda linear: Derived(linear, torch.float8_e4m3fn))


LAYERS = {
    "GPTQ, AWQ, AQLM, VPTQ": (lambda: _replaced(Packed), ALL),
    "HIGGS, BitNet, NVFP4": (lambda: _replaced(PackedWeight), ALL),
    "EETQ": (lambda: _replaced(EetqLinear), ALL),
    "Metal": (lambda: _replaced(Derived), ALL),
    "FP8": (_fp8, ALL),
    "GGUF that stays packed": (_with_embedding, ALL),
    "GGUF that stays packed, adapter of its embedding": (
        _with_embedding,
        {"target_modules": ["embed_tokens"]},
    ),
    "FP8 with DoRA": (_fp8, DORA),
    "GPTQ with DoRA": (lambda: _replaced(Packed), DORA),
}


def unpacked(model):
    """Return a plain model of the same values."""
    same = plain()
    for path, module in [*model.named_modules()]:
        if isinstance(module, Packed | EetqLinear | Derived):
            wide = same.get_submodule(path).in_features
            same.get_submodule(path).weight.data = module(torch.eye(wide)).detach().T.contiguous()
        elif isinstance(module, PackedEmbedding):
            ids = torch.arange(module.num_embeddings)
            same.get_submodule(path).weight.data = module(ids).detach()
    return same


@torch.no_grad()
def run_layer(name):
    """Return the result of a class of layers: a difference, or the line of a refusal."""
    make, config = LAYERS[name]
    second = {**config, "r": 2, "use_rslora": True}
    try:
        return compare(unpacked(make()), inputs(), config, second, True, wrapped=Fresh(make))
    except LoRABackendError as error:
        return _told(error)
