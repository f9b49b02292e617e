"""A base model with hooks, as its calls, its adapters and continuous batching use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch import nn

from lora_backends.adapters import AdapterPool, Checkpoint, LoadLimits
from lora_backends.backend import LoRABackend
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.features import OUTPUT_SCALES
from lora_backends.hf.calls.attention import Attention
from lora_backends.hf.hooks.experts import expert_specs, find_experts
from lora_backends.hf.hooks.installed import Hooked
from lora_backends.hf.hooks.linear import Served, begin_hook, first_input
from lora_backends.hf.hooks.routers import find_routers
from lora_backends.hf.layout.images import Images
from lora_backends.hf.layout.probe import UNREACHED, probe
from lora_backends.hf.layout.sharded import is_sharded
from lora_backends.hf.layout.sites import base_layer, check_start, find_sites
from lora_backends.hf.layout.structure import Structure
from lora_backends.hf.layout.trial import TrialInputs, tried_input
from lora_backends.hf.layout.unused import unused_by
from lora_backends.hf.replacements.modules import Replacements
from lora_backends.hf.training.registry import Training

_NUMBERS = count()


class WrappedModel:
    """The modules of a base model that adapters may touch, their layouts, hooks and adapters."""

    pool: AdapterPool  # set by `open`

    def __init__(
        self,
        base: nn.Module,  # that has passed `check_base`
        backend: LoRABackend,
        dtype: torch.dtype,
        device: torch.device,
        fuse: bool,  # join modules with one input
        trial: TrialInputs | None = None,  # inputs of a model outside Transformers
    ) -> None:
        self.base, self.backend, self.dtype = base, backend, dtype
        self.key = f"model {next(_NUMBERS)}"  # see `ModelCall.model`
        self.experts = find_experts(base, dtype, device)
        routers = find_routers(base, self.experts, dtype, device)
        # Routers are no linear layers for `find_sites`, and take LoRA all the same.
        # a denoiser of images has convolutions, which are adapted, too
        sites = find_sites(base, dtype, device, trial is not None)
        self.routers = frozenset(routers)
        # Experts see hidden states as a linear layer does, so one probe is enough.
        as_modules = {path: site.as_module for path, site in self.experts.items()}
        self.layouts, misfits = probe(base, sites | routers | as_modules, trial)
        for path in misfits.keys() & sites.keys():  # routers may return a tuple
            sites[path] = replace(sites[path], refusal=sites[path].refusal or misfits[path])
        self.sites = sites | routers
        served = Served(self.key, backend, self.layouts)
        self.hooked = Hooked(served, self.sites, self.experts, routers, fuse)
        self.structure = Structure(base)
        self.attention = Attention(base)
        main_input = getattr(base, "main_input_name", "input_ids")
        self.main_input: str = main_input if trial is None else next(iter(trial.values))
        self.first_input = first_input(base.forward, self.main_input)
        self.images = Images(getattr(base, "config", None), tried_input(base))
        self.training = Training(self)

    def open(
        self,
        max_adapters: int,
        max_rank: int,
        limits: LoadLimits | None,
        max_expert_rank: int | None,
        adapter_dtype: torch.dtype | str | None,
    ) -> AdapterPool:
        """Make the pool of the adapters, then hook the model; arguments as of `MultiLoRAModel`."""
        # A kernel may run all experts at once and pass their module by.
        reached = {
            path: site.refused(UNREACHED) if self._is_unreached(path) else site
            for path, site in self.experts.items()
        }
        hooked = self.hooked
        self.pool = AdapterPool(
            {path: site.spec for path, site in self.sites.items()},
            max_adapters,
            max_rank,
            self.dtype,
            self.backend.device,
            [group.paths for group in hooked.groups],
            limits,
            expert_specs(reached),
            max_expert_rank,
            base_layers=partial(base_layer, self.sites),
            adapter_dtype=adapter_dtype,
            own_modules=Replacements(
                self.key, self.base, self.layouts, hooked.handles, hooked.fuse
            ),
            unused=unused_by(self.base),
        )
        # Last: whatever is refused above leaves the base model as it was.
        begin = begin_hook(
            self.key, self.structure, self.main_input, self.base.forward, self.attention
        )
        hooked.register(self.base, begin)
        self.structure.watch_forwards(self.modules)
        return self.pool

    def close(self) -> AdapterPool:
        """Take the hooks off, and return a pool without adapters in the place of the pool."""
        self.training.close()
        self.hooked.remove()
        self.pool = AdapterPool({}, 1, 1, self.dtype, self.pool.device)
        return self.pool

    @property
    def slices(self) -> Mapping[str, int]:
        """Path of a module with siblings to its slice of the stack that they share."""
        return self.hooked.slices

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules that an adapter may touch, by path."""
        sites = {path: site.module for path, site in self.sites.items()}
        return sites | {path: site.module for path, site in self.experts.items()}

    def check_attached(self) -> None:
        """Raise InvalidInputError for a model that was detached, or lacks modules that it had."""
        self.hooked.check()
        self.structure.check_modules()

    def check(self, may_train: bool = False) -> None:
        """Refuse a model that cannot run with its adapters.

        Args:
            may_train: whether training mode is allowed where the model has adapters in training.

        Raises:
            InvalidInputError: as `check_attached`; or it is in training mode, or was converted.
        """
        self.check_attached()
        self.structure.check_state(may_train and bool(self.training.adapters))

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Refuse an adapter that deltas of rows cannot reproduce.

        Raises:
            UnsupportedInputError: it adapts a module whose LoRA is refused; needs DoRA of a backend
                without it; is a PiSSA or OLoRA whose start cannot be taken off; or needs whole
                weights of a sharded model.
            InvalidInputError: it holds base weights of modules that the base model lacks.
        """
        refused = [
            f"\n  - {path}: {site.refusal}"
            for path in checkpoint.modules
            if (site := self.sites.get(path)) is not None and site.refusal is not None
        ]
        if refused:
            raise UnsupportedInputError(
                f"{checkpoint.folder} adapts modules that cannot be reproduced row by row:"
                + "".join(refused)
            )
        # Text reaches no module of images, which may still run.
        unreached = {
            path for path in self.layouts if self._is_unreached(path) and not self.images.hold(path)
        }
        scaled = any(delta.magnitude is not None for delta in checkpoint.modules.values())
        changes = any(delta.init is not None for delta in checkpoint.modules.values())
        if (scaled or changes or checkpoint.own) and any(map(is_sharded, self.base.modules())):
            raise UnsupportedInputError(
                f"{checkpoint.folder} needs whole weights of the base model, which fully_shard has "
                f"spread over processes: it uses DoRA, PiSSA, OLoRA or modules of its own\n"
                f"  to do: load it into a model that is not sharded"
            )
        check_start(checkpoint, self.sites, unreached)
        if scaled and OUTPUT_SCALES not in self.backend.features:
            raise UnsupportedInputError(
                f"{checkpoint.folder} uses DoRA (use_dora), which backend {self.backend.name!r} "
                f"cannot run: it lacks {OUTPUT_SCALES}\n"
                f"  to do: use another backend, e.g. torch_ref"
            )
        unknown = sorted(set(checkpoint.base_weights) - set(self.sites))
        if unknown:
            raise InvalidInputError(
                f"{checkpoint.folder} holds base weights of modules that the base model lacks: "
                f"{', '.join(unknown[:3])}"
            )

    def _is_unreached(self, path: str) -> bool:
        return self.layouts[path].reason == UNREACHED
