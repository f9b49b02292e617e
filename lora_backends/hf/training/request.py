"""`TrainingCall`: a call whose modules run as nodes of autograd's graph.

Its hooks take it by `trains`, not by `model`, so that a pass without gradients looks at nothing
more. What the backward and a recomputation need is in this object: its plans, which nobody
refills, and the adapters of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_backends.adapters import AdapterPool
from lora_backends.backend import LoRABackend
from lora_backends.dispatch.gradients.differentiate import run_with_parameters
from lora_backends.dispatch.gradients.recorded import SlotParameters
from lora_backends.dispatch.repeats import NO_REPEATS, Repeats
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.calls.entries import RowAdapters
from lora_backends.hf.calls.request import Request
from lora_backends.hf.layout.images import Images
from lora_backends.hf.layout.layout import Layout
from lora_backends.hf.layout.sites import ModuleSite
from lora_backends.hf.training.adapter import TrainedAdapter
from lora_backends.hf.training.dropout import Dropout
from lora_backends.hf.training.products import is_product
from lora_backends.operations import BY_NAME
from lora_backends.weights import LoRAWeights


class TrainingCall(Request):
    """A call with adapters that are trained, others that are loaded, and rows without any.

    Raises:
        InvalidInputError: as `Request`.
        UnsupportedInputError: a blend, or an adapter with parts that a graph does not hold.
    """

    def __init__(
        self,
        model: str,
        pool: AdapterPool,
        images: Images,
        adapters: Sequence[RowAdapters],
        slots: Mapping[str, int],
        backend: LoRABackend,
        after_cache: bool,
        trained: Sequence[TrainedAdapter],
        drops: bool,  # their dropout acts
        whole: bool,  # the backward runs through all layers
    ) -> None:
        super().__init__(model, pool, images, adapters, slots, backend, after_cache)
        self.model, self.trains = "", model
        if self._choices.scaled or self._choices.width > 1:
            raise UnsupportedInputError(
                "a call that trains adapters has blends or strengths\n"
                "  allowed: one name or None per row or token\n"
                "  to do: call it under torch.no_grad(), or give each row one adapter"
            )
        # whole: though no adapter touches the first layers; processes that share a sharded base
        # gather the same layers in the same order
        self._trained, self._whole = trained, whole
        self._versions = [adapter.versions() for adapter in trained]
        self._records = {slot: pool.record_of(slot) for slot in slots.values()}
        self._paths: set[str] = set()  # that an adapter of the batch touches
        for name, slot in slots.items():
            if pool.own_modules(slot):
                raise UnsupportedInputError(
                    f"adapter {name!r} has modules of its own (modules_to_save, biases, tokens or "
                    f"an invocation), and another one of the batch is trained\n"
                    f"  allowed: adapters of LoRA alone in a batch that is trained\n"
                    f"  to do: run its rows in a call of their own, under torch.no_grad()"
                )
            self._paths.update(pool.modules_of(slot))
        self._dropout = Dropout(backend, pool.slots.num_slots, trained) if drops else None

    @property
    def joins(self) -> bool:
        """Whether siblings may share a call: with dropout each sees another input."""
        return self._dropout is None

    def touches(self, paths: Sequence[str]) -> bool:
        """Return whether an adapter of the batch touches one of the modules."""
        return not self._paths.isdisjoint(paths)

    def repeats(self) -> Repeats:
        """Return no calls: a stored one has no graph."""
        return NO_REPEATS

    def add(
        self, site: ModuleSite, layout: Layout, module: nn.Module, x: Tensor, output: Tensor
    ) -> Tensor | None:
        """Return the output of a module with the LoRA of each row, or None where there is none."""
        path, paths = site.path, (site.path,)
        is_embedding = site.spec.kind == "embedding"
        if is_embedding and self._whole and not output.requires_grad and torch.is_grad_enabled():
            output.requires_grad_()
        if not self.touches(paths):
            return None
        weights = self.stacks[path]
        parameters = self._parameters(paths, joined=False)
        if is_embedding:
            plan = self.plan(x.shape, layout, paths)
            ids = x.flatten().contiguous()
            return self._added("run_embedding", ids, weights, plan, output, parameters)
        plan = self.plan(x.shape[:-1], layout, paths)
        dropped = x if self._dropout is None else self._dropout.of(x, plan)
        if dropped is x and is_product(module, x, output):
            # Its graph is dropped: the backward through the weight is a part of the node.
            # nothing else has used `output` yet
            y, weight = output.data.contiguous(), cast(nn.Linear, module).weight
            return self._run("run_linear", x, weights, plan, y, parameters, weight)
        if torch.is_autocast_enabled(x.device.type):
            dropped = dropped.to(weights.compute_dtype)
        return self._added("run_linear", dropped, weights, plan, output, parameters)

    def multiply(
        self,
        operation: str,
        paths: Sequence[str],  # of the modules, one per slice
        layout: Layout,
        x: Tensor,
        weights: LoRAWeights,  # the stack that they share
        weight: Tensor,  # [sum of widths, in_features], without a gradient
        bias: Tensor | None,  # [sum of widths]
    ) -> Tensor:
        """Return the product of x with joined weights, with the LoRA of each row."""
        plan = self.plan(x.shape[:-1], layout, paths)
        parameters = self._parameters(paths, joined=True)
        with torch.no_grad():
            # `.data`: autograd refuses views that were made without a graph.
            y = functional.linear(x, weight, bias).contiguous().data
        return self._run(operation, x, weights, plan, y, parameters, weight)

    def check_slots(self) -> None:
        """Raise InvalidInputError if an adapter of the batch was unloaded or updated since."""
        for slot, record in self._records.items():
            if self._pool.record_of(slot) is not record:
                raise InvalidInputError(
                    "an adapter of the batch was unloaded, updated or evicted between its forward "
                    "and its backward\n  to do: run the backward first, and pin adapters that are "
                    "not trained"
                )

    def check_recomputation(self) -> None:
        """Raise InvalidInputError if `check_slots` does, or parameters have changed since."""
        self.check_slots()
        for adapter, versions in zip(self._trained, self._versions, strict=True):
            if adapter.versions() != versions:
                raise InvalidInputError(
                    f"parameters of {adapter.name!r} have changed between a forward pass with "
                    f"gradient checkpointing and its backward\n"
                    f"  to do: run the backward before the optimizer's step"
                )

    def _parameters(self, paths: Sequence[str], joined: bool) -> SlotParameters:
        """Return the parameters of the batch's adapters for one stack, kept for the next batch."""
        if not self._trained:
            return SlotParameters(())
        kept, key = self._trained[0].of_batches, (tuple(paths), joined)
        adapters, parameters = kept.get(key, (None, None))
        if parameters is None or adapters != self._trained:
            sources = [each.joined if joined else each.alone for each in self._trained]
            parameters = SlotParameters(
                [p for source in sources for path in paths for p in source.get(path, ())]
            )
            kept[key] = list(self._trained), parameters
        return parameters

    def _added(
        self,
        operation: str,
        x: Tensor,
        weights: LoRAWeights,
        plan: Any,
        output: Tensor,
        parameters: SlotParameters,
    ) -> Tensor:
        """Return a copy of an output, whose graph goes on, with the LoRA added."""
        y = output.reshape(-1, output.shape[-1]).clone(memory_format=torch.contiguous_format)
        x = x if x.ndim == 1 else x.reshape(-1, x.shape[-1])
        return self._run(operation, x, weights, plan, y, parameters).view(output.shape)

    def _run(
        self,
        operation: str,
        x: Tensor,
        weights: LoRAWeights,
        plan: Any,
        y: Tensor,
        parameters: SlotParameters,
        weight: Tensor | None = None,
    ) -> Tensor:
        return run_with_parameters(
            self.backend, BY_NAME[operation], x, weights, plan, y, parameters,
            base_weight=weight, check=self.check_slots,
        )  # fmt: skip
