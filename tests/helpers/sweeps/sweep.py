"""The sweep: small random models of many architectures, and every variant of an adapter.

Each case is one mixed batch, compared row by row with PEFT on that row's adapter alone: equal
within `BOUND` in float32, or refused by name. `tools/sweep.py` runs all of it and writes what the
pages quote; `tests/hf/models/test_sweep.py` runs a part.
"""

import copy
import tempfile
import warnings
from pathlib import Path

import torch
import transformers

from helpers.sweeps.architectures import ARCHITECTURES, inputs_of
from helpers.sweeps.architectures import build as build_other
from lora_backends import LoRABackendError
from lora_backends.hf import MultiLoRAModel

BOUND = 2e-5
ROWS = ["a", None, "b", "a"]
LENGTH = 6

SIZES = {
    **dict.fromkeys(["vocab_size"], 64),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim", "embedding_size", "emb_dim"], 16),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size"], 24),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 2),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], 64),
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], None),
}
GROUPED = {"num_key_value_heads": 1, "head_dim": 8, "num_labels": 3}
MOE = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "shared_expert_intermediate_size": 8,
}
SEQ2SEQ = {
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    "d_kv": 8,
}
VISION = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 3}
SOUND = {
    "conv_dim": [16, 16],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 20,
    "num_labels": 3,
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], 0),
}

