"""Which feature of a case a refusal names."""

import re
from collections.abc import Callable
from typing import Any

Config = dict[str, Any]

INIT = "init_lora_weights"
OWN = ("modules_to_save", "bias", "trainable_token_indices", "alora_invocation_tokens", "task_type")
OWN += (INIT,)  # it changes weights that may be tied


def _has(*names: str) -> Callable[[Config], bool]:
    """Return whether one of some fields is set."""
    return lambda config: any(config.get(name) for name in names)


def _always(config: Config) -> bool:
    return True


def _saves_twice(config: Config) -> bool:
    """Return whether two features may keep values for one module."""
    kept = (config.get("modules_to_save"), config.get("trainable_token_indices"))
    return all(kept) or bool(kept[0] and config.get("target_modules"))


KNOWN: dict[str, tuple[str, Callable[[Config], bool]]] = {
    "aLoRA with modules of its own": ("and has modules of its own besides", _has(*OWN)),
    "aLoRA that PEFT passes by": ("which PEFT does not run here", _has(OWN[3])),
    "own modules, prepared": ("has modules of its own .* cannot be prepared", _has(*OWN)),
    "own modules, with a strength": ("has modules of its own .* no strength", _has(*OWN)),
    "own modules that are not called": ("cannot be replaced row by row", _has(*OWN)),
    "own modules of another kind": ("has a \\w+ of its own for", _has(*OWN)),
    "own modules that are adapted, too": ("has both LoRA and a weight of its own", _has(*OWN)),
    "own tokens of a tied head with a bias": ("whose bias PEFT leaves out", _has(*OWN)),
    "own modules that are tied": ("has two values for .* shares", _has(*OWN)),
    "modules_to_save that PEFT does not save": ("lacks what its adapter_con", _saves_twice),
    "lora_bias, with a strength": ("has a LoRA bias .* no strength", _has("lora_bias")),
    "use_dora, in a blend": ("uses DoRA, which .* no other adapter", _has("use_dora")),
    "aLoRA, from embeddings": ("invocation", _has("alora_invocation_tokens")),
    "init_lora_weights with a rank above a layer's": ("has the wrong shape", _has(INIT)),
    "init_lora_weights of a shared weight": ("whose weight other modules share", _has(INIT)),
    "a module without rows": ("adapts modules that cannot be reproduced row by row", _always),
    "a module of unknown rows": ("it is not known which row each position belongs to", _always),
    "split, of a state": ("split=True cannot join", _always),
}
"""A feature to what the message says, and which configuration explains it."""


def feature_of(message: str, configs: list[Config]) -> str | None:
    """Return the feature that an error names; None if no adapter of the case has it."""
    first = message.splitlines()[0]
    if re.search("features? that this library cannot reproduce exactly", first):
        fields = r"(?:given:|-) (\w+)(?: with \w+)? = (.*?)(?:: | with )"
        for key, value in re.findall(fields, message):
            if any(config.get(key) for config in configs):
                return f"{key} = {value}" if key == INIT else key
        return None
    for feature, (text, explains) in KNOWN.items():
        if re.search(text, first) and (explains is _always or any(map(explains, configs))):
            return feature
    return None
