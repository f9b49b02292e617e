"""Every variant of an adapter, in a mixed batch with another of its kind, against PEFT."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.sweeps.sweep import GROUPED, LENGTH, ROWS, SIZES, adapt, compare, in_peft, result
from lora_backends import LoRABackendError
from lora_backends.hf import MultiLoRAModel

TEXT = {**SIZES, **GROUPED, "num_labels": 3, "pad_token_id": 0}
BASES = {
    "llama": ("Llama", "ForCausalLM", {}),
    "llama with biases": ("Llama", "ForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "tied llama": ("Llama", "ForCausalLM", {"tie_word_embeddings": True}),
    "llama for classes": ("Llama", "ForSequenceClassification", {}),
    "llama for tokens": ("Llama", "ForTokenClassification", {}),
    "gpt2": ("GPT2", "LMHeadModel", {}),
    "gemma3": ("Gemma3Text", "ForCausalLM", {}),
    "mixtral": ("Mixtral", "ForCausalLM", {"num_local_experts": 4}),
    "bert": ("Bert", "ForSequenceClassification", {}),
    "roberta": ("Roberta", "ForSequenceClassification", {}),
    "modernbert": ("ModernBert", "ForSequenceClassification", {}),
    "deberta": (
        "DebertaV2",
        "ForSequenceClassification",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "bert for tokens": ("Bert", "ForTokenClassification", {}),
    "t5": ("T5", "ForConditionalGeneration", {"decoder_start_token_id": 0}),
}
Q_V = {"target_modules": ["q_proj", "v_proj"]}
BERT = {"target_modules": ["query", "value"]}
PATTERNS = {"rank_pattern": {"layers.1.mlp.up_proj": 4}, "alpha_pattern": {"q_proj": 3}}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}

VARIANTS = {
    "LoRA": ("llama", Q_V),
    "rsLoRA": ("llama", {**Q_V, "use_rslora": True}),
    "rank_pattern": ("llama", {"target_modules": "all-linear", "rank_pattern": {"q_proj": 1}}),
    "alpha_pattern": ("llama", {"target_modules": "all-linear", "alpha_pattern": {"q_proj": 3}}),
    "layers_to_transform": ("llama", {**Q_V, "layers_to_transform": [1]}),
    "exclude_modules": ("llama", {"target_modules": "all-linear", "exclude_modules": ["q_proj"]}),
    "target_modules as an expression": ("llama", {"target_modules": r".*\.1\..*(q|v)_proj"}),
    "all-linear": ("llama", {"target_modules": "all-linear"}),
    "lora_bias": ("llama with biases", {**Q_V, "lora_bias": True}),
    "embedding": ("llama", {"target_modules": ["embed_tokens"]}),
    "head": ("llama", {"target_modules": ["lm_head"]}),
    "tied embedding": ("tied llama", {"target_modules": ["embed_tokens"]}),
    "tied head": ("tied llama", {"target_modules": ["lm_head"]}),
    "scaled embedding": ("gemma3", {"target_modules": ["embed_tokens"]}),
    "Conv1D (fan_in_fan_out)": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "experts (target_parameters)": ("mixtral", EXPERTS),
    "DoRA": ("llama", {**Q_V, "use_dora": True}),
    "DoRA with rsLoRA and patterns": (
        "llama",
        {"target_modules": "all-linear", "use_dora": True, "use_rslora": True, **PATTERNS},
    ),
    "DoRA of a layer with a bias": ("llama with biases", {**Q_V, "use_dora": True}),
    "DoRA of embedding and head": (
        "llama",
        {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    ),
    "PiSSA": ("llama", {**Q_V, "init_lora_weights": "pissa"}),
    "PiSSA of Conv1D": (
        "gpt2",
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": "pissa"},
    ),
    "OLoRA": ("llama", {**Q_V, "init_lora_weights": "olora"}),
    "orthogonal initialisation": ("llama", {"r": 4, **Q_V, "init_lora_weights": "orthogonal"}),
    "modules_to_save: head": ("llama", {**Q_V, "modules_to_save": ["lm_head"]}),
    "modules_to_save: embedding and head": (
        "llama",
        {**Q_V, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "modules_to_save: one of tied weights": (
        "tied llama",
        {**Q_V, "modules_to_save": ["embed_tokens"]},
    ),
    "modules_to_save: norms": ("llama", {**Q_V, "modules_to_save": ["norm"]}),
    "modules_to_save: a linear layer": ("llama", {**Q_V, "modules_to_save": ["up_proj"]}),
    "SEQ_CLS: BERT": ("bert", {**BERT, "task_type": "SEQ_CLS"}),
    "SEQ_CLS: RoBERTa": ("roberta", {**BERT, "task_type": "SEQ_CLS"}),
    "SEQ_CLS: ModernBERT": ("modernbert", {"target_modules": ["Wqkv"], "task_type": "SEQ_CLS"}),
    "SEQ_CLS: DeBERTa": ("deberta", {"target_modules": ["value_proj"], "task_type": "SEQ_CLS"}),
    "SEQ_CLS: Llama": ("llama for classes", {**Q_V, "task_type": "SEQ_CLS"}),
    "TOKEN_CLS: BERT": ("bert for tokens", {**BERT, "task_type": "TOKEN_CLS"}),
    "TOKEN_CLS: Llama": ("llama for tokens", {**Q_V, "task_type": "TOKEN_CLS"}),
    "SEQ_2_SEQ_LM: T5": ("t5", {"target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"}),
    "trainable_token_indices": ("llama", {**Q_V, "trainable_token_indices": [*range(4, 30)]}),
    "trainable_token_indices by name": (
        "llama",
        {**Q_V, "trainable_token_indices": {"embed_tokens": [*range(4, 30)]}},
    ),
    "trainable_token_indices, tied": (
        "tied llama",
        {**Q_V, "trainable_token_indices": [*range(4, 30)]},
    ),
    "trainable_token_indices, scaled": (
        "gemma3",
        {**Q_V, "trainable_token_indices": [*range(4, 30)]},
    ),
    'bias="all"': ("bert", {**BERT, "bias": "all"}),
    'bias="all" in a decoder': ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    'bias="lora_only"': ("bert", {"target_modules": "all-linear", "bias": "lora_only"}),
    'bias="all" with DoRA': ("bert", {**BERT, "bias": "all", "use_dora": True}),
    'bias="all" with SEQ_CLS': ("bert", {**BERT, "bias": "all", "task_type": "SEQ_CLS"}),
    "aLoRA": ("llama", {**Q_V, "task_type": "CAUSAL_LM", "alora_invocation_tokens": [9, 8]}),
    "KaSA": ("llama", {**Q_V, "kasa_config": "default"}),
    "PiSSA with a random start": ("llama", {**Q_V, "init_lora_weights": "pissa_niter_4"}),
    "layer_replication": ("llama", {**Q_V, "layer_replication": [[0, 2], [1, 2]]}),
    "QA-LoRA": ("llama", {**Q_V, "use_qalora": True}),
    "AdaLoRA": ("llama", "AdaLoraConfig"),
    "IA3": ("llama", "IA3Config"),
    "prompt tuning": ("llama", "PromptTuningConfig"),
}


def build(name):
    """Return the base model of a variant."""
    config, kind, sizes = BASES[name]
    torch.manual_seed(7)
    made = getattr(transformers, f"{config}Config")(**{**TEXT, **sizes})
    model = getattr(transformers, config.replace("3Text", "3") + kind)(made).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def inputs(name):
    """Return the inputs of a variant; some rows hold the invocation of aLoRA."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(10, 30, (len(ROWS), LENGTH), generator=generator)
    ids[:3, 3:5] = torch.tensor([9, 8])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**given, "decoder_input_ids": ids[:, :3]} if name == "t5" else given


