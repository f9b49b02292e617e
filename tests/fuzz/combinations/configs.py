"""Random configurations of PEFT's LoRA: every field that changes what an adapter computes."""

import random
import re
from typing import Any

from .bases import IDS, INVOCATION, Base

RANKS = (1, 1, 2, 3, 4, 5, 8, 8, 13, 16)
ALPHAS = (1, 2, 3, 8, 8, 16, 0, -4)
INITS = (
    "gaussian",
    "orthogonal",
    "mica",
    False,
    "pissa",
    "pissa",
    "olora",
    "olora",
    "pissa_niter_4",
)


def draw_config(draw: random.Random, base: Base) -> dict[str, Any]:
    """Return keywords of a `peft.LoraConfig`; PEFT may refuse them."""
    config: dict[str, Any] = {"r": draw.choice(RANKS), "lora_alpha": draw.choice(ALPHAS)}
    config["target_modules"] = _targets(draw, base)
    features = [feature for share, feature in FEATURES if draw.random() < share]
    for feature in features:
        config |= feature(draw, base)
    return config


def _targets(draw: random.Random, base: Base) -> Any:
    names = draw.sample(base.names, draw.randint(1, min(4, len(base.names))))
    other = draw.choice(base.embeddings) if base.embeddings else names[0]
    layer = base.layers or "layers"
    return draw.choice([
        "all-linear",
        names,
        names,
        names,
        draw.sample(base.linear, draw.randint(1, min(5, len(base.linear)))),
        [*names, other.rpartition(".")[2]],
        [other],
        r".*\.(" + "|".join(names) + ")",
        rf"(.*\.)?({'|'.join(names)})",
        rf".*\.{layer}\.[01]\..*({names[0]})",
        rf".*\.{layer}\.1\..*",
        re.escape(draw.choice(base.linear)),
        "|".join(re.escape(path) for path in draw.sample(base.linear, min(2, len(base.linear)))),
        [base.linear[-1].rpartition(".")[2]],
        f".*{names[0]}",
    ])  # fmt: skip


def _key(draw: random.Random, base: Base) -> str:
    """Return a key of rank_pattern or alpha_pattern."""
    path = draw.choice(base.linear)
    parts = path.split(".")
    return draw.choice([
        parts[-1],
        ".".join(parts[-2:]),
        path,
        f"^{path}",
        rf".*\.1\..*{parts[-1]}",
        rf"{base.layers or 'layers'}\.[0]\..*",
        f"({parts[-1]}|{draw.choice(base.names)})",
        draw.choice(base.embeddings or [path]).rpartition(".")[2],
    ])  # fmt: skip


def _pattern(draw: random.Random, base: Base) -> dict[str, Any]:
    keys = [_key(draw, base) for _ in range(draw.randint(1, 3))]
    found: dict[str, Any] = {}
    if draw.random() < 0.7:
        found["rank_pattern"] = {key: draw.choice(RANKS) for key in keys}
    if draw.random() < 0.6 or not found:
        found["alpha_pattern"] = {key: draw.choice([*ALPHAS, 1.5]) for key in reversed(keys)}
    return found


def _layers(draw: random.Random, base: Base) -> dict[str, Any]:
    found: dict[str, Any] = {"layers_to_transform": draw.choice([0, 1, [0], [1], [0, 1]])}
    if draw.random() < 0.4:
        found["layers_pattern"] = draw.choice([base.layers, [base.layers], None])
    return found


def _excluded(draw: random.Random, base: Base) -> dict[str, Any]:
    name, path = draw.choice(base.names), draw.choice(base.linear)
    return {
        "exclude_modules": draw.choice([[name], [path], f".*{name}", r".*\.0\..*", [name, "x"]])
    }


def _saved(draw: random.Random, base: Base) -> dict[str, Any]:
    options = [base.linear[-1], *base.embeddings[:1], *base.norms[-2:], draw.choice(base.linear)]
    options += [name for name in ("score", "classifier", "lm_head") if name in base.linear] * 2
    chosen = {draw.choice(options).rpartition(".")[2] for _ in range(draw.randint(1, 2))}
    return {"modules_to_save": sorted(chosen)}


def _tokens(draw: random.Random, base: Base) -> dict[str, Any]:
    indices = sorted(draw.sample(range(*IDS), draw.randint(1, 30)))
    name = draw.choice(base.embeddings or ["embed_tokens"]).rpartition(".")[2]
    return {"trainable_token_indices": draw.choice([indices, {name: indices}, indices[::-1]])}


def _invoked(draw: random.Random, base: Base) -> dict[str, Any]:
    if not base.is_causal:
        return {}
    tokens = draw.choice([INVOCATION, INVOCATION, INVOCATION[:1], [3, 3]])
    return {"alora_invocation_tokens": tokens, "task_type": "CAUSAL_LM"}


def _task(draw: random.Random, base: Base) -> dict[str, Any]:
    kind = type(base.model).__name__
    tasks = {"SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS"}
    tasks |= {"CausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM"}
    found = [task for end, task in tasks.items() if kind.endswith(end)]
    return {"task_type": found[0]} if found else {}


def _experts(draw: random.Random, base: Base) -> dict[str, Any]:
    if not base.experts:
        return {}
    names = sorted({".".join(path.split(".")[-2:]) for path in base.experts})
    found: dict[str, Any] = {"target_parameters": draw.sample(names, draw.randint(1, len(names)))}
    if draw.random() < 0.5:
        found["target_modules"] = []
    return found


def _rare(draw: random.Random, base: Base) -> dict[str, Any]:
    """Return a feature that this library refuses, or that acts on training alone."""
    import peft

    return draw.choice([
        lambda: {"use_qalora": True, "qalora_group_size": draw.choice([2, 4, 8])},
        lambda: {"layer_replication": draw.choice([[(0, 2), (1, 2)], [(0, 1), (0, 2)]])},
        lambda: {"kasa_config": peft.KasaConfig()},
        lambda: {"use_bdlora": peft.BdLoraConfig(target_modules_bd_a=base.names[:1], nblocks=2)},
        lambda: {"velora_config": peft.VeloraConfig()},
        lambda: {"monteclora_config": peft.MontecloraConfig()},
        lambda: {"ensure_weight_tying": True},
        lambda: {"fan_in_fan_out": True},
        lambda: {"inference_mode": True},
        lambda: {"runtime_config": peft.LoraRuntimeConfig()},
    ])()  # fmt: skip


FEATURES = (
    (0.3, _task),
    (0.25, _pattern),
    (0.25, lambda draw, base: {"use_rslora": True}),
    (0.2, lambda draw, base: {"use_dora": True}),
    (0.2, lambda draw, base: {"init_lora_weights": draw.choice(INITS)}),
    (0.12, lambda draw, base: {"lora_bias": True}),
    (0.12, lambda draw, base: {"bias": draw.choice(["all", "lora_only"])}),
    (0.15, _layers),
    (0.15, _excluded),
    (0.15, _saved),
    (0.12, _tokens),
    (0.1, _invoked),
    (0.35, _experts),
    (0.06, _rare),
    (0.2, lambda draw, base: {"lora_dropout": 0.3}),
)
"""The share of the adapters that have a feature, and what draws its fields."""
