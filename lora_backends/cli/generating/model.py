"""Loads adapters and model of `lora-backends generate`; adapters are checked before the model."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from lora_backends.adapters import read_checkpoint
from lora_backends.cli.console import step
from lora_backends.cli.generating.config import GenerateConfig
from lora_backends.common.files import kind_of
from lora_backends.errors import (
    BackendUnavailableError,
    InvalidInputError,
    LoRABackendError,
    shown,
)
from lora_backends.selection.choice import get_backend

if TYPE_CHECKING:
    import torch

    from lora_backends.hf import MultiLoRAModel
    from lora_backends.hf.generating.greedy import Prompts


def check_adapters(settings: GenerateConfig) -> None:
    """Refuse adapters that are missing, do not fit or cannot be read, before loading the model."""
    adapters = settings.adapters
    settings.entries()
    # all adapters stay loaded for the whole batch
    if len(adapters) > settings.max_adapters:
        raise InvalidInputError(
            f"{len(adapters)} adapters for {settings.max_adapters} slots\n"
            f"  to do: write max_adapters = {len(adapters)} in the configuration"
        )
    for folder in adapters.values():
        # a base model takes minutes to load; an adapter's files are read in a moment
        read_checkpoint(folder, None, settings.max_rank, settings.limits, own_modules=True)


def load(settings: GenerateConfig) -> tuple[MultiLoRAModel, Any]:
    """Return the model with its adapters, and its tokenizer."""
    _check_installed("transformers")
    location = settings.model.location()
    device = get_backend(settings).device  # says so before the model is loaded if it does not run
    if settings.adapters or any(prompt.adapter for prompt in settings.prompts):
        with step(f"looking at {len(settings.adapters)} adapters"):
            check_adapters(settings)

    from lora_backends.hf import MultiLoRAModel

    with step(f"loading {settings.model.gguf_file or location}"):
        base, tokenizer = _load_base(settings, location, device)
    with step(f"loading {len(settings.adapters)} adapters"):
        return MultiLoRAModel.from_config(base, settings), tokenizer


def encoded(model: MultiLoRAModel, tokenizer: Any, settings: GenerateConfig) -> Prompts:
    """Return the prompts as the model takes them."""
    from lora_backends.hf.generating.greedy import encode
    from lora_backends.hf.layout.sites import vocabulary_of

    texts = [prompt.text for prompt in settings.prompts]
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise InvalidInputError(
            "the tokenizer has neither a padding nor an end token\n"
            "  to do: name one of them in its tokenizer_config.json"
        )
    with naming_faults(
        "the tokenizer cannot encode the prompts", "correct its chat template, or set chat = false"
    ):
        prompts = encode(tokenizer, texts, settings.chat, model.backend.device)
    vocabulary, ids = vocabulary_of(model.base), prompts.input_ids
    # on a GPU the embedding would end in a device-side assert, which names nothing
    if ids.numel() == 0 or int(ids.max()) >= vocabulary:
        raise InvalidInputError(
            f"the tokenizer does not belong to the model\n"
            f"  given: token ids of shape {list(ids.shape)} for a vocabulary of {vocabulary}\n"
            f"  allowed: at least one token, all of them in the vocabulary\n"
            f"  to do: give the tokenizer that belongs to the model, or correct its chat template"
        )
    return prompts


def _load_base(settings: GenerateConfig, location: str, device: torch.device) -> tuple[Any, Any]:
    import torch
    import transformers

    _check_regular_files(Path(location))
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    options: dict[str, Any] = {"trust_remote_code": False}  # do not ask: nobody may be there
    if settings.model.gguf_file is not None:
        _check_installed("gguf")
        _check_installed("accelerate")
        options["gguf_file"] = settings.model.gguf_file
    # its progress would mix with the answers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    to_do = "give the folder of a causal language model, or an id of the Hugging Face hub"
    with naming_faults(f"cannot load the model {location}", to_do), _no_bar_of_gguf_files():
        base, info = transformers.AutoModelForCausalLM.from_pretrained(
            location, dtype=dtype, output_loading_info=True, **options
        )
        # Transformers only warns, and fills up with random weights
        _check_complete(location, info)
        base = base.to(device).eval()
    with naming_faults(f"cannot load the tokenizer of {location}", to_do):
        tokenizer = transformers.AutoTokenizer.from_pretrained(location, **options)
    return base, tokenizer


@contextmanager
def _no_bar_of_gguf_files() -> Iterator[None]:
    """Hide a progress bar that fills a log and that Transformers has no switch for."""
    try:
        module: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    except ImportError:  # another version: the bar may be elsewhere
        yield
        return
    with patch.object(module, "tqdm", lambda tensors, **_: tensors, create=True):
        yield


def _check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise BackendUnavailableError(
            f"the model needs {package}\n  to do: pip install 'lora-backends[hf]'"
        )


def _check_regular_files(folder: Path) -> None:
    """Refuse FIFOs and devices in a model's folder: reading one would not end."""
    if kind_of(folder) != "a folder":
        return
    for path in sorted(folder.iterdir()):
        kind = kind_of(path)
        if kind not in ("a file", "a folder", None):
            raise InvalidInputError(
                f"cannot load the model {folder}\n  given: {path.name} is {kind}\n"
                f"  allowed: files and folders"
            )


def _check_complete(location: str, info: dict[str, Any]) -> None:
    """Refuse a model that Transformers has filled up with random weights."""
    missing = sorted(map(str, info.get("missing_keys", ())))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InvalidInputError(
            f"the weights of the model {location} are not complete\n"
            f"  given: no {', '.join(missing[:3])}{more}\n"
            f"  to do: copy or download the model again"
        )


@contextmanager
def naming_faults(what: str, to_do: str) -> Iterator[None]:
    """Turn whatever a library says to files that it cannot use into one error with a cause."""
    try:
        yield
    except (LoRABackendError, MemoryError):
        raise
    except Exception as error:  # a broken file makes Transformers fail in any way
        message = f"{type(error).__name__}: {shown(str(error).strip(), 600)}"
        raise InvalidInputError(f"{what}\n  given: {message}\n  to do: {to_do}") from error