CAUSAL = {
    **dict.fromkeys(
        """Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Olmo Olmo2 Cohere Cohere2 Granite Glm Glm4
        StableLm Starcoder2 Phi3 Helium Persimmon Nemotron Ernie4_5 HunYuanDenseV1 SeedOss Bloom
        Ministral Arcee Apertus Exaone4""".split(),
        GROUPED,
    ),
    "SmolLM3": {**GROUPED, "no_rope_layers": [1, 0]},
    "Gemma3": {**GROUPED, "config": "Gemma3Text"},
    "Falcon": {},
    "Phi": {"num_key_value_heads": 2},
    "GPTJ": {"rotary_dim": 4},
    "CodeGen": {"rotary_dim": 2, **dict.fromkeys(["n_head", "num_attention_heads"], 4)},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]]},
    "GPTNeoX": {},
    "GPTBigCode": {},
    "OPT": {"word_embed_proj_dim": 16},
    "Mpt": {"max_seq_len": 64},
    "XGLM": {},
    "BioGpt": {},
    "Mixtral": {**GROUPED, **MOE},
    "Qwen2Moe": {**GROUPED, **MOE},
    "Qwen3Moe": {**GROUPED, **MOE},
    "Olmoe": {**GROUPED, **MOE},
    "GraniteMoe": {**GROUPED, **MOE},
    "Mamba": {"state_size": 4, "time_step_rank": 2},
    "Mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "FalconMamba": {"state_size": 4, "time_step_rank": 2},
    "RecurrentGemma": {"lru_width": 16, "num_key_value_heads": 1, "num_hidden_layers": 3},
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
DELTA_NET = {
    "config": "Qwen3_5Text",
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
NESTED = {  # layers of two kinds, later ones with the keys and values of earlier ones
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 4,
}
STATES = {
    **dict.fromkeys(["mamba_n_heads", "n_mamba_heads", "mamba_num_heads"], 4),
    **dict.fromkeys(["mamba_d_head", "mamba_headdim", "mamba_head_dim"], 8),
    **dict.fromkeys(["mamba_d_state", "ssm_state_size"], 4),
    **dict.fromkeys(["mamba_n_groups", "mamba_ngroups", "n_groups"], 1),
    **dict.fromkeys(["mamba_chunk_size", "chunk_size"], 4),
    **dict.fromkeys(["mamba_d_conv", "conv_kernel"], 2),
    **{"mamba_expand": 2, "mamba_dt_rank": 4, "mamba_d_ssm": 32, "use_mamba_kernels": False},
    **{"shared_intermediate_size": 8, "pad_token_id": 0},
}
CAUSAL |= {
    "Qwen3Next": {**GROUPED, **MOE, **DELTA_NET, "config": "Qwen3Next"},
    "Qwen3_5": {**GROUPED, **DELTA_NET},
    "Qwen3_5Moe": {**GROUPED, **MOE, **DELTA_NET, "config": "Qwen3_5MoeText"},
    "Gemma3n": {
        **GROUPED,
        **NESTED,
        "config": "Gemma3nText",
        "intermediate_size": [24] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
    },
    "Gemma4": {**GROUPED, **NESTED, "config": "Gemma4Text", "global_head_dim": 8},
    "GptOss": {**GROUPED, **MOE, "sliding_window": 4},
    "Glm4Moe": {**GROUPED, **MOE, **GROUPS},
    "MiniMax": {**GROUPED, **MOE, "block_size": 4},
    "MiniMaxM2": {**GROUPED, **MOE},
    "DeepseekV32": {**GROUPED, **MOE, **GROUPS, **LATENT, "num_key_value_heads": 2},
    "Ernie4_5_Moe": {**GROUPED, **MOE, "moe_num_experts": 4, "moe_k": 2},
    "HunYuanMoEV1": {**GROUPED, **MOE, "moe_topk": 2},
    "Dots1": {**GROUPED, **MOE, **GROUPS},
    "Olmo3": {**GROUPED, "sliding_window": 4},
    "FlexOlmo": {**GROUPED, **MOE},
    "BitNet": GROUPED,
    "Jamba": {
        **GROUPED,
        **MOE,
        **STATES,
        **dict.fromkeys(["attn_layer_period", "expert_layer_period"], 2),
        **dict.fromkeys(["attn_layer_offset", "expert_layer_offset"], 1),
    },
    "Bamba": {**GROUPED, **STATES, "attn_layer_indices": [1]},
    "FalconH1": {**GROUPED, **STATES},
    "NemotronH": {
        **GROUPED,
        **MOE,
        **GROUPS,
        **STATES,
        "hybrid_override_pattern": "M*E-",
        "num_hidden_layers": 4,
        "moe_shared_expert_intermediate_size": 8,
    },
    "Zamba2": {
        **GROUPED,
        **STATES,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
    },
    "GraniteMoeHybrid": {**GROUPED, **MOE, **STATES, "layer_types": ["mamba", "attention"]},
    "Lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"], "conv_L_cache": 2},
    "Lfm2Moe": {
        **GROUPED,
        **MOE,
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 2,
        "num_dense_layers": 1,
    },
}
ENCODERS = {
    **dict.fromkeys(
        """Bert Roberta XLMRoberta RobertaPreLayerNorm Camembert DistilBert Albert Electra MPNet
        RoFormer MegatronBert RemBert Nystromformer MobileBert IBert ConvBert Ernie LayoutLM
        FNet Data2VecText SqueezeBert""".split(),
        {"pad_token_id": 0},
    ),
    "Esm": {"pad_token_id": 0, "mask_token_id": 3},
    "Xmod": {"pad_token_id": 0, "default_language": "en_XX"},
    "Funnel": {"block_sizes": [1, 1], "num_hidden_layers": ...},
    "Deberta": {"pos_att_type": [], "relative_attention": False},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "ModernBert": {"pad_token_id": 0},
    "Longformer": {"attention_window": 4, "pad_token_id": 0},
    "BigBird": {"block_size": 2, "num_random_blocks": 1},
}
SEQ2SEQS = """T5 MT5 UMT5 Bart MBart Pegasus Blenderbot BlenderbotSmall Marian M2M100 PLBart LED
BigBirdPegasus SwitchTransformers LongT5""".split()
IMAGES = {
    **dict.fromkeys("ViT DeiT Beit Dinov2 Data2VecVision ViTMSN IJepa".split(), {}),
    **dict.fromkeys(
        ["Swin", "Swinv2"],
        {
            "embed_dim": 8,
            "depths": [1, 1],
            **dict.fromkeys(["num_heads", "num_attention_heads"], [2, 2]),
            "window_size": 2,
            **dict.fromkeys(["num_hidden_layers", "num_layers", "hidden_size"], ...),
        },
    ),
    "CLIP": {"config": "CLIPVision", "kind": "VisionModelWithProjection", "projection_dim": 8},
    "Siglip": {"config": "SiglipVision", "kind": "VisionModel"},
}
SOUNDS = ["Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "UniSpeechSat", "Data2VecAudio"]
WITH_IMAGES = ["llava", "gemma3", "paligemma", "smolvlm", "idefics3", "qwen2_vl", "qwen2_5_vl"]
OTHERS = ["xlnet", "deepseek_v2", "deepseek_v3", "rwkv", "clip", "vipllava"]


CASES: dict[str, tuple[str, str, dict, str]] = {}
"""Name to the configuration's class, the model's class, sizes and the kind of input."""
for _name, _sizes in CAUSAL.items():
    CASES[_name] = (_sizes.get("config", _name), f"{_name}ForCausalLM", _sizes, "text")
CASES["GPT2"] = ("GPT2", "GPT2LMHeadModel", {}, "text")
for _name in ("Llama", "Qwen2", "Mistral", "Gemma", "GPT2"):
    CASES[f"{_name} (classes)"] = (
        _name,
        f"{_name}ForSequenceClassification",
        {**GROUPED, "pad_token_id": 0},
        "text",
    )
CASES["Llama (tokens)"] = ("Llama", "LlamaForTokenClassification", GROUPED, "text")
for _name, _sizes in ENCODERS.items():
    _class = f"{_name}ForSequenceClassification"
    CASES[_name] = (_name, _class, {"num_labels": 3, **_sizes}, "text")
for _name in ("Bert", "Roberta", "ModernBert", "DistilBert", "Electra"):
    _sizes = {"num_labels": 3, "pad_token_id": 0}
    CASES[f"{_name} (tokens)"] = (_name, f"{_name}ForTokenClassification", _sizes, "text")
    CASES[f"{_name} (masks)"] = (_name, f"{_name}ForMaskedLM", _sizes, "text")
for _name in SEQ2SEQS:
    CASES[_name] = (_name, f"{_name}ForConditionalGeneration", SEQ2SEQ, "seq2seq")
CASES["Marian"] = ("Marian", "MarianMTModel", SEQ2SEQ, "seq2seq")
CASES["Bart (classes)"] = ("Bart", "BartForSequenceClassification", SEQ2SEQ, "classes")
CASES["T5 (encoder)"] = ("T5", "T5EncoderModel", SEQ2SEQ, "text")
CASES["Whisper"] = (
    "Whisper",
    "WhisperForConditionalGeneration",
    {
        **SEQ2SEQ,
        "num_mel_bins": 8,
        "max_source_positions": 12,
        "max_target_positions": 32,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    "features",
)
CASES["Whisper (classes)"] = (
    "Whisper",
    "WhisperForAudioClassification",
    {**CASES["Whisper"][2], "num_labels": 3},
    "features",
)
for _name, _sizes in IMAGES.items():
    _class = _name + _sizes.get("kind", "ForImageClassification")
    CASES[_name] = (_sizes.get("config", _name), _class, {**VISION, **_sizes}, "images")
for _name in SOUNDS:
    CASES[_name] = (_name, f"{_name}ForSequenceClassification", SOUND, "sound")
CASES["AST"] = (
    "AST",
    "ASTForAudioClassification",
    {"num_mel_bins": 16, "max_length": 24, "patch_size": 8, "num_labels": 3},
    "spectrogram",
)


def build(name):
    """Return a small random model, in eval mode."""
    config, kind, sizes, _ = CASES[name]
    values = copy.deepcopy({**SIZES, **sizes})
    values = {k: v for k, v in values.items() if k not in ("config", "kind") and v is not ...}
    torch.manual_seed(7)
    made = getattr(transformers, f"{config}Config")(**values)
    model = getattr(transformers, kind)(made).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():  # norms and biases that start at 1 and 0 hide faults
        if parameter.ndim == 1 and parameter.is_floating_point():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def inputs(name):
    """Return inputs of a model, with padding where it is text."""
    rows = len(ROWS)
    kind, sizes = CASES[name][3], CASES[name][2]
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(rows, *shape, generator=generator)

    if kind == "images":
        return {"pixel_values": noise(3, sizes["image_size"], sizes["image_size"])}
    if kind == "sound":
        return {"input_values": noise(200)}
    if kind == "spectrogram":
        return {"input_values": noise(sizes["max_length"], sizes["num_mel_bins"])}
    ids = torch.randint(4, 58, (rows, LENGTH), generator=generator)
    decoder = torch.randint(4, 58, (rows, 3), generator=generator)
    if kind == "features":
        given = {"input_features": noise(sizes["num_mel_bins"], 2 * sizes["max_source_positions"])}
        return given if "Class" in CASES[name][1] else {**given, "decoder_input_ids": decoder}
    if kind == "classes":
        ids[:, -1] = 1
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    mask[3, :1] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    return {**given, "decoder_input_ids": decoder} if kind == "seq2seq" else given


def adapt(base, folder, seed, std=0.2, **config):
    """Save a random adapter of PEFT, everything that it trains moved from where it starts."""
    import peft

    config = {"r": 3, "target_modules": "all-linear", **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**config))
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += std * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder)


