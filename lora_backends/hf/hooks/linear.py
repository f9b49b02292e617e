"""The forward hooks. They run at every module that an adapter may touch, so they do little."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from lora_backends.backend import LoRABackend
from lora_backends.dispatch.any_axes import over_rows
from lora_backends.dispatch.many_adapters import ManyAdaptersPlan
from lora_backends.dispatch.repeats import NO_REPEATS
from lora_backends.dispatch.tracing import is_jit_traced, is_traced
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.calls.attention import Attention
from lora_backends.hf.calls.running import RUNNING, check_thread, is_open
from lora_backends.hf.layout.layout import Layout, misfit_of
from lora_backends.hf.layout.sites import ModuleSite
from lora_backends.hf.layout.structure import Structure
from lora_backends.weights import LoRAWeights

Hook = Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]


class Served(NamedTuple):
    """The data that all hooks of one wrapper share."""

    model: str  # key of the wrapper: the hooks serve calls of this model alone
    backend: LoRABackend  # adds the LoRA
    layouts: Mapping[str, Layout]  # of the modules' inputs, by path


def begin_hook(
    model: str,
    structure: Structure,  # calls check it themselves, blocks of `using` do it here
    main_input: str,  # the first argument's name
    forward: Callable[..., Any],  # of the base model
    attention: Attention,  # passes that it cannot run are refused
) -> Callable[..., None]:
    """Return the pre-hook that announces a forward pass of the base model to the running call."""
    names = _positional(forward, main_input)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = RUNNING.call
        if attention.is_paged and not (call.model == model and call.reads_pages):
            attention.check()
        if call.model != model:
            if call.trains != model:
                check_thread(model)
                return
            if is_traced():
                raise UnsupportedInputError(
                    "torch.compile cannot trace a call that trains adapters\n"
                    "  to do: run it without torch.compile"
                )
        if not is_traced():
            if (
                is_jit_traced()
            ):  # whatever the backend: a trace would keep the adapters of this call
                raise UnsupportedInputError(
                    "torch.jit.trace cannot record a call with adapters, which a later call changes"
                    "\n  allowed: torch.compile, or the trace of a model with the adapter merged"
                )
            # Calls have checked it once; a block may run many passes.
            if is_open(model):
                structure.check_modules()
                structure.check_state()
            RUNNING.kept = None  # of a forward pass that has failed
        inputs = {**kwargs, **dict(zip(names, args, strict=False))} if args else kwargs
        # By name, whatever the order in which the caller passed them.
        call.begin_forward(inputs, *rows_and_length(inputs, main_input))
        if not is_traced():
            # A traced program would keep the stored calls of its first run.
            RUNNING.repeats = call.repeats()

    return begin


def first_input(forward: Callable[..., Any], main_input: str) -> str:
    """Return the name of the argument that is given first by position."""
    parameter = next(iter(inspect.signature(forward).parameters.values()), None)
    if parameter is None or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
        return main_input
    return parameter.name


def _positional(forward: Callable[..., Any], main_input: str) -> list[str]:
    """Return 64 names or more of arguments by position, so that an extra argument has one, too."""
    try:
        parameters = [*inspect.signature(forward).parameters.values()]
    except (TypeError, ValueError):  # no Python function
        parameters = []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in by_position]
    return [main_input, *names[1:], *(f"argument {at}" for at in range(len(names), 64))]


def end_hook(*_: Any) -> None:
    """Let modules that are called outside of a forward pass make all checks."""
    if not is_traced():
        RUNNING.repeats = NO_REPEATS


def lora_hook(served: Served, site: ModuleSite, add: Callable[..., Tensor]) -> Hook:
    """Return the hook that adds the running call's LoRA to the output of one module by `add`."""
    model, backend, layout = served.model, served.backend, served.layouts[site.path]
    path, paths, width = site.path, (site.path,), site.spec.out_features
    is_embedding = site.spec.kind == "embedding"

    def add_lora(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        call = RUNNING.call
        try:
            if call.model != model:
                if call.trains == model:
                    x = first_argument(args, f"module {path}")
                    return call.add(site, layout, module, x, output)
                check_thread(model)
                return None
            # Often no loaded adapter touches the module.
            weights = call.stacks.get(path)
            if weights is None:
                return None
            # without a call of its own: every adapted module comes by here in every step
            x = args[0] if args else first_argument(args, f"module {path}")
            if not is_embedding:
                return add(x, weights, call.plan(x.shape[:-1], layout, paths), output)
            plan, output = call.plan(x.shape, layout, paths), output.contiguous()
            ids = x.flatten().contiguous()  # [rows, 1] may be a column of a wider tensor
            add_deltas(backend.run_embedding, ids, weights, plan, output.view(-1, width))
            return output
        except AttributeError:
            # perhaps x or output is no tensor: a check beforehand would cost time in every step
            check_fit(path, module, args, output)
            raise

    return add_lora


def first_argument(args: tuple[Any, ...], called: str) -> Tensor:
    """Return the input of a module or router, or refuse a call by name."""
    if not args:
        raise UnsupportedInputError(
            f"{called} is called with arguments by name\n"
            f"  allowed: its input as the first argument by position"
        )
    x: Tensor = args[0]
    return x


def check_fit(path: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
    """Raise UnsupportedInputError if a module takes or returns anything but one tensor."""
    misfit = misfit_of(args, output)
    if misfit:
        raise UnsupportedInputError(
            f"adapters cannot change module {path} ({type(module).__name__}): {misfit}\n"
            f"  allowed: a module that takes one tensor first, and returns one tensor\n"
            f"  to do: leave the module out of target_modules and modules_to_save, "
            f"or change its forward"
        )


def add_deltas(
    run: Callable[..., Tensor], x: Tensor, weights: LoRAWeights, plan: Any, y: Tensor
) -> None:
    """Add the LoRA of each row to y by an operation of the backend."""
    if weights.output_scales is None or not isinstance(plan, ManyAdaptersPlan):
        run(x, weights, plan, y)
        return
    # The operation refuses several adapters per token where a layer has output_scales. A model's
    # rows have a blend or DoRA, never both (`Choices`), and scales of 1 without DoRA. So one
    # adapter after another gives their sum here, too.
    for part in plan.plans:
        run(x, weights, part, y)


def adder(backend: LoRABackend, operation: str) -> Callable[..., Tensor]:
    """Return a function that adds a layer's LoRA to y [..., out_features] by an operation."""
    return over_rows(backend, operation, partial(add_deltas, getattr(backend, operation)))


def rows_and_length(inputs: Mapping[str, Any], main_input: str) -> tuple[int, int]:
    """Return the rows and the tokens per row that a forward pass is given, or refuse it."""
    for key in (
        "decoder_input_ids",
        "decoder_inputs_embeds",
        "input_ids",
        "inputs_embeds",
        main_input,
    ):
        tokens = inputs.get(key)
        if isinstance(tokens, Tensor) and tokens.ndim >= 2 and tokens.shape[1]:
            return tokens.shape[0], tokens.shape[1]
    raise InvalidInputError(
        f"no tokens to run on\n  given: {', '.join(inputs) or 'nothing'}\n"
        f"  allowed: input_ids [rows, tokens], inputs_embeds [rows, tokens, hidden]"
        + f", or {main_input} [rows, ...]"
        * (main_input != "input_ids")
    )
