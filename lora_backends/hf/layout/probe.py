"""Finds the place of the batch's rows in every module's input, by running the model on a few.

A tensor whose first axis has as many elements as the batch has rows need not have the rows there:
images, tokens of a sequence-first model and windows may be as many by chance. So the model is run
on rows of which some are equal and some are not. An axis that holds the rows shows the same
pattern of equal and unequal slices, and no other axis does. A first pass over two rows shows
whether a row also depends on the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lora_backends.errors import UnsupportedInputError
from lora_backends.hf.calls.running import IDLE, running
from lora_backends.hf.layout.layout import InputForm, Layout, Order, Spread, misfit_of
from lora_backends.hf.layout.sharded import gather_for
from lora_backends.hf.layout.sites import ModuleSite
from lora_backends.hf.layout.trial import LENGTH, SHARED, TrialInputs, trial_of
from lora_backends.hf.layout.twin import twin_of

PAIR, BATCH = ("a", "d"), ("a", "b", "a", "a", "ac", "b")
"""The rows of the two passes, see `hf/layout/trial.py`."""

EQUAL, UNEQUAL = ((0, 2), (0, 3), (1, 5)), ((0, 1), (1, 4))
"""Pairs of rows of the batch. A wrong order of the rows breaks one of them, unless it exchanges
rows that are equal anyway."""

UNREACHED = "no pass of plain text reaches it"

TOLERANCE = 0.25
"""Most that equal rows may differ, relative to unequal ones: rounding makes 0.01 of 16-bit values
and more where it sends a token to another expert; a wrong axis makes about 1."""

FEATURES = 32
"""Features of an input of images or sound that are looked at: it has thousands of positions."""


@dataclass(frozen=True)
class _Seen:
    """One input of a module."""

    shape: tuple[int, ...]  # without the features
    forms: tuple[InputForm, ...]  # all that the values agree with
    in_order: bool
    step: bool  # one token per row


def probe(
    base: nn.Module, sites: Mapping[str, ModuleSite], trial: TrialInputs | None = None
) -> tuple[dict[str, Layout], dict[str, str]]:
    """Return two dicts by path: the layout of the batch's rows in each site's input, and misfits.

    The misfits are of the sites that took or returned anything but a tensor, see `misfit_of`.

    The model is not changed, and its hooks do not run. A `trial` of None takes the inputs of a
    Transformers model. Nothing is known where the model does not run on the inputs.

    Raises:
        UnsupportedInputError: as `gather_for`.
    """
    failure, passes = "", _Passes()
    try:
        passes.run(base, sites, trial)
    except UnsupportedInputError:  # of weights that are spread over processes
        raise
    except Exception as error:  # a model may fail on plain text with any error
        text = trial is None and getattr(base, "main_input_name", "input_ids") == "input_ids"
        failure = _failure("plain text" if text else "a trial input", error)
    kinds: dict[tuple[Any, ...], Layout] = {}
    layouts = {}
    for path in sites:
        layout = _layout(passes.seen[path], failure, passes.step_failure)
        # Equal layouts become one object, since calls compare them by identity.
        key = (layout.forms, layout.in_order, layout.reason, layout.steps, layout.calls)
        layouts[path] = kinds.setdefault(key, layout)
    return layouts, passes.misfits


def _failure(on: str, error: Exception) -> str:
    return f"the model does not run on {on} ({type(error).__name__}: {str(error)[:200]})"


def _layout(seen: Sequence[_Seen], failure: str, step_failure: str) -> Layout:
    """Return the layout of a module's inputs, which may be unknown in decode steps alone."""
    unknown, calls = [s for s in seen if not s.forms], sum(not s.step for s in seen)
    if not failure and not seen:
        failure = UNREACHED
    if unknown:
        step_failure = (
            f"a trial pass of {len(BATCH)} rows gave it an input of shape {list(unknown[0].shape)} "
            f"without an axis of independent rows"
        )
        failure = failure or ("" if unknown[0].step else step_failure)
    if failure:
        return Layout((), False, failure, False, calls)
    forms = tuple(dict.fromkeys(form for s in seen for form in s.forms))
    in_order = all(s.in_order for s in seen)
    return Layout(forms, in_order, step_failure, not step_failure, calls)


