"""Engines and layers of vLLM and SGLang, as tests of the plug-ins need them."""