def run(name):
    """Return the result of a variant: a difference, or the line of a refusal."""
    base, config = VARIANTS[name]
    try:
        if isinstance(config, str):
            return _other_method(base, config)
        rows = ["a", None, "b", "b"] if name == "aLoRA" else ROWS
        if config.get("kasa_config"):
            import peft

            config = {**config, "kasa_config": peft.KasaConfig()}
        generates = any(part in BASES[base][1] for part in ("LM", "Conditional"))
        return compare(build(base), inputs(base), config, config, rows=rows, generate=generates)
    except LoRABackendError as error:
        lines = str(error).splitlines()
        facts = [line.strip().removeprefix("given: ") for line in lines if "given: " in line]
        return " - ".join([lines[0], *facts[:1]])


def _other_method(base, kind):
    """Load an adapter of another method than LoRA, which has to be refused."""
    import peft

    sizes = {"num_virtual_tokens": 2} if "Prompt" in kind else {"target_modules": ["q_proj"]}
    sizes |= {"total_step": 10} if "Ada" in kind else {}
    sizes |= {"feedforward_modules": []} if kind == "IA3Config" else {}
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **sizes)
        peft.get_peft_model(build(base), config).save_pretrained(folder)
        MultiLoRAModel(build(base), "torch_ref").load_adapter("a", folder)
    raise AssertionError(f"{kind} was loaded")


def _sharded(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    for shard in (0, 1):
        part = {name: tensors[name] for name in sorted(tensors)[shard::2]}
        save_file(part, folder / f"adapter_model-0000{shard + 1}-of-00002.safetensors")


def _renamed(old, new):
    def rename(folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        assert renamed.keys() != tensors.keys()
        save_file(renamed, folder / "adapter_model.safetensors")

    return rename


def _pickled(folder):
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


FILES = {
    "adapter_model.bin": ("llama", _pickled),
    "shards": ("llama", _sharded),
    "names of a PeftModel's state_dict": ("llama", _renamed("lora_A.", "lora_A.default.")),
    "experts as Transformers 4 names them": ("mixtral", _renamed(".mlp.", ".block_sparse_moe.")),
}
"""Forms of a checkpoint's files, which PEFT does not read itself: a function that makes them."""


@torch.no_grad()
def run_file(name):
    """Return the difference between a checkpoint in another form, and PEFT on the usual one."""
    base, change = FILES[name]
    config = EXPERTS if base == "mixtral" else Q_V
    with tempfile.TemporaryDirectory() as parent:
        plain, changed = Path(parent, "plain"), Path(parent, "changed")
        adapt(build(base), str(plain), 1, **config)
        expected = result(in_peft(build(base), str(plain))(**inputs(base)))
        shutil.copytree(plain, changed)
        change(changed)
        assert json.loads((changed / "adapter_config.json").read_text())
        model = MultiLoRAModel(build(base), "torch_ref")
        model.load_adapter("a", changed)
    mixed = result(model(adapters=["a"] * len(ROWS), **inputs(base)))
    return (mixed - expected).abs().max().item()