class _Passes:
    """Two passes, each a prompt and a decode step, and what modules see in them."""

    def __init__(self) -> None:
        self.seen: dict[str, list[_Seen]] = defaultdict(list)  # path to inputs in the batch
        self.misfits: dict[str, str] = {}  # path to a clause, see `misfit_of`
        self.step_failure = ""  # why there is no decode step
        self._pairs: dict[str, list[torch.Tensor]] = defaultdict(list)  # and inputs in the pair
        self._trial: TrialInputs | None = None
        self._length: int | None = None  # tokens per row of the pass that runs
        self._is_step = False

    @torch.no_grad()
    def run(
        self, base: nn.Module, sites: Mapping[str, ModuleSite], trial: TrialInputs | None
    ) -> None:
        """Run a model without its hooks, and in eval mode."""
        trial = self._trial = trial_of(base) if trial is None else trial
        twin, twins = twin_of(base)
        gather_for(twins)
        with running(IDLE), trial.fixed_random_numbers():
            for rows, note in ((PAIR, self._note_pair), (BATCH, self._note_batch)):
                handles = [
                    twins[site.module].register_forward_pre_hook(_noting(path, site, note))
                    for path, site in sites.items()
                ]
                handles += [
                    twins[site.module].register_forward_hook(self._noting_misfit(path))
                    for path, site in sites.items()
                ]
                self._run(twin, trial, rows)
                for handle in handles:
                    handle.remove()

    def _run(self, twin: nn.Module, trial: TrialInputs, rows: Sequence[str]) -> None:
        self._length, self._is_step = trial.length, False
        output = twin(**trial.prompt(rows))
        self._length, self._is_step = None if trial.length is None else 1, True
        try:
            step = trial.step(rows, output)
            if step is not None:
                twin(**step)
        except Exception as error:
            self.step_failure = _failure("a step after plain text", error)

    def _seen_part(self, x: torch.Tensor | None) -> torch.Tensor:
        """Return the part of an input that is compared."""
        if x is None or self._trial is None:
            return torch.empty(0)
        return x if self._trial.length is not None else x[..., :FEATURES]

    def _noting_misfit(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            misfit = misfit_of(args, output)
            if misfit:
                self.misfits[path] = misfit

        return hook

    def _note_pair(self, path: str, x: torch.Tensor | None) -> None:
        # A copy: the model may change the input in place later.
        self._pairs[path].append(self._seen_part(x).clone())

    def _note_batch(self, path: str, x: torch.Tensor | None) -> None:
        count = len(self.seen[path])
        if x is None or count >= len(self._pairs[path]):
            shape = () if x is None else tuple(x.shape[:-1])
            seen = _Seen(shape, (), False, self._is_step)
        else:
            # Only inputs of the same place in the order of calls are comparable.
            part = self._seen_part(x)
            seen = _see(part, self._pairs[path][count], self._length, self._is_step)
        self.seen[path].append(seen)


def _noting(path: str, site: ModuleSite, note: Any) -> Any:
    """Return a hook that notes a module's input, with an axis of features, or None."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        # By position, as hooks see inputs: by name they are refused there.
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if x is not None and site.spec.kind == "embedding":
            x = x.unsqueeze(-1)
        if x is not None and site.is_convolution and x.ndim == 4:
            x = x.movedim(1, -1)
        note(path, x)

    return hook


def _see(x: torch.Tensor, pair: torch.Tensor, length: int | None, step: bool) -> _Seen:
    """Return the forms that the values of an input agree with, in the batch and in the pair.

    `length` are the tokens per row, None for images, sound and encoder-decoders; `step` says that
    the pass follows another one.
    """
    shape = tuple(x.shape[:-1])
    forms, in_order = [], length is not None
    for form in _candidates(shape, length, step):
        rows = _rows(x, form, len(BATCH), length or 0)
        few = _rows(pair, form, len(PAIR), length or 0)
        if rows is not None and few is not None and _shows_pattern(rows, few[0]):
            forms.append(form)
            in_order &= length == 1 or _is_in_order(rows)
    return _Seen(shape, tuple(forms), in_order, step)


def _candidates(shape: tuple[int, ...], length: int | None, step: bool) -> Iterator[InputForm]:
    """Yield the forms that an input of `shape` might have."""
    flat: tuple[Order, ...] = ("rows of tokens", "tokens of rows")
    for axis, size in enumerate(shape):
        if size == len(BATCH):
            yield InputForm(len(shape), axis, "rows", step)
        elif length is None:
            if size and not size % len(BATCH):
                yield InputForm(len(shape), axis, "rows of parts", step)
        elif size == len(BATCH) * length:
            for order in flat:
                yield InputForm(len(shape), axis, order, step)


def _rows(x: torch.Tensor, form: InputForm, rows: int, length: int) -> torch.Tensor | None:
    """Return x as [rows, positions, features], or None if it does not have the form."""
    spread: Spread | None = form.spread(x.shape[:-1], rows, length)
    if spread is None:
        return None
    before, after = spread
    return x.reshape(before, rows, after, -1).movedim(1, 0).flatten(1, 2).float()


def _shows_pattern(rows: torch.Tensor, first: torch.Tensor) -> bool:
    """Return whether rows are equal and unequal as their tokens are.

    rows [rows of the batch, positions, features]; `first` is the first of them in a pass with
    others.
    """
    if first.shape != rows.shape[1:]:
        return False
    # The first row must also ignore the rows beside it.
    same = [rows[i] - rows[j] for i, j in EQUAL] + [rows[0] - first]
    other = [rows[i] - rows[j] for i, j in UNEQUAL]
    most = torch.stack([torch.linalg.vector_norm(difference) for difference in same]).max()
    least = torch.stack([torch.linalg.vector_norm(difference) for difference in other]).min()
    equal, unequal = torch.stack([most, least]).tolist()
    return bool(equal <= TOLERANCE * unequal and unequal > 0)


def _is_in_order(rows: torch.Tensor) -> bool:
    """Return whether positions are the tokens in their order, none depending on later ones."""
    if rows.shape[1] != LENGTH:
        return False
    distances: list[float] = torch.linalg.vector_norm(rows[0] - rows[4], dim=-1).tolist()
    prefix, suffix = max(distances[:SHARED]), min(distances[SHARED:])
    return prefix <= TOLERANCE * suffix and suffix > 0
