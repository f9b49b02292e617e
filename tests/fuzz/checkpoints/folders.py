"""What a valid checkpoint folder holds, by PEFT's own rules."""

from types import SimpleNamespace

from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from lora_backends.adapters import ModuleSpec

CONFIG, SAFETENSORS, PICKLE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
PREFIX = "base_model.model."
MAX_RANK = 12

SPECS = {
    f"model.layers.{layer}.{name}": ModuleSpec("linear", *sizes)
    for layer in (0, 1, 10)
    for name, sizes in {
        "self_attn.q_proj": (6, 8),
        "self_attn.v_proj": (6, 4),
        "mlp.down_proj": (10, 6),
    }.items()
} | {
    "model.embed_tokens": ModuleSpec("embedding", 9, 6, embed_scale=2.0),
    "lm_head": ModuleSpec("linear", 6, 9),
}

LITERALS = ["q_proj", "v_proj", "down_proj", "embed_tokens", "layers.1.self_attn.q_proj", *SPECS]
PATTERNS = [
    r".*\.(q|v)_proj",
    r"model\.layers\.[01]\..*",
    r"^model\.layers\.(?!10).*proj",
    r".*layers\.\d+\.mlp.*",
    r"(?=.*self_attn).*_proj",
    ".*",
    "q_proj|v_proj",
    "^model.layers.1.self_attn.q_proj",
    r"layers\.1.*",
    "[^.]*_proj",
]


def draw_config(draw):
    """Draw a configuration that PEFT accepts."""
    targets = draw.choice(
        [draw.sample(LITERALS, draw.randint(1, 4)), draw.choice(PATTERNS), "all-linear"]
    )
    config = {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": draw.randint(1, 8),
        "lora_alpha": draw.choice([1, 4, 16, 0.5]),
        "use_rslora": draw.random() < 0.3,
        "lora_bias": draw.random() < 0.2,
        "target_modules": targets,
    }
    for key, value in (
        ("rank_pattern", lambda: draw.randint(1, MAX_RANK)),
        ("alpha_pattern", lambda: draw.choice([1, 3, 32, 0.25])),
    ):
        if draw.random() < 0.4:
            names = draw.sample([*LITERALS, *PATTERNS], draw.randint(1, 3))
            config[key] = {name: value() for name in names}
    if draw.random() < 0.2:
        excluded = [draw.choice(PATTERNS), draw.sample(LITERALS, 1)]
        config["exclude_modules"] = draw.choice(excluded)
    if isinstance(targets, list) and draw.random() < 0.2:
        config["layers_to_transform"] = draw.choice([0, 1, [0, 10], []])
        if draw.random() < 0.5:
            config["layers_pattern"] = draw.choice(["layers", ["h", "layers"], r"l\w+"])
    return config


def is_targeted(config, path):
    """Return PEFT's decision; "all-linear" is all but embeddings and the head."""
    names = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    fields = {name: config.get(name) for name in names}
    if isinstance(fields["target_modules"], str) and (
        fields["target_modules"].lower() == "all-linear"
    ):
        if path.split(".")[-1] == "lm_head" or path not in SPECS:
            return False
        fields["target_modules"] = [p for p in SPECS if SPECS[p].kind == "linear"]
    theirs = SimpleNamespace(**fields, modules_to_save=None, target_parameters=None)
    return bool(check_target_module_exists(theirs, path))


def rank_of(config, path):
    patterns = config.get("rank_pattern") or {}
    return patterns.get(get_pattern_key(patterns.keys(), path), config.get("r", 8))


def alpha_of(config, path):
    patterns = config.get("alpha_pattern") or {}
    return patterns.get(get_pattern_key(patterns.keys(), path), config.get("lora_alpha", 8))
