"""Look for the private names of vLLM that the plug-in relies on, in vLLM's sources.

    python tools/vllm_names.py FOLDER

FOLDER holds the package vllm: unpacked sources, or an environment's site-packages. Nothing of it is
imported. Missing names are printed, and the exit status is then 1.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

RUNNER = "v1/worker/gpu/model_runner.py"

NAMES = {
    "envs.py": ["environment_variables"],
    "distributed/communication_op.py": ["tensor_model_parallel_all_gather"],
    "lora/layers/base.py": [
        "BaseLayerWithLoRA.set_mapping(punica_wrapper)",
        "BaseLayerWithLoRA.set_lora(index, lora_a, lora_b)",
        "BaseLayerWithLoRA.reset_lora(index)",
    ],
    "lora/layers/base_linear.py": [
        "BaseLinearLayerWithLoRA._apply_sync(x, bias)",
        "BaseLinearLayerWithLoRA._apply_lora_to_output(x, output)",
        "BaseLinearLayerWithLoRA._enable_aux_cuda_stream",
        "BaseLinearLayerWithLoRA.tp_rank",
    ],
    "lora/layers/column_parallel_linear.py": [
        "ColumnParallelLinearWithLoRA.slice_lora_b(lora_b)",
        "MergedColumnParallelLinearWithLoRA.slice_lora_b(lora_b)",
        "MergedColumnParallelLinearWithLoRA.n_slices",
    ],
    "lora/layers/fused_moe.py": [
        *(
            f"FusedMoEWithLoRA.{name}"
            for name in (
                *("local_num_experts", "moe_config"),
                *("w13_lora_a_stacked", "w2_lora_a_stacked"),
            )
        ),
    ],
    "model_executor/layers/fused_moe/config.py": [
        *(f"FusedMoEConfig.{name}" for name in ("num_experts", "num_local_experts")),
        *(f"FusedMoEParallelConfig.{name}" for name in ("dp_size", "ep_size", "use_ep")),
    ],
    "config/parallel.py": [
        f"ParallelConfig.{name}" for name in ("enable_eplb", "expert_placement_strategy")
    ],
    "lora/layers/logits_processor.py": ["LogitsProcessorWithLoRA.sharded_to_full_mapping"],
    "lora/layers/vocab_parallel_embedding.py": ["VocabParallelEmbeddingWithLoRA.lora_a_stacked_2d"],
    "lora/lora_model.py": [
        "LoRAModel.__init__(lora_model_id, rank, loras)",
        "LoRAModel.from_lora_tensors(lora_model_id, tensors, peft_helper, device, dtype, "
        "model_vocab_size, weights_mapper, skip_prefixes)",
    ],
    "lora/lora_weights.py": [
        "LoRALayerWeights.__init__(module_name, rank, lora_alpha, lora_a, lora_b, scaling)",
        "PackedLoRALayerWeights.__init__(module_name, rank, lora_alphas, lora_a, lora_b, scaling)",
    ],
    "lora/model_manager.py": [
        "LoRAModelManager.activate_adapter(lora_id)",
        "LoRAModelManager.deactivate_adapter(adapter_id)",
        "LoRAModelManager.get_adapter(adapter_id)",
        "LoRAModelManager.list_adapters()",
        "LoRAModelManager.remove_adapter(adapter_id)",
        "LoRAModelManager.set_adapter_mapping(mapping)",
        "LoRAModelManager._create_lora_modules()",
        "LoRAModelManager._create_merged_loras_inplace(lora_model)",
        *(
            f"LoRAModelManager.{name}"
            for name in (
                *("_last_mapping", "_registered_adapters", "is_pooling_model", "max_num_seqs"),
                *("lora_index_to_id", "model", "modules", "packed_modules"),
            )
        ),
    ],
    "lora/peft_helper.py": ["PEFTHelper.from_dict(config_dict)", "PEFTHelper.validate_legal()"],
    "lora/punica_wrapper/punica_base.py": [
        "PunicaWrapperBase.update_metadata(mapping, lora_index_to_id, max_loras, vocab_size)",
        "PunicaWrapperBase.add_lora_w13(topk_ids, topk_weights, expert_map)",
    ],
    "lora/request.py": [f"LoRARequest.lora_{name}" for name in ("int_id", "name", "path")],
    "lora/resolver.py": [
        "LoRAResolver.resolve_lora(base_model_name, lora_name)",
        "LoRAResolverRegistry",
    ],
    "lora/utils.py": [
        "get_adapter_absolute_path(lora_path)",
        "parse_fine_tuned_lora_name(name, weights_mapper)",
    ],
    "lora/worker_manager.py": [
        "WorkerLoRAManager._load_adapter(lora_request)",
        "WorkerLoRAManager.set_active_adapters(requests, mapping)",
        *(
            f"WorkerLoRAManager.{name}"
            for name in (
                *("_adapter_manager", "_lora_model_cls", "lora_config"),
                *("max_position_embeddings", "vocab_size"),
            )
        ),
    ],
    "entrypoints/generate/beam_search/offline.py": [
        "BeamSearchOfflineMixin.beam_search(lora_request)",
    ],
    "entrypoints/generate/beam_search/online.py": [
        "BeamSearchOnlineMixin.beam_search(lora_request)",
    ],
    "model_executor/layers/linear.py": [
        "ColumnParallelLinear.output_partition_sizes",
        "QKVParallelLinear.num_kv_head_replicas",
        "UnquantizedLinearMethod.apply(layer, x, bias)",
    ],
    "model_executor/layers/vocab_parallel_embedding.py": [
        "UnquantizedEmbeddingMethod.apply(layer, x, bias)",
        "VocabParallelEmbedding.get_sharded_to_full_mapping()",
        "VocabParallelEmbedding.org_vocab_size",
    ],
    "v1/core/block_pool.py": ["generate_block_hash_extra_keys"],
    "v1/core/kv_cache_utils.py": [
        "_gen_lora_extra_hash_keys(request)",
        "generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)",
    ],
    "v1/engine/core.py": [
        "EngineCore.add_lora(lora_request)",
        "EngineCore.collective_rpc(method, timeout, args, kwargs)",
        "EngineCore.model_executor",
        "EngineCore.preprocess_add_request(request)",
    ],
    "v1/engine/llm_engine.py": [
        "LLMEngine.abort_request(request_ids)",
        "LLMEngine.add_request(request_id)",
        "LLMEngine.collective_rpc(method, args)",
    ],
    "v1/request.py": ["Request.is_finished()", "Request.request_id"],
    "v1/executor/abstract.py": ["Executor.add_lora(lora_request)"],
    "v1/spec_decode/llm_base_proposer.py": ["SpecDecodeBaseProposer.load_model()"],
    "v1/worker/cpu_worker.py": ["CPUWorker.determine_available_memory()"],
    "v1/worker/gpu/input_batch.py": [
        f"InputBatch.{name}"
        for name in ("num_computed_tokens_np", "num_scheduled_tokens", "req_ids")
    ],
    "v1/worker/gpu/mm/encoder_runner.py": ["group_and_batch_mm_kwargs"],
    RUNNER: [
        "GPUModelRunner.add_requests(scheduler_output)",
        "GPUModelRunner.capture_model()",
        "GPUModelRunner.prepare_inputs(scheduler_output)",
        "GPUModelRunner.sample(hidden_states, input_batch)",
        "set_active_mm_loras",
    ],
    "v1/worker/gpu/sample/prompt_logprob.py": [
        "PromptLogprobsWorker.compute_prompt_logprobs(logits_fn, hidden_states)"
    ],
    "v1/worker/gpu/spec_decode/speculator.py": ["DraftModelSpeculator.load_model()"],
    "v1/worker/gpu_input_batch.py": [
        f"InputBatch.{name}"
        for name in ("num_computed_tokens_cpu", "num_prompt_tokens", "token_ids_cpu")
    ],
    "v1/worker/gpu_model_runner.py": [
        "GPUModelRunner._get_prompt_logprobs_dict(hidden_states)",
        "GPUModelRunner._preprocess(scheduler_output)",
        "GPUModelRunner.capture_model()",
        "GPUModelRunner.num_prompt_logprobs",
        "group_and_batch_mm_kwargs",
    ],
    "v1/worker/gpu_worker.py": ["Worker.determine_available_memory()"],
    "v1/worker/worker_base.py": ["WorkerBase"],
    "v1/worker/lora_model_runner_mixin.py": [
        "LoRAModelRunnerMixin.lora_manager",
        "LoRAModelRunnerMixin.set_active_loras(input_batch, num_scheduled_tokens, "
        "num_sampled_tokens)",
        "LoRAModelRunnerMixin._set_active_loras()",
    ],
}
"""By file: functions and classes, methods and attributes of a class, with the parameters passed."""

OLD_FILES = {
    "lora/layers/vocab_parallel_embedding.py": "lora/layers/vocal_parallel_embedding.py",
}
"""Names of files in older versions."""


def missing(package: Path) -> list[str]:
    """Return the names that the sources of a version lack, each with its file."""
    found = []
    for file, names in NAMES.items():
        path = package / file
        if not path.is_file():
            path = package / OLD_FILES.get(file, file)
        if not path.is_file():
            found.append(f"{file}: no such file")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{file}: {name}" for name in names if not _has(tree, name)]
    return found


def _has(tree: ast.Module, wanted: str) -> bool:
    path, is_function, rest = wanted.partition("(")
    *owner, name = path.split(".")
    scopes: list[ast.AST] = [tree]
    if owner:
        scopes = [
            node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner[0]
        ]
    for scope in scopes:
        for function in _functions(scope):
            if function.name == name:
                arguments = function.args
                every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                parameters = {argument.arg for argument in every}
                return parameters >= {each for each in rest.rstrip(")").split(", ") if each}
        if not is_function and name in _assigned(scope, within=bool(owner)):
            return True
    return False


def _functions(scope: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in getattr(scope, "body", ()):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _assigned(scope: ast.AST, within: bool) -> set[str]:
    """Return the names that a module or class defines, and attributes that methods set on self."""
    names = set()
    nodes = ast.walk(scope) if within else iter(getattr(scope, "body", ()))
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for each in ast.walk(target):
                    if isinstance(each, ast.Name):
                        names.add(each.id)
                    elif isinstance(each, ast.Attribute):
                        names.add(each.attr)
    return names


def main() -> int:
    """Print what the folder of the command line lacks; return the exit status."""
    folder = Path(sys.argv[1])
    package = folder / "vllm" if (folder / "vllm").is_dir() else folder
    lacking = missing(package)
    print("\n".join(lacking) or f"all {sum(map(len, NAMES.values()))} names are there")
    return int(bool(lacking))


if __name__ == "__main__":
    sys.exit(main())
