"""Blends: an adapter that is a weighted sum of others. A strength is a blend of one.

To vLLM a blend is an adapter like any other, with a slot of its own and the ranks of its parts side
by side: y += sum over parts of factor * scaling * (x @ A.T) @ B.T. A request asks for it by the
model's name, "alice*0.5+bob*0.25", which vLLM passes to `BlendResolver`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_backends.errors import InvalidInputError, UnsupportedInputError, did_you_mean
from lora_backends.integrations.vllm.adapters.load import Extras, Factors, extras_of
from lora_backends.integrations.vllm.adapters.targets import Target

SCHEME = "blend:"
"""Before the terms, in the `lora_path` of a `LoRARequest`."""

SERVED = "blend-by-name:"
"""The same for names that came through the server, whose clients may not name folders."""

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_TERM = re.compile(rf"(?P<name>.+?)\*(?P<factor>{_NUMBER})(?:\+|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Term:
    """One adapter of a blend."""

    name: str  # of an adapter that the engine has loaded, or its folder
    factor: float  # multiplies its delta


def parse(text: str) -> list[Term] | None:
    """Return the terms of "alice*0.5+bob*0.25"; None for another text."""
    terms, start = [], 0
    while start < len(text):
        match = _TERM.match(text, start)
        if match is None:
            return None
        factor = float(match["factor"])
        if not math.isfinite(factor):
            return None
        terms.append(Term(match["name"], factor))
        start = match.end()
    return None if text.endswith("+") else terms or None


def terms_of(path: str) -> list[Term] | None:
    """Return the terms that a `lora_path` holds; None if it is a path.

    Raises:
        InvalidInputError: it begins with a scheme of blends, but its terms cannot be read.
    """
    if not path.startswith((SCHEME, SERVED)):
        return None
    terms = parse(path.partition(":")[2])
    if terms is None:
        raise InvalidInputError(
            f"a blend cannot be read\n  given: {path!r}\n"
            f"  allowed: {SCHEME}name*number, or several with + between them"
        )
    return terms


def unknown(path: str, name: str, known: Iterable[str]) -> InvalidInputError:
    """Return the error for a part that is neither loaded nor a folder."""
    return InvalidInputError(
        f"no adapter {name!r} for the blend{did_you_mean(name, list(known))}\n  given: {path!r}\n"
        f"  allowed: names of adapters that the engine has loaded, or folders\n"
        f"  to do: load {name!r} first"
    )


def check_names(path: str, known: Iterable[str]) -> None:
    """Refuse a blend that can be read in two ways.

    With an adapter named "a*2+b", the blend "a*2+b*0.5" could have one part or two.

    Raises:
        InvalidInputError: the name of such an adapter is in the blend.
    """
    text = "+" + path.partition(":")[2]
    for name in known:
        if f"+{name}*" in text and parse(f"{name}*1") != [Term(name, 1.0)]:
            raise InvalidInputError(
                f"a blend can be read in two ways\n  given: {path!r}\n"
                f"  reason: {name!r} is the name of an adapter, and reads as a blend too\n"
                f"  to do: load that adapter under a name without '*'"
            )


def check_parts(request: Any, names: Iterable[str]) -> None:
    """Refuse a blend under the name of one of its parts: it could not be loaded a second time.

    Raises:
        InvalidInputError: the request's name is among the names of the parts.
    """
    if request.lora_name in names:
        raise InvalidInputError(
            f"a blend has the name of one of its parts\n"
            f"  given: {request.lora_name!r} for {request.lora_path!r}\n"
            f"  to do: give the blend another name"
        )


def added(
    parts: Sequence[tuple[Term, Any]],
    adapter_id: int,
    max_rank: int,
    sources: Mapping[str, Any] | None = None,
) -> Any:
    """Return the `LoRAModel` of a blend of packed `LoRAModel`s.

    Args:
        parts: the terms, each with vLLM's `LoRAModel`.
        adapter_id: of the blend.
        max_rank: of a slot.
        sources: become the `parts` of its `Extras`.

    Raises:
        InvalidInputError: the sum of the parts' ranks is above `max_rank`.
        UnsupportedInputError: a part cannot be scaled, or cannot share a slot with another.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

    factors = _factors(parts)
    loras: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, lora in parts for name in lora.loras):
        layers = [(term, lora.loras[name]) for term, lora in parts if name in lora.loras]
        if isinstance(layers[0][1].lora_a, list):
            count = len(layers[0][1].lora_a)
            pairs = [
                _joined([(t.factor, w.lora_a[i], w.lora_b[i]) for t, w in layers])
                for i in range(count)
            ]
            a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            rank = max(each.shape[-2] for each in a if each is not None)
            packed: list[Any] = [1.0] * count
            loras[name] = PackedLoRALayerWeights(name, rank, packed, a, b, scaling=list(packed))
        else:
            one = _joined([(t.factor, w.lora_a, w.lora_b) for t, w in layers])
            assert one[0] is not None
            rank = one[0].shape[-2]
            loras[name] = LoRALayerWeights(name, rank, 1, one[0], one[1], 1.0)
        if rank > max_rank:
            raise InvalidInputError(
                f"the ranks of a blend's adapters add up to more than a slot has\n"
                f"  given: {rank} at {name!r}, of {', '.join(term.name for term, _ in parts)}\n"
                f"  allowed: at most {max_rank}\n"
                f"  to do: set max_lora_rank of vLLM to {rank} or more"
            )
    blend = LoRAModel(adapter_id, max((each.rank for each in loras.values()), default=0), loras)
    blend.lora_backends_extras = Extras(factors, parts=sources or {})
    return blend


