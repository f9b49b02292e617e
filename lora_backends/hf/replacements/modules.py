"""Builds an adapter's replacements of base modules, and hooks the modules that they replace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lora_backends.adapters import Checkpoint, ModuleSpec, OwnParameter, TokenRows
from lora_backends.adapters.peft.old_names import renamed
from lora_backends.adapters.pool.stack_format import bytes_of
from lora_backends.dispatch.any_axes import as_rows
from lora_backends.errors import InvalidInputError, UnsupportedInputError, did_you_mean
from lora_backends.hf.calls.running import RUNNING
from lora_backends.hf.hooks.linear import Hook, check_fit, first_argument
from lora_backends.hf.layout.layout import Layout
from lora_backends.hf.layout.probe import UNREACHED, probe
from lora_backends.hf.layout.quantized_base import is_plain, packed_size
from lora_backends.hf.layout.sites import ModuleSite, token_embedding_of
from lora_backends.hf.layout.twin import without_hooks
from lora_backends.hf.replacements.promised import check_promises, check_unpromised
from lora_backends.hf.replacements.proof import reason_against
from lora_backends.hf.replacements.rows import Replacement, replace_rows
from lora_backends.hf.replacements.tying import check_tying


@dataclass(frozen=True)
class Invocation:
    """aLoRA: the adapter acts on a row from the last place of these tokens in it on."""

    tokens: tuple[int, ...]


class Replacements:
    """The modules of adapters that take the place of one base model's."""

    def __init__(
        self,
        model: str,
        base: nn.Module,
        layouts: MutableMapping[str, Layout],  # more are added when they are needed
        handles: list[Any],  # of hooks
        fused: bool,  # LoRA may be a part of a module's `forward`
    ) -> None:
        self._model, self._base = model, base
        self._layouts, self._handles, self._fused = layouts, handles, fused
        self._modules = dict(base.named_modules())
        # A tied parameter has several modules, and each of them needs the replacement.
        self._holders: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for path, module in self._modules.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._holders[id(parameter)].append((path, name))
        self._lock = Lock()

    def __call__(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return an adapter's replacements of base modules, by path, and hook these modules.

        Raises:
            InvalidInputError: it does not fit the base model.
            UnsupportedInputError: a module of a kind that cannot be replaced row by row.
        """
        # Checks first, hooks last: a refused adapter leaves nothing at the model.
        self._check_invocation(checkpoint)
        check_tying(self._base, checkpoint)
        self._check_residuals(checkpoint)
        values = self._values(checkpoint)
        tokens = self._tokens(checkpoint)
        check_promises(self._base, checkpoint)
        check_unpromised(self._base, checkpoint)
        replacements: dict[str, Any] = {}
        for path in dict.fromkeys([*values, *tokens]):
            replacements[path] = self._replacement(
                checkpoint, path, values.get(path, {}), tokens.get(path)
            )
        if replacements and checkpoint.own.invocation:
            # PEFT uses those for every token of a row; ours would begin at the invocation, too.
            raise UnsupportedInputError(
                f"{checkpoint.folder} acts from its invocation tokens on (aLoRA), and has modules "
                f"of its own besides\n"
                f"  given: alora_invocation_tokens, and {', '.join([*replacements][:3])}"
                f"{', ...' * (len(replacements) > 3)}\n"
                f"  allowed: aLoRA without modules_to_save, biases or trainable_token_indices\n"
                f"  to do: merge these modules into a base model of its own"
            )
        if replacements:
            with self._lock:  # a bias would be added twice by hooks of two loads
                # Norms take no LoRA, so the wrapper has not looked at them.
                self._probe([path for path in replacements if path not in self._layouts])
                self._try(checkpoint, values, tokens, replacements)
                self._hook(replacements)
        if checkpoint.own.invocation:
            replacements[""] = Invocation(checkpoint.own.invocation)
        return replacements

    def _check_invocation(self, checkpoint: Checkpoint) -> None:
        """Refuse aLoRA where PEFT ignores invocations and computes the base model."""
        kind = getattr(getattr(self._base, "config", None), "model_type", None)
        task = checkpoint.own.task_type
        if checkpoint.own.invocation and (kind == "mpt" or task != "CAUSAL_LM"):
            raise UnsupportedInputError(
                f"{checkpoint.folder} acts from its invocation tokens on (aLoRA), which PEFT does "
                f"not run here\n"
                f"  given: alora_invocation_tokens, task_type {task!r}, model_type {kind!r}\n"
                f"  allowed: task_type 'CAUSAL_LM' on a model other than MPT\n"
                f"  to do: train the adapter without alora_invocation_tokens, or correct task_type"
            )

    def _check_residuals(self, checkpoint: Checkpoint) -> None:
        """Refuse PiSSA and OLoRA of a weight that other modules share: PEFT changes those, too."""
        for path, delta in checkpoint.modules.items():
            weight = self._modules[path]._parameters.get("weight") if delta.init else None
            if weight is not None and len(self._holders[id(weight)]) > 1:
                raise UnsupportedInputError(
                    f"{checkpoint.folder} has init_lora_weights = {delta.init!r} for {path}, whose "
                    f"weight other modules share\n  to do: save the adapter with "
                    f"path_initial_model_for_weight_conversion"
                )

    def _values(self, checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
        """Return the parameters that differ from the base model's, by path of their module."""
        parameters = dict(checkpoint.own.parameters)
        for path, weight in checkpoint.base_weights.items():
            parameters[f"{path}.weight"] = OwnParameter(weight, alone=False)
        values: dict[str, dict[str, Tensor]] = defaultdict(dict)
        named: dict[tuple[str, str], Tensor] = {}
        for called, parameter in parameters.items():
            module_name, _, leaf = called.rpartition(".")
            first = named.setdefault((renamed(module_name, self._modules), leaf), parameter.value)
            if first.dtype != parameter.value.dtype or not first.equal(parameter.value):
                raise _two_names(checkpoint, f"a tensor {called!r}")
            for path, name, base in self._places(checkpoint, called, parameter.alone):
                if not is_plain(base):
                    raise _quantized(checkpoint, path)
                value = parameter.value.to(base.device, base.dtype)
                before = values[path].get(name) if path in values else None
                if before is not None and not before.equal(value):
                    raise UnsupportedInputError(
                        f"{checkpoint.folder} has two values for {path}.{name}, which the base "
                        f"model shares with other modules\n  allowed: one value"
                    )
                # PEFT saves whole modules: most of their values are the base's.
                if value.shape != base.shape or not value.equal(base):
                    values[path][name] = value
        return {path: changed for path, changed in values.items() if changed}

    def _places(
        self, checkpoint: Checkpoint, called: str, alone: bool
    ) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the modules that hold a parameter, its names there and the base's value."""
        module_name, _, name = called.rpartition(".")
        path = renamed(module_name, self._modules)
        module = self._modules.get(path)
        base = None if module is None else module._parameters.get(name)
        if base is None and module is not None and packed_size(module) is not None:
            raise _quantized(checkpoint, path)
        if base is None:
            raise InvalidInputError(
                f"{checkpoint.folder} has a tensor of its own for {called!r}, which the base model "
                f"lacks{did_you_mean(module_name, self._modules)}\n"
                f"  to do: load it on the kind of model that it was trained on"
                f"{_kind_of_head(module_name)}"
            )
        places = [(path, name)] if alone else self._holders[id(base)]
        for place, other_name in places:
            yield place, other_name, base

    def _tokens(self, checkpoint: Checkpoint) -> dict[str, TokenRows]:
        """Return the rows of embeddings that are replaced, by path; tied heads follow."""
        tokens: dict[str, TokenRows] = {}
        by_path: dict[str, TokenRows] = {}
        for called, rows in checkpoint.own.tokens.items():
            first = by_path.setdefault(renamed(called, self._modules), rows)
            if rows.ids != first.ids or not rows.values.equal(first.values):
                raise _two_names(checkpoint, f"rows of {called!r}")
        for path, rows in by_path.items():
            embedding = self._modules.get(path)
            weight = None if embedding is None else embedding._parameters.get("weight")
            if not isinstance(embedding, nn.Embedding) or weight is None:
                raise InvalidInputError(
                    f"{checkpoint.folder} replaces rows of {path!r}, which is no embedding of the "
                    f"base model\n  to do: load it on the model that it was trained on"
                )
            if not is_plain(weight):
                raise _quantized(checkpoint, path)
            if rows.values.shape[1] != weight.shape[1] or max(rows.ids) >= weight.shape[0]:
                raise InvalidInputError(
                    f"{checkpoint.folder} replaces rows of {path!r} that the base model lacks\n"
                    f"  given: {list(rows.values.shape)}, ids up to {max(rows.ids)}\n"
                    f"  allowed: rows of {list(weight.shape)}\n"
                    f"  to do: base.resize_token_embeddings({max(rows.ids) + 1})"
                )
            # A tied head computes with the same rows.
            for place, _ in self._holders[id(weight)]:
                tokens[place] = by_path.get(place, rows)
        return tokens

    def _replacement(
        self,
        checkpoint: Checkpoint,
        path: str,
        values: Mapping[str, Tensor],
        rows: TokenRows | None,
    ) -> Replacement:
        """Return the replacement of one module."""
        module = self._modules[path]
        self._check_kind(checkpoint, path, module)
        width = self._check_shapes(checkpoint, path, module, values)
        delta = checkpoint.modules.get(path)
        # A bias alone is added after LoRA, so both may be there.
        whole = bool(set(values) - {"bias"}) or rows is not None
        if delta is not None and whole and (self._fused or delta.magnitude is not None or width):
            raise UnsupportedInputError(
                f"{checkpoint.folder} has both LoRA and a weight of its own for {path}\n"
                f"  allowed: without DoRA, with as many outputs, and with MultiLoRAModel(..., "
                f"fuse=False)"
            )
        made: dict[str, Any] = {"width": width, "nbytes": bytes_of(*values.values())}
        linear = isinstance(module, nn.Linear | Conv1D)
        if set(values) == {"bias"} and linear:
            bias = cast(Tensor, module.bias)
            made["bias"] = values["bias"] - bias.detach()
        elif values:
            made["module"] = _copy(module, values)
        if rows is not None:
            if linear and _is_nonzero(values.get("bias", module.bias)):
                # PEFT's model computes the head without its bias until the adapter is merged.
                raise UnsupportedInputError(
                    f"{checkpoint.folder} replaces rows of an embedding that {path} shares, whose "
                    f"bias PEFT leaves out\n  given: trainable_token_indices, and a bias that is "
                    f"not 0\n  allowed: a tied head without a bias\n"
                    f"  to do: merge the adapter into a base model of its own"
                )
            weight = cast(Tensor, module.weight)
            parts = {"weight": rows.values.to(weight.device, weight.dtype)}
            made["nbytes"] += bytes_of(parts["weight"])
            made["tokens"] = torch.tensor(rows.ids, device=weight.device)
            if linear and module.bias is not None:
                parts["bias"] = cast(Tensor, module.bias).detach()[made["tokens"]]
            made["token_module"] = _copy(module, parts)
        return Replacement(**made)

    def _check_kind(self, checkpoint: Checkpoint, path: str, module: nn.Module) -> None:
        """Refuse a module that may not work on each position alone."""
        norm = type(module).__name__.endswith("Norm") and all(
            parameter.ndim == 1 for parameter in module.parameters()
        )
        kinds = nn.Linear | Conv1D | nn.Embedding
        if not (norm or isinstance(module, kinds)) or "experts" in path.split("."):
            raise UnsupportedInputError(
                f"{checkpoint.folder} has a {type(module).__name__} of its own for {path}\n"
                f"  allowed: linear layers, embeddings and norms of its own, whose rows are known\n"
                f"  to do: merge the adapter into a base model, or train without that module in "
                f"modules_to_save"
            )

    def _check_shapes(
        self, checkpoint: Checkpoint, path: str, module: nn.Module, values: Mapping[str, Tensor]
    ) -> int | None:
        """Return the number of outputs, where a head has others than the base's."""
        wrong = []
        for name, value in values.items():
            base = cast(Tensor, module._parameters[name])
            if value.shape != base.shape:
                wrong.append(f"{path}.{name}: {list(value.shape)}, the base has {list(base.shape)}")
        if not wrong:
            return None
        base_shape = cast(Tensor, module.weight).shape
        weight = values.get("weight")
        sized = [n for n, p in module._parameters.items() if p is not None and n not in values]
        head = type(module) is nn.Linear and path in self._heads()
        if head and weight is not None and weight.ndim == 2 and not sized:
            if weight.shape[1:] == base_shape[1:]:
                return weight.shape[0]
        vocabulary = path not in self._heads()
        to_do = "load the base model with the sizes that the adapter was trained with"
        if weight is not None and vocabulary and weight.ndim == 2:
            to_do += f", e.g. base.resize_token_embeddings({weight.shape[0]})"
        raise InvalidInputError(
            f"{checkpoint.folder} has modules of its own of other sizes\n  given: "
            + "\n  given: ".join(wrong)
            + f"\n  to do: {to_do}"
        )

    def _heads(self) -> list[str]:
        """Return the linear layers that may be heads: in no stack of layers, no embedding."""
        output = getattr(self._base, "get_output_embeddings", lambda: None)()
        # A head of tokens has the vocabulary's size, which no adapter changes.
        ties = (output, token_embedding_of(self._base))
        return [
            path
            for path, module in self._modules.items()
            if isinstance(module, nn.Linear)
            and module not in ties
            and not any(part.isdigit() for part in path.split("."))
        ]

    def _try(
        self,
        checkpoint: Checkpoint,
        values: Mapping[str, Mapping[str, Tensor]],
        tokens: Mapping[str, TokenRows],
        made: Mapping[str, Replacement],
    ) -> None:
        """Refuse modules that the model does not call, or whose parameters it reads itself."""
        # A hook at a module that is not called changes nothing, without an error.
        unreached = [path for path in made if self._layouts[path].reason == UNREACHED]
        reason = f"the model does not call {unreached[0]} on text" if unreached else None
        if reason is None:
            parameters = {path: dict(changed) for path, changed in values.items()}
            for path, rows in tokens.items():
                parameters.setdefault(path, {})
                weight = parameters[path].get("weight", self._modules[path].weight)
                ids = torch.tensor(rows.ids, device=weight.device)
                whole = weight.detach().clone()
                whole[ids] = rows.values.to(whole)
                parameters[path]["weight"] = whole
            reason = reason_against(self._base, parameters, made)
        if reason is not None:
            raise UnsupportedInputError(
                f"{checkpoint.folder} has modules of its own that cannot be replaced row by row: "
                f"{reason}\n  given: {', '.join([*made][:3])}{', ...' * (len(made) > 3)}\n"
                f"  to do: merge the adapter into a base model of its own"
            )

    def _hook(self, paths: Iterable[str]) -> None:
        for path in paths:
            module, layout = self._modules[path], self._layouts[path]
            embeds = isinstance(module, nn.Embedding)
            for late in (False, True):
                # An interrupt may end a load after any of these lines, so only the hooks themselves
                # tell which of them exist.
                marks = [
                    getattr(hook, "replacement_of", None) for hook in module._forward_hooks.values()
                ]
                if (self._model, late) not in marks:
                    hook = replacement_hook(self._model, path, layout, embeds, late)
                    self._handles.append(module.register_forward_hook(hook, prepend=not late))

    def _probe(self, paths: list[str]) -> None:
        """Find out how modules that take no LoRA see the rows, norms for instance."""
        if not paths:
            return
        spec = ModuleSpec("linear", 1, 1)
        sites = {path: ModuleSite(path, self._modules[path], spec, None) for path in paths}
        self._layouts.update(probe(self._base, sites)[0])


def _kind_of_head(path: str) -> str:
    """Return the kind of model that has a head of this name, as the end of an error; or ""."""
    kinds = {
        "score": "AutoModelForSequenceClassification",
        "classifier": "AutoModelForSequenceClassification",
        "qa_outputs": "AutoModelForQuestionAnswering",
        "lm_head": "AutoModelForCausalLM",
    }
    kind = kinds.get(path.rpartition(".")[2])
    return f", e.g. {kind}" if kind else ""


def _is_nonzero(bias: Any) -> bool:
    return bias is not None and bool(bias.any())


def _two_names(checkpoint: Checkpoint, given: str) -> InvalidInputError:
    return InvalidInputError(
        f"{checkpoint.folder} has two names for one module of the base model, with different "
        f"values\n  given: {given}, and another under a second name\n  allowed: one of them\n"
        f"  to do: save the adapter again"
    )


def _quantized(checkpoint: Checkpoint, path: str) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"{checkpoint.folder} has a weight of its own for {path}, which is quantized\n"
        f"  to do: keep the module out of the quantization"
    )


