"""Compares what an `adapter_config.json` promises with the tensors of its file.

PEFT raises for a saved module or rows of tokens that a file lacks. For LoRA that it lacks, it warns
and goes on with the matrices as their initialisation has left them: no update, or a random one.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.adapters.files.messages import as_json, problem
from lora_backends.adapters.peft.config import PeftLoraConfig
from lora_backends.adapters.peft.module_rules import saved_names
from lora_backends.adapters.specs import OwnModules, Promises
from lora_backends.errors import InvalidInputError

TO_DO = f"save the adapter again with PEFT's save_pretrained, or correct {CONFIG_FILE}"


def promises_of(config: PeftLoraConfig, untrained: Sequence[str]) -> Promises:
    """Return the contents that a configuration promises besides the LoRA in the file."""
    indices = config.trainable_token_indices or {}
    by_end = indices.items() if isinstance(indices, dict) else [(None, indices)]
    tokens = tuple((end, tuple(ids)) for end, ids in by_end)
    is_old = not config.is_of_peft(0, 7)
    return Promises(saved_names(config), tokens, config.bias, tuple(untrained), is_old)


def check_tokens(path: Path, own: OwnModules, promises: Promises) -> None:
    """Raise InvalidInputError if rows of `trainable_token_indices` are missing from the file."""
    held = own.tokens.items()
    for end, ids in promises.tokens:
        if not any(rows.ids == ids or f".{name}".endswith(f".{end}") for name, rows in held):
            rows = f"rows of {'the token embedding' if end is None else repr(end)}"
            given = [f"trainable_token_indices = {as_json(ids)}", f"no {rows}"]
            what = f"the file lacks {rows} that {CONFIG_FILE} promises"
            allowed = (
                "a tensor token_adapter.trainable_tokens_delta of each embedding that it names"
            )
            raise InvalidInputError(problem(path, what, given, allowed, TO_DO))


def check_untrained(path: Path, config: PeftLoraConfig, untrained: Collection[str]) -> None:
    """Warn of targeted modules without LoRA in the file; refuse them where PEFT's is random."""
    if not untrained:
        return
    names = [f"no LoRA for {name!r}" for name in untrained]
    what = f"the file lacks the LoRA of {len(names)} modules that {CONFIG_FILE} targets"
    if config.init_lora_weights is False:
        given = ["init_lora_weights = false: PEFT gives them random numbers", *names]
        raise InvalidInputError(problem(path, what, given, "LoRA of every targeted module", TO_DO))
    # As PEFT does: LoRA without training adds nothing, and files of other trainers leave it out.
    warnings.warn(
        f"{what}: they compute as in the base model\n  file: {path}\n  given: "
        + ", ".join(names[:3])
        + ", ..." * (len(names) > 3),
        RuntimeWarning,
        stacklevel=2,
    )
