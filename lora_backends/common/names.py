"""Names that users write, and that more than one module reads."""

PEFT_BASE = "__base__"
"""PEFT's name for a row without an adapter."""
AUTO = "auto"
"""The backend, device or dtype that the library chooses."""
ENV_PREFIX = "LORA_BACKENDS_"
"""The prefix of the library's environment variables."""
TILES_VARIABLE = ENV_PREFIX + "TILES"
"""The environment variable that names the user's folder of tile tables."""

VLLM_VARIABLE = ENV_PREFIX + "VLLM"
"""The environment variable that wakes the plug-in for vLLM: "auto", or the name of a backend."""
VLLM_FACTORS_VARIABLE = ENV_PREFIX + "VLLM_FACTORS"
"""The environment variable that makes room for DoRA and lora_bias in vLLM's CUDA graphs: "1"."""

SGLANG_VARIABLE = ENV_PREFIX + "SGLANG"
"""The environment variable that wakes the plug-in for SGLang: "auto", or the name of a backend."""
