"""Recognises folders and files that are no PEFT checkpoints, so that errors can give advice."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from lora_backends.adapters.files.messages import problem
from lora_backends.common.files import kind_of, read_text
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown

CONFIG_FILE = "adapter_config.json"
SAFETENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
LONGEST_NAME = 1000
"""Characters of a tensor's name that is looked at."""

_SAVED_BY_PEFT = "pass the folder that PEFT's save_pretrained wrote"
_MOST_ENTRIES = 1000  # of a folder that are looked at

# Files in which trainers put trained weights that are no LoRA: projectors by the names that models
# give them (LLaVA's, Qwen-VL's), heads, LongLoRA's embeddings and norms, ms-swift's vision tower. A
# value head is no part of the model that answers.
_TRAINED_BESIDE = re.compile(
    r"(?i)(?!value_head|v_head)(.*non_?lora.*|.*trainable.*|.*projector.*|.*resampler.*|"
    r".*connector.*|.*(merger|aligner|abstractor|perceiver)|vit|.*vision.*|"
    r".*embed(s|dings?|_tokens)?|(.*_)?head|classifier|score|"
    r".*modules_to_save.*)\.(bin|safetensors|pt|pth)"
)

GATHER = "gather the parameters on one process, and save the adapter again with save_pretrained"
_CONVERT = "convert the adapter to PEFT's format"

PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.[^.]+\.\d+\.lora_[AB]$")
"""Names of LoRA tensors in a torch parametrization, e.g. jina-embeddings-v3's lora_A,
[tasks, rank, in_features]."""
BY_TASK = (
    "save a PEFT adapter per task. For a linear layer lora_A.weight is lora_A[task] and "
    "lora_B.weight is lora_B[task]; for an embedding lora_embedding_A is lora_A[task].T and "
    "lora_embedding_B is lora_B[task].T. For jina-embeddings-v3, jinaai/jina-embeddings-v3-hf has "
    "PEFT adapters"
)

# For folders without an adapter of PEFT: patterns of file names, the kind of weights, the remedy.
# The first match wins.
_FOREIGN = (
    (r"adapters\.(safetensors|npz)", "weights of MLX", _CONVERT),
    (
        r".*\.distcp|\.metadata|pytorch_model_fsdp(_\d+)?(\.bin)?",
        "shards of a distributed checkpoint (FSDP)",
        f"{GATHER}, e.g. after fsdp_plugin.set_state_dict_type('FULL_STATE_DICT')",
    ),
    (
        r"global_step\d+|zero_to_fp32\.py|.*(zero_pp|mp)_rank_\d+.*",
        "partitions of DeepSpeed ZeRO",
        f"{GATHER}, e.g. with stage3_gather_16bit_weights_on_model_save in DeepSpeed's settings",
    ),
    (r"adapter_model.*rank_?\d+.*", "parts of several processes", GATHER),
    (r".*\.gguf", "weights of llama.cpp (GGUF)", _CONVERT),
    (r"adapter_\d+\.pt", "weights of torchtune", _CONVERT),
    (r"pytorch_lora_weights\..*", "weights of diffusers (pytorch_lora_weights)", _CONVERT),
)

# Searched in a tensor's name; the first hit wins.
_FORMATS = (
    (
        r"\.(weight_scale(_inv|_2)?|input_scale|scales?|scale_inv|zero_point|absmax|quant_state\b.*)$",
        "a quantised checkpoint, with scales beside values of 8 bits (fp8) or fewer",
    ),
    (
        r"^(_orig_mod|_fsdp_wrapped_module|module)\.base_model\.model\.",
        "a PeftModel that torch.compile or a parallel wrapper held when it was saved",
    ),
    (r"\.lora_(down|up)\.weight$|^lora_(unet|te\d*|transformer)_|\.alpha$", "kohya"),
    (
        r"\.lora\.(down|up)\.weight$|^(unet|text_encoder\w*|transformer(?!\.h))\.|\.processor\.",
        "diffusers",
    ),
    (r"\.lora_[ab]$", "MLX"),
    (
        r"^(?!base_model\.model\.).*\.lora_[AB]\.weight$",
        "PEFT without the prefix base_model.model.",
    ),
)


def format_of(names: Iterable[str]) -> str | None:
    """Return the format that tensors are named in, where it is known and not PEFT's."""
    sample = [name for name in islice(names, _MOST_ENTRIES) if len(name) <= LONGEST_NAME]
    for pattern, name in _FORMATS:
        if any(re.search(pattern, key) for key in sample):
            return name
    return None


def check_pointer(path: Path, content: bytes) -> None:
    """Raise InvalidInputError for the text that a clone without Git LFS has in place of a file."""
    if content.startswith(b"version https://git-lfs"):
        what, given = "it is a Git LFS pointer to the file, not the file", f"{len(content)} bytes"
        to_do = "run `git lfs pull` in the clone, or download the file"
        raise InvalidInputError(problem(path, what, given, "the file itself", to_do))