def _joined(
    parts: Sequence[tuple[float, Tensor | None, Tensor | None]],
) -> tuple[Tensor | None, Tensor | None]:
    """Return A and B of all parts, joined along the rank; B includes the scaling already."""
    there = [(f, a, b) for f, a, b in parts if a is not None and b is not None]
    if not there:
        return None, None
    lora_a = torch.cat([a for _, a, _ in there], -2)
    return lora_a, torch.cat([(b.float() * f).to(b.dtype) for f, _, b in there], -1)


def _factors(parts: Sequence[tuple[Term, Any]]) -> dict[Target, Factors]:
    """Return the factors of a blend by `MultiLoRAModel`'s rules: biases of strength 1 add up."""
    joined: dict[Target, Factors] = {}
    for term, lora in parts:
        extras = extras_of(lora)
        is_alone = len(parts) == 1
        refused = ""
        if extras.invocation or extras.tokens or getattr(lora, "modules_to_save", None):
            refused = "aLoRA, trainable tokens or a head: neither a strength nor another adapter"
        for target, own in extras.factors.items():
            before = joined.get(target, Factors())
            if own.scales is not None:
                if not is_alone:
                    refused = "DoRA: a strength, but no other adapter"
                joined[target] = own
            elif own.bias is not None:
                if term.factor != 1:
                    refused = "lora_bias: strength 1 only"
                bias = own.bias if before.bias is None else before.bias + own.bias
                joined[target] = Factors(None, bias)
        if refused:
            raise UnsupportedInputError(
                f"adapter {term.name!r} cannot be blended in this way\n"
                f"  given: {term.name}*{term.factor}\n  allowed with {refused}"
            )
    return joined


def register_resolver() -> None:
    """Let vLLM's server resolve the names of blends."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    name = "lora_backends_blends"
    if name in LoRAResolverRegistry.get_supported_resolvers():
        return

    class BlendResolver(LoRAResolver):  # type: ignore[misc]  # vLLM is not a dependency
        """Turns a blend's name into a `LoRARequest`; the workers look up its parts."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            if parse(lora_name) is None:
                return None
            return LoRARequest(lora_name, 1, SERVED + lora_name)  # vLLM gives it an id

    LoRAResolverRegistry.register_resolver(name, BlendResolver())
