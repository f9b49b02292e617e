"""Finds out how every module's input holds the rows of a batch, by running the model once.

A tensor whose first axis has as many elements as the batch has rows need not have the rows there:
images, tokens of a sequence-first model and windows may be as many by chance. So the model is run
on rows of which some are equal and some are not. An axis that holds the rows shows the same
pattern of equal and unequal slices, and no other axis does.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from lora_backends.hf.layout import Form, Layout, Order, Spread
from lora_backends.hf.running import IDLE, running
from lora_backends.hf.sites import Site, token_embedding_of

ROWS, LENGTH, SHARED = 6, 5, 3
"""Rows and tokens of the pass; rows 0 and 4 have their first `SHARED` tokens in common."""

EQUAL = ((0, 2), (0, 3), (1, 5))
"""Rows with the same tokens."""

UNEQUAL = ((0, 1), (1, 4))
"""Rows without a token in common. Only an exchange of equal rows keeps all these pairs."""

TOLERANCE = 0.1
"""Most that equal rows may differ, relative to unequal ones. Rounding makes less than 0.01 of
16-bit values; a wrong axis makes about 1."""

CACHES = ("past_key_values", "cache_params", "state", "mems")
"""Names under which models return what the next pass takes."""


@dataclass(frozen=True)
class _Seen:
    """One input of a module."""

    shape: tuple[int, ...]  # without the features
    forms: tuple[Form, ...]  # all that the values agree with
    in_order: bool


def probe(base: nn.Module, sites: Mapping[str, Site]) -> dict[str, Layout]:
    """Return how the input of every site holds the rows of a batch.

    Args:
        base: a model; it is not changed, and its hooks do not run.
        sites: path to module.

    Returns:
        Path to layout. Nothing is known where the model does not run on plain text.
    """
    seen: dict[str, list[_Seen]] = defaultdict(list)
    failure = ""
    try:
        _run(base, sites, seen)
    except Exception as error:  # whatever a model of any author raises
        failure = (
            f"the model does not run on plain text ({type(error).__name__}: {str(error)[:200]})"
        )
    kinds: dict[tuple[Any, ...], Layout] = {}
    layouts = {}
    for path in sites:
        layout = _layout(seen[path], failure)
        key = (layout.forms, layout.in_order, layout.reason)
        layouts[path] = kinds.setdefault(key, layout)
    return layouts


def _layout(seen: Sequence[_Seen], failure: str) -> Layout:
    unknown = next((s for s in seen if not s.forms), None)
    if not failure and not seen:
        failure = "no pass of plain text reaches it"
    if not failure and unknown is not None:
        failure = (
            f"its input of shape {list(unknown.shape)} does not hold the rows on an axis in a pass "
            f"of {ROWS} rows of {LENGTH} tokens"
        )
    if failure:
        return Layout((), False, failure)
    forms = dict.fromkeys(form for s in seen for form in s.forms)
    in_order = all(s.in_order for s in seen)
    return Layout(tuple(forms), in_order, "")


@torch.no_grad()
def _run(base: nn.Module, sites: Mapping[str, Site], seen: dict[str, list[_Seen]]) -> None:
    """Run a prompt and a decode step, and note what the sites' modules see."""
    twin, twins = _twin_of(base)
    tokens = _tokens(base)
    parameters = inspect.signature(base.forward).parameters
    flags = {name: True for name in ("use_cache", "return_dict") if name in parameters}
    devices = [tokens.device] if tokens.device.type == "cuda" else []
    length = LENGTH

    def note(path: str, site: Site) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen[path].append(_see(args, site.spec.kind == "embedding", length))

        twins[site.module].register_forward_pre_hook(hook)

    for path, site in sites.items():
        note(path, site)
    # some models draw random numbers in eval mode, and wrapping must not change what comes next
    with running(IDLE), torch.random.fork_rng(devices=devices):
        output = twin(input_ids=tokens[:, :LENGTH], **flags)
        for name in CACHES:
            cache = getattr(output, name, None)
            if cache is not None and name in parameters:
                length = 1
                twin(input_ids=tokens[:, LENGTH:], **{name: cache}, **flags)
                break


