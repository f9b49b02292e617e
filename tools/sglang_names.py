"""Check that versions of SGLang have the names which the plug-in relies on, without importing them.

    python tools/sglang_names.py FOLDER...

Each FOLDER holds the package `sglang` of one version, such as an unpacked wheel. Prints what each
lacks; the exit status is 1 if one lacks a name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

LORA = "sglang/srt/lora"
RELIED: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang/srt/plugins/__init__.py": {"GENERAL_PLUGINS_GROUP": (), "load_plugins": ()},
    f"{LORA}/backend/lora_registry.py": {
        "LORA_SUPPORTED_BACKENDS": (),
        "register_lora_backend": ("name",),
        "create_triton_csgmv_backend": (),
    },
    f"{LORA}/backend/base_backend.py": {
        "BaseLoRABackend.__init__": ("max_loras_per_batch", "device"),
        "BaseLoRABackend.run_lora_a_embedding": ("input_ids", "weights", "vocab_size"),
        "BaseLoRABackend.run_lora_a_sgemm": ("x", "weights"),
        "BaseLoRABackend.run_lora_b_sgemm": ("x", "weights"),
        "BaseLoRABackend.run_qkv_lora": ("x", "qkv_lora_a", "qkv_lora_b"),
        "BaseLoRABackend.run_gate_up_lora": ("x", "gate_up_lora_a", "gate_up_lora_b"),
        "BaseLoRABackend.prepare_lora_batch": (
            "forward_batch",
            "weight_indices",
            "lora_ranks",
            "scalings",
        ),
    },
    f"{LORA}/backend/lmhead_mixing.py": {
        "LoRABackendLmHeadMixing.init_lm_head_config": (),
        "LoRABackendLmHeadMixing._get_lm_head_pass_segments": ("weight_indices", "pruned_lens"),
    },
    f"{LORA}/utils.py": {
        "generate_sequence_lengths": ("forward_batch", "device"),
        "get_lm_head_pruned_lens": ("forward_batch",),
    },
    f"{LORA}/lora_manager.py": {
        "LoRAManager.init_memory_pool": (),
        "LoRAManager.update_lora_info": (),
        "LoRAManager.validate_new_adapter": ("lora_config", "lora_ref"),
        "LoRAManager.prepare_lora_batch": ("forward_batch",),
    },
    f"{LORA}/lora.py": {
        "LoRAAdapter._process_weight": ("name",),
        "LoRAAdapter._normalize_weights": (),
    },
    f"{LORA}/mem_pool.py": {
        "LoRAMemoryPool.load_lora_weight_to_buffer": ("uid", "buffer_id", "lora_adapter"),
    },
    f"{LORA}/layers.py": {
        "FusedMoEWithLoRA._get_lora_info": (),
        "FusedMoEWithLoRA.set_lora_info": (
            "gate_up_lora_a_weights",
            "gate_up_lora_b_weights",
            "down_lora_a_weights",
            "down_lora_b_weights",
        ),
    },
    f"{LORA}/lora_moe_runners.py": {
        "build_lora_hooks": ("hidden_states", "lora_info", "topk_ids"),
        "LoRAHooks.after_gate_up": (),
        "LoRAHooks.after_down": (),
    },
    "sglang/srt/model_executor/runner_utils/capture_mode.py": {"is_capture_mode": ()},
}
"""By file: names, and the parameters that each must have."""


def names_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each name that a module or a class defines, with the parameters of a function."""
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            of_call = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield prefix + node.name, tuple(argument.arg for argument in of_call)
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name, ()
            yield from names_of(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, ()
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield prefix + (alias.asname or alias.name), ()


def lacking(folder: Path) -> Iterator[str]:
    """Yield each name, or parameter, that a version lacks."""
    for file, relied in RELIED.items():
        path = folder / file
        found = dict(names_of(ast.parse(path.read_text()))) if path.exists() else {}
        for name, parameters in relied.items():
            if name not in found:
                yield f"{file}: {name}"
            elif missing := [each for each in parameters if each not in found[name]]:
                yield f"{file}: {name}({', '.join(missing)})"


def main(folders: Sequence[str]) -> int:
    """Print what each version lacks, and return the exit status."""
    if not folders:
        raise SystemExit(__doc__)
    status = 0
    for folder in folders:
        found = list(lacking(Path(folder)))
        status |= bool(found)
        print(f"{folder}: {'lacks' if found else 'has every name'}")
        for line in found:
            print(f"  {line}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
