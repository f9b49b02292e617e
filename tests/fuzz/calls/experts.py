"""Random calls of `run_experts`: a valid one, and ways to spoil its arguments."""

import random
from dataclasses import replace
from typing import Any

import torch

from lora_backends import InvalidInputError, LoRABackendError
from lora_backends.testing.cases.experts import ExpertCase
from lora_backends.testing.expert_oracle import expected_experts
from lora_backends.testing.oracles import Expected
from lora_backends.testing.properties.gradients.experts import check_gradients

from ..running import Ran, ending_hangs, fault_of_message, untyped
from .cases import SCALINGS, is_plain, odd_tensor, reshaped

GRADIENTS = 0.15
"""Share of the calls whose backward runs, too."""


def draw_experts(draw: random.Random, dtypes: tuple[torch.dtype, ...], small: bool) -> ExpertCase:
    most_tokens, most_width, most_rank = (6, 12, 4) if small else (20, 40, 9)
    slots, experts, slices = draw.randint(1, 3), draw.randint(1, 4), draw.choice([1, 1, 2])
    tokens, top_k = draw.choice([0, 1, draw.randint(1, most_tokens)]), draw.randint(1, 3)
    num_a, max_rank = draw.choice([1, slices]), draw.randint(1, most_rank)
    width = draw.randint(1, most_width)
    dtype = draw.choice(dtypes)
    own = [draw.choice([1, experts]), num_a]

    def table(value):
        rows = [tuple(value() for _ in range(own[1])) for _ in range(slots * own[0])]
        return tuple(tuple(rows[i * own[0] : (i + 1) * own[0]]) for i in range(slots))

    return ExpertCase(
        slots=tuple(draw.randint(-1, slots - 1) for _ in range(tokens)),
        ids=tuple(
            tuple(draw.randint(-1, experts - 1) for _ in range(top_k)) for _ in range(tokens)
        ),
        num_experts=experts,
        ranks=table(lambda: draw.randint(0, max_rank)),
        max_rank=max_rank,
        in_features=draw.randint(1, most_width),
        output_slices=(width,) * slices,
        scalings=table(lambda: draw.choice(SCALINGS)),
        top_k=top_k,
        shared_a=draw.random() < 0.2,
        shared_b=draw.random() < 0.2,
        interleaved=draw.random() < 0.3,
        mapped=draw.random() < 0.3,
        rows=draw.choice(["tokens", "pairs"]),
        weighted=draw.random() < 0.5,
        reduce=draw.random() < 0.5,
        dtype=dtype,
        base=draw.choice([None, dtype, draw.choice(dtypes)]),
        x_pad=draw.choice([0, 1, 8]),
        base_pad=draw.choice([0, 1, 8]),
        weights_pad=draw.choice([0, 1, 8]),
        seed=draw.randrange(10**6),
    )  # fmt: skip


def run_experts(backend: Any, draw: random.Random, small: bool) -> Ran:
    """Make a routing and one call on it, and judge them."""
    case = draw_experts(draw, backend.dtypes, small)
    inputs, steps = case.build("cpu"), []
    if draw.random() < GRADIENTS:
        return _run_backward(backend, case)
    made = inputs.new_base()
    given = {"x": inputs.x, "base": None if made is None else made[1],
             "ids": inputs.topk_ids, "factors": inputs.topk_weights, "map": inputs.expert_map,
             "experts": case.num_experts, "weights": inputs.weights}  # fmt: skip
    options = dict(inputs.options)
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        steps.append(_spoil(draw, given, options))
    named = ["run_experts", *steps, repr(case)]
    kept = {name: value.detach().clone() for name, value in given.items() if is_plain(value)}
    try:
        with ending_hangs(), torch.no_grad():
            plan = backend.prepare_batch(inputs.batch)
            routing = backend.prepare_experts(
                plan, given["ids"], given["factors"], given["experts"], expert_map=given["map"]
            )
            y = backend.run_experts(given["x"], given["weights"], routing, given["base"], **options)
    except LoRABackendError as error:
        fault = _written(given, kept) or fault_of_message(str(error))
        if not steps:
            fault = f"a valid call is refused: {error}"
        return Ran(f"experts: {type(error).__name__}", fault, named)
    except BaseException as error:
        return untyped(error, named)
    fault = _written(given, kept, except_for="base")
    try:
        if made is not None:
            made[0].assert_untouched()
        _check(backend, inputs, given, kept, options, y)
    except AssertionError as error:
        fault = f"{fault or ''} {error}"
    except Exception as error:  # the oracle has no answer to what was accepted
        fault = f"accepted, but {type(error).__name__}: {error}"
    return Ran("experts: wrong" if fault else "experts: right", fault, named)