def _see(args: tuple[Any, ...], is_embedding: bool, length: int) -> _Seen:
    """Return the forms that an input's values agree with."""
    if not args or not isinstance(args[0], torch.Tensor):
        return _Seen((), (), False)
    x: torch.Tensor = args[0]
    x = x.unsqueeze(-1) if is_embedding else x
    shape = tuple(x.shape[:-1])
    forms = []
    in_order = True
    for form in _candidates(shape, length):
        spread = form.spread(shape, ROWS, length)
        assert spread is not None
        if _shows_pattern(x, spread):
            forms.append(form)
            in_order &= length == 1 or _is_in_order(x, spread)
    return _Seen(shape, tuple(forms), in_order)


def _candidates(shape: tuple[int, ...], length: int) -> Iterator[Form]:
    """Yield the forms that an input of `shape` might have."""
    flat: tuple[Order, ...] = ("rows of tokens", "tokens of rows")
    for axis, size in enumerate(shape):
        if size == ROWS:
            yield Form(len(shape), axis, "rows", length == 1)
        elif size == ROWS * length:
            for order in flat:
                yield Form(len(shape), axis, order, length == 1)


def _shows_pattern(x: torch.Tensor, spread: Spread) -> bool:
    """Return whether positions are equal and unequal as the tokens of their rows are."""
    before, after = spread
    rows = x.reshape(before, ROWS, after, -1).movedim(1, 0).flatten(1).float()
    equal = torch.stack([torch.linalg.vector_norm(rows[i] - rows[j]) for i, j in EQUAL])
    unequal = torch.stack([torch.linalg.vector_norm(rows[i] - rows[j]) for i, j in UNEQUAL])
    most, least = torch.stack([equal.max(), unequal.min()]).tolist()
    return bool(most <= TOLERANCE * least > 0)


def _is_in_order(x: torch.Tensor, spread: Spread) -> bool:
    """Return whether tokens lie in their order, each independent of those behind it."""
    before, after = spread
    tokens = x.reshape(before, ROWS, after, -1).movedim(1, 0).flatten(1, 2).float()
    if tokens.shape[1] != LENGTH or 1 not in spread:
        return False
    distances: list[float] = torch.linalg.vector_norm(tokens[0] - tokens[4], dim=-1).tolist()
    return max(distances[:SHARED]) <= TOLERANCE * min(distances[SHARED:]) > 0


def _tokens(base: nn.Module) -> torch.Tensor:
    """Return [ROWS, LENGTH + 1] ordinary tokens."""
    embedding = token_embedding_of(base)
    if not isinstance(embedding, nn.Embedding):
        raise TypeError(f"{type(base).__name__} has no token embedding")
    special = _special_tokens(getattr(base, "config", None))
    ordinary = [token for token in range(embedding.weight.shape[0]) if token not in special]
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(len(ordinary), generator=generator, device="cpu")
    first, second, third = torch.tensor(ordinary, device="cpu")[order[: 3 * (LENGTH + 1)]].view(
        3, -1
    )
    mixed = torch.cat([first[:SHARED], third[SHARED:]])
    rows = torch.stack([first, second, first, first, mixed, second])
    return rows.to(embedding.weight.device)


def _special_tokens(config: Any) -> set[int]:
    """Return ids that a model may treat unlike others, from its configuration and those inside."""
    special: set[int] = set()
    for key, value in (vars(config) if config is not None else {}).items():
        if hasattr(value, "model_type"):
            special |= _special_tokens(value)
        elif key.endswith(("token_id", "token_index")):
            special.update(value if isinstance(value, list) else [value])
    return special


def _twin_of(base: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Return a model with the same tensors and its own modules, and its module for each of base's.

    A forward pass may change a module, as BigBird's does with its kind of attention after a short
    one, and hooks of others may have any effect. The twin has neither.
    """
    twins = {module: module.__class__.__new__(module.__class__) for module in base.modules()}
    for module, twin in twins.items():
        vars(twin).update(vars(module))
        vars(twin).pop("_compiled_call_impl", None)
        for name, value in vars(module).items():
            if isinstance(value, dict) and name.startswith("_"):
                vars(twin)[name] = value.__class__() if "hooks" in name else value.copy()
            elif isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
                owner = twins.get(value.__self__, value.__self__)
                vars(twin)[name] = MethodType(value.__func__, owner)
        twin._modules = {n: child and twins[child] for n, child in module._modules.items()}
        twin.training = False
    return twins[base], twins