def _copy(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a module that shares all but these parameters, and has no hooks."""
    copy = without_hooks(module)
    vars(copy).pop("forward", None)  # a replaced one runs the original
    for name, value in values.items():
        copy._parameters[name] = nn.Parameter(value, requires_grad=False)
    if isinstance(copy, nn.Linear) and "weight" in values:
        copy.out_features = values["weight"].shape[0]
    # The base's padding index may be no row of the replacement.
    if isinstance(copy, nn.Embedding) and "weight" in values:
        copy.num_embeddings, copy.padding_idx = values["weight"].shape[0], None
    return copy


def replacement_hook(model: str, path: str, layout: Layout, embeds: bool, late: bool) -> Hook:
    """Return a hook that replaces rows of a module's output by those of adapters' own modules.

    `embeds`: its input is token ids. `late`: it runs after LoRA, to add biases; else before LoRA.
    """

    def replace(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        call = RUNNING.call
        rows = call.replacements.get(path) if call.model == model else None
        if rows is None:
            return None
        x = first_argument(args, f"module {path}")
        if rows.width is not None and path in call.stacks:
            raise UnsupportedInputError(
                f"a loaded adapter has LoRA for {path}, and another one a head of its own there, "
                f"with other labels\n  to do: unload one of them"
            )
        try:
            shape = x.shape if embeds else x.shape[:-1]
            numbers = call.numbers(shape, layout, (path,))
            return replace_rows(rows, x.flatten() if embeds else as_rows(x), output, numbers, late)
        except AttributeError:  # perhaps x or output is no tensor
            check_fit(path, module, args, output)
            raise

    replace.replacement_of = (model, late)  # type: ignore[attr-defined]
    return replace