def in_peft_together(base, folders):
    """Return a copy of a model with all adapters, which takes the names of its rows' adapters."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (first, folder), *others = folders.items()
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder, adapter_name=first)
        for name, folder in others:
            model.load_adapter(folder, name)
        return model.eval()


def in_peft(base, folder):
    """Return a copy of a model with an adapter, or without one."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = copy.deepcopy(base)
        return model if folder is None else peft.PeftModel.from_pretrained(model, folder).eval()


def result(output):
    """Return the tensor of a model's output that tells rows apart."""
    for name in ("logits", "last_hidden_state", "image_embeds", "pooler_output"):
        if isinstance(output.get(name), torch.Tensor):
            return output[name]
    raise TypeError(f"nothing to compare in {list(output)}")


@torch.no_grad()
def compare(
    base, given, first, second, generate=False, rows=ROWS, split=False, wrapped=None, together=False
):
    """Compare a mixed batch of two adapters with PEFT; return the worst difference of a row.

    It is relative to the largest value of the row where that is over 1.

    Args:
        base: the model.
        given: inputs of its forward pass.
        first: keywords of the LoraConfig of adapter "a".
        second: and of "b".
        generate: compare greedy tokens, too.
        rows: adapters of the rows.
        split: run a pass for each adapter.
        wrapped: the model that is compared, where it is another one than PEFT's.
        together: compare with PEFT's own mixed batch, where a row depends on its batch.

    Raises:
        LoRABackendError: refused by name.
        AssertionError: an adapter changes nothing.
    """
    with tempfile.TemporaryDirectory() as parent:
        folders = {None: None, "a": str(Path(parent, "a")), "b": str(Path(parent, "b"))}
        adapt(base, folders["a"], 1, **first)
        adapt(base, folders["b"], 2, **second)
        expected = {name: in_peft(base, folder) for name, folder in folders.items()}
        mixture = (
            in_peft_together(base, {"a": folders["a"], "b": folders["b"]}) if together else None
        )
        ours = copy.deepcopy(base if wrapped is None else wrapped)
        model = MultiLoRAModel(ours, "torch_ref", max_adapters=2, max_rank=8)
        for name in ("a", "b"):
            model.load_adapter(name, folders[name])
    results = {name: result(peft(**given)) for name, peft in expected.items()}
    mixed = result(model(adapters=rows, **given, **({"split": True} if split else {})))
    if mixture is not None:
        names = ["__base__" if name is None else name for name in rows]
        whole = result(mixture(adapter_names=names, **given))
    apart, effects = [], dict.fromkeys("ab", 0.0)
    for row, name in enumerate(rows):
        truth = results[name][row] if mixture is None else whole[row]
        largest = max(1.0, truth.abs().max().item())
        apart.append((mixed[row] - truth).abs().max().item() / largest)
        if name is not None:
            effect = (results[name][row] - results[None][row]).abs().max().item()
            effects[name] = max(effects[name], effect)
    assert min(effects.values()) > 20 * BOUND, f"an adapter changes nothing: {effects}"
    worst = torch.tensor(apart).max().item()  # unlike `max` it keeps a NaN
    if generate and worst <= BOUND and mixture is None:
        settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        prompts = {name: x for name, x in given.items() if name != "decoder_input_ids"}
        tokens = model.generate(adapters=rows, **prompts, **settings)
        for row, name in enumerate(rows):
            alone = expected[name].generate(**prompts, **settings)[row]
            assert torch.equal(tokens[row], alone), f"generated tokens of row {row} differ"
    return worst


def run(name, split=False):
    """Return the result of one architecture: a difference, or the line of a refusal."""
    has_states = "amba" in name or name in ("FalconH1", "NemotronH")  # PEFT refuses out_proj
    targets = {"target_modules": ["in_proj", "x_proj", "o_proj"]} if has_states else {}
    adapters = [targets, {**targets, "r": 2, "use_rslora": True}]
    try:
        if name in ARCHITECTURES:
            images = [1, 0, 2, 1] if name in WITH_IMAGES else None
            given = inputs_of(name, len(ROWS), LENGTH, 3, images)
            return compare(build_other(name), given, *adapters, split=split)
        base = build(name)
        generates = bool(getattr(base, "can_generate", bool)()) and "Class" not in CASES[name][1]
        return compare(base, inputs(name), *adapters, generate=generates, split=split)
    except LoRABackendError as error:
        return str(error).splitlines()[0]


NAMES = [*CASES, *WITH_IMAGES, *OTHERS]
