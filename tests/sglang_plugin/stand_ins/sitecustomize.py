"""What SGLang needs on a CPU besides its own Python: nothing here takes part in LoRA.

Python imports this module in every process whose PYTHONPATH names the folder. SGLang has no build
for CPUs on the index: its compiled packages have stand-ins that name anything and run nothing,
pinned memory is plain memory, and the products of a mixture's experts are torch's.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
import types

ABSENT = ("torchvision", "sgl_kernel", "flashinfer")
PINNED = ("arange", "empty", "full", "ones", "tensor", "zeros")


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args, **kwargs):
        raise RuntimeError(f"a stand-in cannot run: {cls.__name__}")

    def __hash__(cls):
        return id(cls)


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            _forget_pinned_memory()
        elif name == "sglang.srt.layers.moe.moe_runner.runner":
            return _after_import(name, path, lambda module: _run_experts_by_torch(module.MoeRunner))
        elif name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _AbsentModule(spec.name)
        module.__version__, module.__file__, module.__path__ = "9.9.9", "stand-in", []
        return module

    def exec_module(self, module):
        pass


def _after_import(name, path, change):
    """Return the spec of a module that is changed once it is imported."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    execute = spec.loader.exec_module

    def execute_and_change(module):
        execute(module)
        change(module)

    spec.loader.exec_module = execute_and_change
    return spec


def _forget_pinned_memory():
    import torch
    from torch.utils._device import _device_constructors

    if hasattr(torch.tensor, "__wrapped__"):
        return
    _device_constructors()  # torch keeps which functions take a default device: these, not wrappers
    for name in PINNED:
        made = getattr(torch, name)

        def make(*args, made=made, pin_memory=False, **kwargs):
            return made(*args, **kwargs)

        setattr(torch, name, functools.wraps(made)(make))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


def _run_experts_by_torch(runner):
    """Replace the Triton kernels of a mixture's base products; the hooks for LoRA stay."""
    import torch

    def run(self, dispatch_output, quant_info, lora_info=None):
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
        from sglang.srt.lora.lora_moe_runners import LoRAHooks, build_lora_hooks

        x, (weights, ids) = dispatch_output.hidden_states, dispatch_output.topk_output[:2]
        hooks = build_lora_hooks(x, lora_info, ids) if lora_info is not None else LoRAHooks()
        first = torch.einsum("td,tkod->tko", x, quant_info.w13_weight[ids.long()])
        if hooks.after_gate_up:
            hooks.after_gate_up(x, first, weights, ids)
        gate, up = first.chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).flatten(0, 1)
        products = torch.einsum(
            "tkd,tkod->tko", inner.view(*ids.shape, -1), quant_info.w2_weight[ids.long()]
        )
        second = products * weights[..., None].to(x.dtype)
        if hooks.after_down:
            hooks.after_down(inner, second, weights, ids)
        return StandardCombineInput(hidden_states=second.sum(1))

    runner.run = run


sys.meta_path.insert(0, _Finder())
