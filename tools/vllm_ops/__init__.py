"""vLLM's LoRA operators, by vLLM's names and signatures, on a backend of this library.

Each takes the arguments of the operator of the same name in `vllm.lora.ops.triton_ops`, or in
`vllm._custom_ops`, and one of its own: `backend`, by default the one that `get_backend()` returns
for the device of the inputs. vLLM itself is not needed.

They run vLLM's own tests against the backends (tools/vllm_own_tests.py), and are for tests only:
they read vLLM's metadata on the host, so each call waits for the device once, except
`moe_lora_align_block_size`. An engine runs the plug-in, which plans a batch once for all layers.
"""

from vllm_ops.align import moe_lora_align_block_size
from vllm_ops.dense import lora_expand, lora_shrink
from vllm_ops.eight_bit import lora_expand_fp8, lora_shrink_fp8
from vllm_ops.experts import fused_moe_lora

__all__ = [
    "fused_moe_lora",
    "lora_expand",
    "lora_expand_fp8",
    "lora_shrink",
    "lora_shrink_fp8",
    "moe_lora_align_block_size",
]