def check_folder(folder: Path) -> None:
    """Raise InvalidInputError for a path that is no folder; it names hub ids and single files."""
    kind = kind_of(folder)
    if kind == "a folder":
        return
    to_do = _SAVED_BY_PEFT
    if kind == "a file" and folder.name in (CONFIG_FILE, SAFETENSORS_FILE, PICKLE_FILE):
        to_do = f"pass its folder, {folder.parent}"
    elif kind is None and re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        to_do += (
            f"; if {str(folder)!r} is an adapter on the Hugging Face hub, download it first, e.g. "
            f"with `hf download {folder}`, and pass the folder that it prints"
        )
    given = kind or "no such folder"
    raise InvalidInputError(problem(folder, "it is not a folder", given, "a folder", to_do))


def check_beside(folder: Path) -> None:
    """Raise UnsupportedInputError if other files than the adapter's hold trained weights."""
    names = sorted(name for name in names_in(folder) if _TRAINED_BESIDE.fullmatch(name))
    if names:
        what = "the folder has trained weights in files beside the adapter's, which PEFT ignores"
        allowed = f"all trained weights in {SAFETENSORS_FILE} or {PICKLE_FILE}"
        to_do = "merge them into the base model, and remove the files from the adapter's folder"
        raise UnsupportedInputError(problem(folder, what, names, allowed, to_do))


def no_config(folder: Path) -> InvalidInputError:
    """Return the error for a folder without adapter_config.json."""
    entries = _entries(folder)
    names = {entry.name for entry in entries}
    given, to_do = f"a folder without {CONFIG_FILE}", _SAVED_BY_PEFT
    below = sorted(_adapters_below(entries), key=_by_number)
    if below:
        given += f", but with adapters below it: {', '.join(below[:5])}{', ...' * (len(below) > 5)}"
        to_do = f"pass one of them, e.g. {folder / below[-1]}"
    elif foreign := _foreign(names):
        given, to_do = f"{given}, but with {foreign[0]}", foreign[1]
    elif "config.json" in names:
        given += ", but with the config.json of a whole model"
        if tasks := _packed_tasks(folder / "config.json"):
            given += f", whose tensors hold the LoRA of these tasks: {tasks}"
            to_do = BY_TASK
    elif any(name.endswith(".safetensors") for name in names - {SAFETENSORS_FILE}):
        given, to_do = f"{given}, but with other safetensors, e.g. of kohya", _CONVERT
    what = f"there is no {CONFIG_FILE}"
    return InvalidInputError(problem(folder, what, given, f"one with {CONFIG_FILE}", to_do))


def _packed_tasks(path: Path) -> str:
    """Return the tasks in a config.json like that of jina-embeddings-v3, or ""."""
    try:
        tasks = json.loads(read_text(path)).get("lora_adaptations")
    except (InvalidInputError, ValueError, RecursionError, AttributeError):  # no JSON object
        return ""
    return shown(tasks, 300) if tasks else ""


def no_weights(folder: Path) -> InvalidInputError:
    """Return the error for a folder with a configuration and no weights."""
    names = sorted(entry.name for entry in _entries(folder))
    shards = [
        name
        for name in names
        if re.match(r"adapter_model(-\d+-of-\d+\.|\.\w+\.index\.json$)", name)
    ]
    given, to_do = f"{CONFIG_FILE} alone", "copy the weights into the folder"
    if shards:  # safetensors that are numbered are read, and not these
        given = f"shards: {', '.join(shards[:4])}{', ...' * (len(shards) > 4)}"
        to_do = "copy the shards too, as safetensors, or save the adapter as one file"
    elif foreign := _foreign(names):
        given, to_do = f"{CONFIG_FILE}, and {foreign[0]}", foreign[1]
    allowed = f"{SAFETENSORS_FILE} or {PICKLE_FILE} beside {CONFIG_FILE}"
    return InvalidInputError(problem(folder, "there are no weights", given, allowed, to_do))


def _foreign(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the kind of weights that a folder holds instead of PEFT's, and the remedy."""
    names = sorted(names)
    for pattern, kind, to_do in _FOREIGN:
        matching = [name for name in names if re.fullmatch(pattern, name)]
        if matching:
            return f"{kind}: {', '.join(matching[:3])}{', ...' * (len(matching) > 3)}", to_do
    return None


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, some of many."""
    return [entry.name for entry in _entries(folder)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(islice(entries, _MOST_ENTRIES))
    except OSError:
        return []


def _adapters_below(entries: Iterable[os.DirEntry[str]]) -> Iterator[str]:
    for entry in entries:
        try:
            if entry.is_dir() and os.path.isfile(os.path.join(entry.path, CONFIG_FILE)):
                yield entry.name
        except OSError:  # gone, or not ours to read
            continue


def _by_number(name: str) -> tuple[int, str]:
    """Sort checkpoint-9 before checkpoint-10."""
    digits = re.search(r"\d{1,18}$", name)
    return (int(digits[0]) if digits else -1, name)
