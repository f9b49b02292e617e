"""`MultiLoRAPipeline`: a diffusers pipeline whose images each use their own adapter."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn

import torch
from torch import nn

from lora_backends.adapters import LoadLimits
from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.adapters.pool.staging import check_name
from lora_backends.backend import LoRABackend
from lora_backends.common.files import as_path, kind_of
from lora_backends.diffusers.calls import ComponentCall, PipelineCall
from lora_backends.diffusers.checkpoint import checkpoint_of
from lora_backends.diffusers.component import Component, Room, check_component
from lora_backends.diffusers.conversion import convert
from lora_backends.diffusers.families import family_of
from lora_backends.diffusers.files import read_file
from lora_backends.errors import InvalidInputError, UnsupportedInputError, did_you_mean, shown
from lora_backends.hf.backend import backend_for
from lora_backends.hf.calls.entries import Entry, adapter_names, is_per_token
from lora_backends.hf.calls.running import running
from lora_backends.hf.layout.base_checks import dtype_and_device
from lora_backends.hf.words import without_base


class MultiLoRAPipeline:
    """Every image of a batch uses its own LoRA adapter, a blend of several, or none.

    Each image equals, within rounding, the one that diffusers makes after `load_lora_weights` and
    `set_adapters` of that image's adapters alone. The pipeline is changed in place: its denoiser
    and text encoders get forward hooks, which `detach` removes. A call of the pipeline itself
    computes without adapters, unless a callback makes it during a call of this wrapper.

        model = MultiLoRAPipeline(pipe, max_adapters=8, max_rank=64)
        model.load_adapter("anime", "anime.safetensors")
        model(prompt=["a cat", "a dog"], adapters=["anime", None], num_inference_steps=20).images

    The constructor runs the denoiser and the text encoders on a few small inputs, to find the axis
    of each module's input that holds the rows. If images use different adapters at a module whose
    rows were not found, or that gets another number of rows, the call is refused by name.

    Args:
        pipe: a pipeline of Stable Diffusion, SDXL, Stable Diffusion 3, Flux or Qwen-Image: from
            text, from an image (Img2Img), or inpainting.
        backend: a backend's name, "auto", a `LoRABackend`, or None for the environment's choice.
        max_adapters: the most adapters that may be loaded at a time.
        max_rank: the largest rank of an adapter.
        backend_options: the backend's own options.
        limits: limits of the size and cost of an adapter's file; None takes the defaults.
        adapter_dtype: "int8", "float8_e4m3fn" or "float8_e5m2": adapters are quantised to it. None
            keeps each component's dtype.

    Raises:
        InvalidInputError: `pipe` is no pipeline, or an option is out of range.
        UnsupportedInputError: the order of rows is not known for this class of pipeline, or a
            component is compiled, offloaded or spread over devices, has hooks of diffusers such
            as caching, fused projections or adapters of PEFT.
        BackendUnavailableError: the backend does not run on the pipeline's device.
    """

    def __init__(
        self,
        pipe: Any,
        backend: str | LoRABackend | None = "auto",
        max_adapters: int = 8,
        max_rank: int = 64,
        backend_options: Mapping[str, Any] | None = None,
        limits: LoadLimits | None = None,
        adapter_dtype: torch.dtype | str | None = None,
    ) -> None:
        # All checks run before the first hook.
        self._family = family = family_of(pipe)
        bases = {name: getattr(pipe, name) for name in (family.denoiser, *family.encoders)}
        # a pipeline may be made without a text encoder
        bases = {name: base for name, base in bases.items() if isinstance(base, nn.Module)}
        for name, base in bases.items():
            check_component(name, base)
        dtype, device = dtype_and_device(bases[family.denoiser])
        backend = backend_for(backend, backend_options, device, dtype, adapter_dtype)
        self.pipe, self.backend = pipe, backend
        self._room = Room(max_adapters, max_rank, LoadLimits.of(limits), adapter_dtype)
        self._signature = inspect.signature(type(pipe).__call__)
        self._lock = RLock()  # guards _adapters
        self._adapters: dict[str, tuple[str, ...]] = {}  # names of the components it adapts
        self._components: dict[str, Component] = {}
        for name, base in bases.items():
            is_denoiser = name == family.denoiser
            trial = family.trial(base) if is_denoiser else None
            copies = family.copies if is_denoiser else (1,)
            self._components[name] = Component(name, base, backend, copies, trial)
        try:
            for component in self._components.values():
                component.open(self._room)
        except BaseException:  # for instance out of memory: no hook may stay
            for component in self._components.values():
                component.wrapped.hooked.remove()
            raise

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copy and pickle: hooks on the components and locks belong to this object alone."""
        raise UnsupportedInputError(
            "a wrapped pipeline cannot be copied or pickled\n"
            "  to do: copy the pipeline, and wrap the copy"
        )

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters, in order of loading."""
        return list(self._adapters)

    def load_adapter(self, name: str, source: str | Path | Mapping[str, torch.Tensor]) -> list[str]:
        """Load a LoRA under a name.

        Each module gets the file's alpha for that module. Where kohya's files have several alphas,
        diffusers may apply the commonest one of a component to all of its modules.

        Args:
            name: the adapter's name in calls.
            source: a file in the format of diffusers, kohya, XLabs or BFL; a folder with one such
                file; a folder of PEFT (adapter_config.json), whose LoRA is the denoiser's; or
                tensors by the names of such a file.

        Returns:
            Names of the components that it adapts, for instance ["unet", "text_encoder"].

        Raises:
            InvalidInputError: the file is missing or damaged, does not fit the pipeline, or has a
                part that diffusers would drop; or the name or all slots are taken. Nothing has
                changed.
            UnsupportedInputError: the adapter has a feature that cannot be reproduced exactly.
                Nothing has changed.
        """
        check_name(name)
        self._check_new(name)
        # all components are read and checked before a slot of any is written
        staged = {}
        for part, checkpoint in self._checkpoints(source).items():
            component = self._components[part]
            component.wrapped.check_attached()
            component.check_checkpoint(checkpoint)
            staged[component] = component.pool.stage(name, checkpoint)
        with self._lock:
            self._check_new(name)  # again: another thread may have loaded one meanwhile
            done: list[Component] = []
            try:
                for component, ready in staged.items():
                    component.pool.put(name, ready)
                    done.append(component)
            except BaseException:
                for component in done:
                    # an adapter is in all of its components, or in none
                    component.pool.unload(name)
                raise
            self._adapters[name] = tuple(component.name for component in staged)
        return list(self._adapters[name])

    def unload_adapter(self, name: str) -> None:
        """Free the slots of an adapter.

        Raises:
            InvalidInputError: it is not loaded, or a running call uses it.
        """
        with self._lock, ExitStack() as locks:
            self._check_loaded([name])
            parts = [self._components[part] for part in self._adapters[name]]
            for component in parts:  # no call may take one slot while another is freed
                locks.enter_context(component.pool.slots.lock)
            for component in parts:
                component.pool.unload(name)
            del self._adapters[name]

    def __call__(self, *args: Any, adapters: Sequence[Entry], **kwargs: Any) -> Any:
        """Run the pipeline, every image with its own adapters.

        Args:
            args: arguments of the pipeline.
            adapters: a list with one entry per prompt: an adapter's name, a dict of names to
                strengths such as ``{"anime": 0.7, "ink": 0.3}``, or None. An entry applies to all
                `num_images_per_prompt` images. Strengths act on the denoiser and on the text
                encoders, as in `set_adapters`.
            kwargs: keyword arguments of the pipeline.

        Returns:
            The pipeline's result.

        Raises:
            InvalidInputError: a name is not loaded, a strength is not finite, the number of
                entries is not that of the prompts, or a component was changed.
            UnsupportedInputError: images have different adapters at a module whose rows are not
                known, or with an input such as an IP-Adapter's; an adapter with DoRA is blended
                with another; a strength other than 1 is given to an adapter with DoRA or a LoRA
                bias, or to a backend that cannot apply it; attention arguments are given.
        """
        given = self._signature.bind(self.pipe, *args, **kwargs)
        given.apply_defaults()
        prompts, images = _counts(given.arguments)
        _check_arguments(given.arguments)
        entries = _entries(adapters, prompts)
        with self._running(entries, images):
            return self.pipe(*args, **kwargs)

    def detach(self) -> Any:
        """Remove all hooks and adapters, and return the pipeline as it was.

        Raises:
            InvalidInputError: a call is running. Nothing has changed.
        """
        with self._lock:
            components = list(self._components.values())
            if components and components[0].wrapped.hooked.handles:
                for component in components:
                    # the first refuses while a call runs, which uses every component
                    component.wrapped.hooked.close()
                for component in components:
                    component.wrapped.close()
                self._adapters.clear()
        return self.pipe

    def __repr__(self) -> str:
        return (
            f"<MultiLoRAPipeline of {type(self.pipe).__name__}, {self.backend!r}, {self.adapters}>"
        )

    @contextmanager
    def _running(self, entries: Sequence[Entry], images: int) -> Iterator[None]:
        """Run the components' passes in the block with these entries, one per prompt."""
        names = adapter_names(entries)
        with ExitStack() as stack:
            calls: dict[str, ComponentCall] = {}
            # Locked until all slots are taken: an adapter that is unloaded and loaded again in
            # between may adapt other components.
            with self._lock:
                self._check_loaded(sorted(names))
                for part, component in self._components.items():
                    component.check(getattr(self.pipe, part))
                    stack.enter_context(component.wrapped.hooked.in_use())
                    held = {name for name in names if part in self._adapters[name]}
                    if not held:
                        continue
                    slots = stack.enter_context(component.pool.slots.in_use(held))
                    rows = [_of_component(entry, held) for entry in entries]
                    # a text encoder sees each prompt once, the denoiser every image
                    if part == self._family.denoiser:
                        rows = [row for row in rows for _ in range(images)]
                    calls[component.wrapped.key] = component.call(rows, slots)
            # the calls refer to each other: unless cleared, their inputs wait for gc
            stack.callback(calls.clear)
            stack.enter_context(running(PipelineCall(calls)))
            yield

    def _checkpoints(self, source: Any) -> dict[str, Any]:
        """Return the checkpoint of each component that a source adapts."""
        family, room = self._family, self._room
        if not isinstance(source, Mapping):
            path = as_path(source, "the LoRA file")
            if kind_of(path / CONFIG_FILE) is not None:
                pool = self._components[family.denoiser].pool
                return {family.denoiser: pool.read(path)}
        file = read_file(source, room.limits)
        parts = convert(self.pipe, family, file)
        missing = [part for part in parts if part not in self._components]
        if missing:
            file.refuse("the pipeline lacks a component", missing, ", ".join(self._components))
        return {
            part: checkpoint_of(
                file,
                part,
                tensors,
                self._components[part].wrapped.sites,
                room.max_rank,
                room.limits,
            )
            for part, tensors in parts.items()
        }

    def _check_new(self, name: str) -> None:
        if name in self._adapters:
            raise InvalidInputError(
                f"an adapter named {name!r} is loaded already\n  to do: unload_adapter it first"
            )
        if len(self._adapters) >= self._room.max_adapters:
            raise InvalidInputError(
                f"all slots are taken\n  given: {name!r}, beside {', '.join(self._adapters)}\n"
                f"  allowed: {self._room.max_adapters} adapters (max_adapters)\n"
                f"  to do: unload_adapter another one"
            )

    def _check_loaded(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._adapters:
                raise InvalidInputError(
                    f"no adapter named {name!r} is loaded{did_you_mean(str(name), self._adapters)}"
                    f"\n  allowed: {', '.join(self._adapters) or 'none is loaded'}"
                )


def _of_component(entry: Entry, held: set[str]) -> Entry:
    """Return an entry without the adapters that a component does not hold."""
    if isinstance(entry, Mapping):
        return {name: strength for name, strength in entry.items() if name in held} or None
    return entry if entry in held else None


def _counts(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of prompts of a call, and the number of images per prompt."""
    prompt, embeds = arguments.get("prompt"), arguments.get("prompt_embeds")
    if isinstance(prompt, str):
        prompts = 1
    elif isinstance(prompt, list):
        prompts = len(prompt)
    elif isinstance(embeds, torch.Tensor):
        prompts = embeds.shape[0]
    else:
        raise InvalidInputError(
            f"no prompts\n  given: prompt {shown(prompt)}\n  allowed: prompt, or prompt_embeds"
        )
    images = arguments.get("num_images_per_prompt")
    is_count = isinstance(images, int) and not isinstance(images, bool) and images >= 1
    if not (images is None or is_count):
        raise InvalidInputError(
            f"num_images_per_prompt is {shown(images)}\n  allowed: an int, 1 or more"
        )
    return prompts, images or 1


_ATTENTION_WORDS = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments by which diffusers scales its own adapters."""
    for name in _ATTENTION_WORDS:
        if arguments.get(name):
            raise UnsupportedInputError(
                f"{name} may hold a scale for diffusers' own LoRA, or inputs whose order of rows "
                f"is not known\n  given: {shown(arguments[name])}\n"
                f'  to do: give strengths in adapters=[{{"name": 0.7}}]'
            )


def _entries(adapters: Any, prompts: int) -> list[Entry]:
    """Return one checked entry for each prompt."""
    adapter_names(adapters)  # checks each entry
    if len(adapters) != prompts:
        raise InvalidInputError(
            f"adapters has {len(adapters)} entries for {prompts} prompts\n"
            f"  allowed: one adapter name, blend or None per prompt"
        )
    for index, entry in enumerate(adapters):
        if is_per_token(entry):
            raise InvalidInputError(
                f"adapters[{index}] is {shown(entry)}\n"
                f"  allowed: an adapter's name, a dict of names to strengths, or None"
            )
    return [without_base(entry) for entry in adapters]  # type: ignore[misc]
