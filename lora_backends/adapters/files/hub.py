"""Adapters on the Hugging Face hub: finds them in the local cache, or downloads them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from lora_backends.adapters.files.formats import CONFIG_FILE, PICKLE_FILE, SAFETENSORS_FILE
from lora_backends.adapters.files.messages import problem
from lora_backends.common.files import as_path, kind_of
from lora_backends.errors import InvalidInputError, shown

_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_ID = re.compile(
    rf"(?P<id>{_PART}/{_PART})(@(?P<revision>refs/\w+/\d+|{_PART})(?P<subfolder>(/{_PART})*))?"
)
_SAFE = [CONFIG_FILE, SAFETENSORS_FILE, "adapter_model-*-of-*.safetensors", "non_lora_*"]
"""The last are trained weights beside the adapter: `read_checkpoint` refuses them, unread."""


def local_folder(name: str | Path) -> Path:
    """Return the folder that a user names, or that of an adapter on the hub.

    An adapter on the hub is ORGANISATION/NAME, or ORGANISATION/NAME@REVISION/FOLDER with a branch,
    tag or commit, as in huggingface_hub's file system. A name that exists as a path is a path.
    huggingface_hub decides whether there is a network (HF_HUB_OFFLINE) and where its cache lies
    (HF_HOME).

    Raises:
        InvalidInputError: it is neither a path nor on the hub.
    """
    path = as_path(name, "the folder of a checkpoint")
    # Only a str may be an id: a Path names a folder.
    is_id = _ID.fullmatch(name) if isinstance(name, str) else None
    if (
        is_id is None
        or kind_of(path) is not None
        or not importlib.util.find_spec("huggingface_hub")
    ):
        return path
    from huggingface_hub import snapshot_download

    subfolder = (is_id["subfolder"] or "").removeprefix("/")

    def downloaded(names: list[str]) -> Path:
        patterns = [f"{subfolder}/{name}" for name in names] if subfolder else names
        root = snapshot_download(is_id["id"], revision=is_id["revision"], allow_patterns=patterns)
        return Path(root) / subfolder

    try:
        folder = downloaded(_SAFE)
        weights = [*folder.glob("adapter_model*.safetensors")]
        if not weights:  # a pickle only where there is nothing else
            folder = downloaded([*_SAFE, PICKLE_FILE])
    except Exception as error:  # of huggingface_hub, of the network, of the file system
        what = "it is neither a folder nor an adapter on the Hugging Face hub"
        first = (str(error).splitlines() or [""])[0]
        facts = ["no such folder", f"{type(error).__name__}: {shown(first, 300)}"]
        to_do = (
            f"pass the folder that PEFT's save_pretrained wrote; or download it with "
            f"`hf download {is_id['id']}` where there is a network"
        )
        raise InvalidInputError(
            problem(path, what, facts, "a folder, or the id of an adapter", to_do)
        ) from error
    return folder
