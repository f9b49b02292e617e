"""Compares a training forward with generation on the same tokens: log-probabilities and modules.

Both runs see the same tokens in batches of other shapes: all at once, or the prompt and then one
token after another. So the difference is what a trainer sees between its own log-probabilities and
those with which a server drew the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.hf.calls.request import Request
from lora_backends.hf.hooks.linear import Served, adder, lora_hook, rows_and_length
from lora_backends.hf.hooks.siblings import Siblings
from lora_backends.hf.model import MultiLoRAModel
from lora_backends.hf.training.request import TrainingCall

LORA, BASE, BEFORE = "LoRA", "base", "input"
"""Why the first module that differs does: by its LoRA, by the base model's part of it, or because
its input differs, by code between modules such as attention."""


@dataclass(frozen=True)
class Agreement:
    """What a comparison found."""

    tokens: list[int]  # that were generated
    differences: list[float]  # of the log-probability of each, in absolute value
    first_token: int | None  # index of the first whose log-probability differs; None: none does
    first_module: str | None  # in the order of execution, whose output differs in any bit
    cause: str | None  # `LORA`, `BASE` or `BEFORE`, for that module
    compared_loras: int  # modules whose LoRA was compared on the same rows
    different_loras: list[str]  # those of which it differs in any bit, in the order of execution

    @property
    def same_lora(self) -> bool:
        """Whether the LoRA of every module is the same bit for bit in both batch shapes."""
        return not self.different_loras

    @property
    def largest(self) -> float:
        """The largest difference of a log-probability; NaN counts as the largest."""
        return max(self.differences, key=lambda d: (d != d, d))


def compare(model: MultiLoRAModel, adapter: str, prompt: Tensor, new_tokens: int) -> Agreement:
    """Let an adapter answer greedily, and run the training forward over prompt and answer.

    The LoRA of each module is compared apart, on the very rows that it saw in generation: once as
    generation passes them, once as training does. `prompt` is [tokens] int64, at least one; the
    adapter is trained (`new_adapter`, or ``load_adapter(trainable=True)``).

    Raises:
        InvalidInputError: no such adapter; the prompt has another shape; or the model is in
            training mode.
        UnsupportedInputError: an encoder-decoder; a model that generates in other steps than the
            prompt and then one token at a time; or an adapted module whose inputs do not show which
            token each row belongs to.
    """
    model.adapter_parameters(adapter)  # refuses one that is not trained
    if model.training:
        raise InvalidInputError(
            "the model is in training mode, in which dropout acts\n  to do: model.eval()"
        )
    if prompt.ndim != 1 or not len(prompt) or new_tokens < 1:
        raise InvalidInputError(
            f"a prompt of shape {list(prompt.shape)} and {shown(new_tokens)} new tokens\n"
            f"  allowed: [tokens], and at least one of each"
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedInputError(
            "an encoder-decoder generates from another input than it trains"
        )
    served = _Record(model)
    with served:
        out = model.generate(
            prompt[None],
            adapters=[adapter],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ids = out.sequences
    lengths = [length for _, length in served.passes]
    if lengths != [len(prompt)] + [1] * (new_tokens - 1):
        raise UnsupportedInputError(
            f"generation runs passes of {shown(lengths)} tokens\n"
            f"  allowed: one pass over the prompt of {len(prompt)} tokens, then one for each token"
        )
    trained = _Record(model)
    with trained, torch.enable_grad():
        logits = model(
            adapters=[adapter], input_ids=ids, attention_mask=torch.ones_like(ids)
        ).logits.detach()
    answer = ids[0, len(prompt) :]
    of_training = _log_probabilities(logits[0, len(prompt) - 1 : -1], answer)
    of_generation = _log_probabilities(torch.cat([*out.logits]), answer)
    differences = (of_training - of_generation).abs().tolist()
    different = _different_loras(model, adapter, ids, trained, served)
    module, cause = _first_module(trained, served, [path for path, same in different if not same])
    return Agreement(
        tokens=answer.tolist(),
        differences=differences,
        first_token=next((i for i, d in enumerate(differences) if d != 0), None),
        first_module=module,
        cause=cause,
        compared_loras=len(different),
        different_loras=[path for path, same in different if not same],
    )


def _log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return wide.gather(1, tokens[:, None])[:, 0]


@dataclass(frozen=True)
class _ModuleCall:
    """One call of a module in a pass over some tokens of one row."""

    start: int  # tokens of the row before this pass
    length: int  # tokens of this pass
    x: Tensor
    y: Tensor

    def rows(self, tensor: Tensor) -> dict[int, Tensor]:
        """Return the part of each token by its position in the row, or nothing if unknown."""
        rows = tensor[0] if tensor.ndim > 1 and tensor.shape[0] == 1 else tensor
        if self.length == 1 and tensor.ndim and tensor.shape[0] == 1:
            return {self.start: tensor.reshape(-1)}
        # A head may see the last token alone.
        if tensor.ndim > 1 and rows.ndim and rows.shape[0] in (self.length, 1):
            first = self.start + self.length - rows.shape[0]
            return {first + at: row.reshape(-1) for at, row in enumerate(rows)}
        return {}


@dataclass(eq=False)
class _Record:
    """Inputs and outputs of the modules of a base model in the passes of a block of `with`."""

    model: MultiLoRAModel
    passes: list[tuple[int, int]] = field(default_factory=list)  # first position, and tokens
    seen: dict[tuple[str, int], list[_ModuleCall]] = field(default_factory=dict)
    """By path and by the number of the call in its pass, in the order of execution."""

    def __enter__(self) -> None:
        base, sites = self.model.base, self.model._wrapped.sites
        self._handles = [base.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for path, module in base.named_modules():
            # What has parts shows where a difference is through them.
            if path in sites or not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(self._hook(path)))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = {**kwargs, self.model.main_input_name: args[0]} if args else kwargs
        start = sum(self.passes[-1]) if self.passes else 0
        self.passes.append((start, rows_and_length(inputs, self.model.main_input_name)[1]))
        self._calls: dict[str, int] = {}

    def _hook(self, path: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not args or not self.passes:
                return
            x, y = args[0], output
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                call = self._calls[path] = self._calls.get(path, -1) + 1
                # Copies: later code may write into either.
                seen = _ModuleCall(*self.passes[-1], x.detach().clone(), y.detach().clone())
                self.seen.setdefault((path, call), []).append(seen)

        return note


def _first_module(
    trained: _Record, served: _Record, different: list[str]
) -> tuple[str | None, str | None]:
    """Return the first module whose output differs at any token, and where that comes from."""
    for (path, call), (ours, *_) in trained.seen.items():
        of_x, of_y = ours.rows(ours.x), ours.rows(ours.y)
        theirs = served.seen.get((path, call), [])
        if all(
            _same(of_y.get(at), row) for each in theirs for at, row in each.rows(each.y).items()
        ):
            continue
        if path in different:
            return path, LORA
        inputs = (item for each in theirs for item in each.rows(each.x).items())
        return path, BASE if all(_same(of_x.get(at), row) for at, row in inputs) else BEFORE
    return None, None


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two rows have the same bits; a row that one run lacks is not compared."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return a is None or b is None
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (a, b)))


def _different_loras(
    model: MultiLoRAModel, adapter: str, ids: Tensor, trained: _Record, served: _Record
) -> list[tuple[str, bool]]:
    """Return the modules with LoRA, and whether it is the same on the same rows in both shapes."""
    wrapped = model._wrapped
    hooks = _Loras(model)
    keys = [key for key in trained.seen if key[0] in wrapped.sites and key in served.seen]
    main = wrapped.main_input
    with torch.enable_grad(), model._active([adapter], {main: ids}, after_cache=True) as call:
        assert isinstance(call, TrainingCall)
        call.begin_forward({main: ids}, *ids.shape)
        in_training = {}
        for key in keys:
            (ours, *_), theirs = trained.seen[key], served.seen[key]
            x = ours.x.clone(memory_format=torch.contiguous_format)
            rows = ours.rows(x)  # views
            of_passes = [each.rows(each.x) for each in theirs]
            if not all(each and each.keys() <= rows.keys() for each in of_passes):
                continue  # refused below
            for rows_of_pass in of_passes:
                for at, row in rows_of_pass.items():
                    rows[at].copy_(row)
            part = hooks.trained(call, key[0], x, torch.zeros_like(ours.y))
            if part is not None:
                in_training[key] = ours.rows(part)
    _check_compared(model, adapter, trained, served, {path for path, _ in in_training})
    same = dict.fromkeys(in_training, True)
    prompt = ids[:, : served.passes[0][1]]
    with torch.no_grad(), model._active([adapter], {main: prompt}, after_cache=False) as call:
        for start, length in served.passes:
            call.begin_forward({main: ids[:, start : start + length]}, 1, length)
            for key in same:
                for each in served.seen[key]:
                    if each.start == start:
                        part = hooks.served(call, key[0], each.x, torch.zeros_like(each.y))
                        expected = in_training[key]
                        for at, row in each.rows(part).items():
                            same[key] &= _same(expected[at], row)
    return [(path, is_same) for (path, _), is_same in same.items()]


def _check_compared(
    model: MultiLoRAModel, adapter: str, trained: _Record, served: _Record, compared: set[str]
) -> None:
    """Refuse a comparison that leaves out a module of the adapter which has run."""
    touched = model.pool.modules_of(model.pool.slots.slot(adapter))
    ran = {path for path, _ in [*trained.seen, *served.seen]}
    left = sorted(ran.intersection(touched) - compared)
    if left or not compared:
        raise UnsupportedInputError(
            f"the LoRA of {', '.join(left[:3]) or 'every module'} cannot be compared\n"
            f"  allowed: modules that run in both passes, with the tokens of a row in order"
        )


class _Loras:
    """Adds the LoRA of one module to zeros, by the operations that both kinds of calls use."""

    def __init__(self, model: MultiLoRAModel) -> None:
        wrapped = model._wrapped
        self._sites, self._backend, self._layouts = wrapped.sites, model.backend, wrapped.layouts
        served = Served(wrapped.key, model.backend, wrapped.layouts)
        add = adder(model.backend, "run_linear")
        self._hooks = {path: lora_hook(served, site, add) for path, site in wrapped.sites.items()}
        self._groups: dict[str, Siblings] = {}
        for group in wrapped.hooked.groups:
            if group.joined is not None and not group.apart:
                self._groups |= dict.fromkeys(group.paths, group)

    def trained(self, call: TrainingCall, path: str, x: Tensor, zeros: Tensor) -> Tensor | None:
        """Return the LoRA as a pass of training computes it; None: there is none."""
        if not call.touches((path,)):
            return None
        group = self._groups.get(path)
        shared = None if group is None else call.shared.get(group.paths[0])
        if group is None or group.joined is None or shared is None:
            return self._alone(path, x, zeros)
        weight = torch.zeros_like(group.joined.weight)
        layout = self._layouts[group.paths[0]]
        y = call.multiply(group.operation, group.paths, layout, x, shared, weight, None)
        return self._slice(group, path, y.detach())

    def served(self, call: Request, path: str, x: Tensor, zeros: Tensor) -> Tensor:
        """Return the same as a pass of generation computes it."""
        group = self._groups.get(path)
        shared = None if group is None else call.shared.get(group.paths[0])
        if group is None or shared is None:
            return self._alone(path, x, zeros)
        plan = call.plan(x.shape[:-1], self._layouts[group.paths[0]], group.paths)
        y = x.new_zeros(*x.shape[:-1], sum(group.widths))
        y = adder(self._backend, group.operation)(x, shared, plan, y)
        return self._slice(group, path, y)

    def _alone(self, path: str, x: Tensor, zeros: Tensor) -> Tensor:
        added = self._hooks[path](self._sites[path].module, (x,), zeros)
        return zeros if added is None else added.detach()

    @staticmethod
    def _slice(group: Siblings, path: str, y: Tensor) -> Tensor:
        return torch.split_with_sizes(y, group.widths, -1)[group.paths.index(path)]
