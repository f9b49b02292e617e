"""One call of a pipeline: the adapters of every row, in the passes of each component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_backends.diffusers.trials import DenoiserTrial
from lora_backends.diffusers.widened import WidenedProducts, ranks_by_stack
from lora_backends.errors import UnsupportedInputError
from lora_backends.hf.calls.entries import Entry
from lora_backends.hf.calls.request import Request
from lora_backends.hf.calls.running import ModelCall
from lora_backends.hf.wrapped import WrappedModel

WIDENING_DEVICES = ("cuda",)
"""Types of devices on which layers may use `WidenedProducts`."""


class ComponentCall(Request):
    """The passes of one component in a call of the pipeline.

    Raises:
        UnsupportedInputError: a blend or a strength cannot be applied, for instance that of DoRA.
    """

    def __init__(
        self,
        name: str,
        wrapped: WrappedModel,
        entries: Sequence[Entry],  # one per prompt for a text encoder, per image for a denoiser
        slots: Mapping[str, int],
        copies: Sequence[int],  # of these rows, one behind another, that a pass may have
        trial: DenoiserTrial | None,  # of a denoiser; None for a text encoder
    ) -> None:
        pool = wrapped.pool
        for entry in entries:
            for adapter, strength in entry.items() if isinstance(entry, Mapping) else ():
                # PEFT divides by the norm of W + strength * scaling * B A, but the slot's
                # output_scales hold that of strength 1.
                if strength != 1 and pool.has_dora(slots[adapter]):
                    raise UnsupportedInputError(
                        f"adapter {adapter!r} uses DoRA, whose norm depends on the strength\n"
                        f"  given: strength {strength:g}\n  allowed: strength 1"
                    )
        super().__init__(
            wrapped.key, pool, wrapped.images, entries, slots, wrapped.backend, after_cache=False
        )
        # Modules without LoRA in this call are skipped, which saves the patches of convolutions.
        touched = {path for slot in slots.values() for path in pool.modules_of(slot)}
        self.stacks = {path: stack for path, stack in self.stacks.items() if path in touched}
        groups = {group.paths[0]: group.paths for group in wrapped.hooked.groups}
        self.shared = {
            leader: stack
            for leader, stack in self.shared.items()
            if not touched.isdisjoint(groups[leader])
        }
        backend = wrapped.backend
        if (
            trial is not None
            and self._choices.is_plain
            and backend.device.type in WIDENING_DEVICES
            and not backend.batch_invariant  # the width depends on the adapters of other images
        ):
            alone = ((stack, (path,)) for path, stack in self.stacks.items())
            joined = ((stack, groups[leader]) for leader, stack in self.shared.items())
            stacks = (*alone, *joined)
            ranks = ranks_by_stack(pool, [*slots.values()], stacks)
            self.widened = WidenedProducts(backend, [*slots.values()], ranks).run
        self._name, self._copies, self._trial = name, copies, trial
        self.outer: PipelineCall | None = None

    def begin(self, inputs: Mapping[str, Any], rows: int, length: int) -> None:
        """Begin a pass of so many rows; a denoiser's rows have no tokens to count."""
        super().begin(inputs, rows, 0 if self._trial is not None else length)

    def _slots_of_rows(self, rows: int) -> list[int]:
        if not self.differ:
            return [row[0] for row in self.rows] * (rows // len(self.rows) + 1)
        copies = rows // len(self.rows)
        if copies not in self._copies or rows % len(self.rows):
            allowed = " or ".join(str(len(self.rows) * each) for each in self._copies)
            raise UnsupportedInputError(
                f"the pipeline runs its {self._name} on another number of rows than expected\n"
                f"  given: a pass of {rows} rows for {len(self.rows)} entries\n"
                f"  allowed: {allowed} rows, or one adapter for all images"
            )
        return [row[0] for row in self.rows] * copies

    def _note_untried(self, inputs: Mapping[str, Any], alone: bool = False) -> None:
        if self._trial is None:
            super()._note_untried(inputs, alone)
            return
        name = self._trial.untried(inputs) if self.differ else None
        if name is not None:
            raise UnsupportedInputError(
                f"the order of rows is not known for the input {name} of the {self._name}\n"
                f"  given: images with different adapters\n"
                f"  allowed: {', '.join(self._trial.values)}\n"
                f"  to do: remove the source of the input (an IP-Adapter, a ControlNet, "
                f"attention arguments), or use one adapter for all images"
            )


class PipelineCall(ModelCall):
    """The calls of the components in which a row has an adapter, by the component's key.

    Each one is active while its component runs.
    """

    def __init__(self, calls: Mapping[str, ComponentCall]) -> None:
        super().__init__()
        self.calls = calls
        self.waiting = calls.keys()
        for call in calls.values():
            call.outer = self