def _run_backward(backend: Any, case: ExpertCase) -> Ran:
    """Compute all gradients of a valid call, and compare them with the kit's."""
    named = ["run_experts", "gradients", repr(case)]
    try:
        with ending_hangs():
            check_gradients(backend, case, case.build("cpu"))
    except AssertionError as error:
        return Ran("experts: wrong", str(error), named)
    except LoRABackendError as error:
        return Ran("experts: wrong", f"a valid call is refused: {error}", named)
    except BaseException as error:
        return untyped(error, named)
    return Ran("experts: gradients: right", None, named)


def _spoil(draw: random.Random, given: dict[str, Any], options: dict[str, Any]) -> str:
    name = draw.choice([*given, "options"])
    value = given.get(name)
    if name == "options":
        options[draw.choice(sorted(options))] = draw.choice(
            [True, False, "tokens", "pairs", None, 3]
        )
    elif name == "experts":
        given[name] = draw.choice([0, -1, 1, 2, 5, True, 2.0, None, "2", 10**30])
    elif name == "weights":
        field = draw.choice(["lora_a", "lora_b", "ranks", "scalings"])
        try:
            given[name] = replace(value, **{field: reshaped(draw, getattr(value, field))})
        except InvalidInputError:
            return f"{field} refused"
    elif value is not None:
        if name in ("factors", "ids", "map") and is_plain(given["factors"]):
            given["factors"] = given["factors"].nan_to_num(0.5)  # NaN where no pair read it
            value = given[name]
        try:
            given[name] = (reshaped if draw.random() < 0.7 else odd_tensor)(draw, value)
        except RuntimeError:  # torch cannot do it to what an earlier step has made
            return "not possible"
    return name


def _check(backend, inputs, given, kept, options, y) -> None:
    ids, mapping = kept["ids"].long(), given["map"]
    if mapping is not None:
        ids = torch.where(ids >= 0, kept["map"].long()[ids.clamp(min=0)], -1)
    seen = replace(
        inputs,
        x=kept["x"],
        weights=_as_the_oracle_takes_it(given["weights"]),
        ids=torch.where(ids < given["experts"], ids, -1).clamp(min=-1),
        topk_weights=kept["factors"],
        base=kept.get("base"),
        options=options,
    )
    assert given["base"] is None or y is given["base"], "another tensor than base_output returned"
    middle = seen.weights.dtype if backend.narrow_intermediate else torch.float32
    expected = expected_experts(seen, intermediate=middle)
    check_close(y, expected)


def _as_the_oracle_takes_it(weights: Any) -> Any:
    """Return equal weights in memory of their own, without gradients."""
    return replace(
        weights,
        lora_a=weights.lora_a.clone(memory_format=torch.contiguous_format),
        lora_b=weights.lora_b.clone(memory_format=torch.contiguous_format),
        scalings=weights.scalings.detach(),
    )


def check_close(y: torch.Tensor, expected: Expected) -> None:
    """Check a result against its bound, and that it is NaN just where NaN was read."""
    assert y.shape == expected.value.shape, f"the result is {list(y.shape)}"
    result, unknown = y.detach().double(), expected.value.isnan()
    near = ((result - expected.value).abs() <= expected.bound) | (unknown & result.isnan())
    if not bool(near.all()):
        index = tuple((~near).nonzero()[0].tolist())
        values = (result[index].item(), expected.value[index].item(), expected.bound[index].item())
        raise AssertionError("at {}: {:.9g}, expected {:.9g} within {:.3g}".format(index, *values))


def _written(given, kept, except_for: str = "") -> str | None:
    for name, before in kept.items():
        same = torch.equal(given[name].detach().nan_to_num(9.5), before.nan_to_num(9.5))
        if name != except_for and not same:
            return f"{name} was written to"
    return None
