"""Random checkpoint folders: valid ones, and the same after a few mutations."""

import json
import random
import shutil
import warnings
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import save_file

from lora_backends.adapters import LoadLimits

from .folders import (
    CONFIG,
    PICKLE,
    PREFIX,
    SAFETENSORS,
    SPECS,
    draw_config,
    is_targeted,
    rank_of,
)
from .mutations import AFTER_WRITING, BEFORE_WRITING


class Case:
    """One folder, what was done to it, and the limits to read it with."""

    def __init__(self, folder: Path, seed: int, number: int) -> None:
        self.draw = random.Random(f"{seed}/{number}")
        self.torch = torch.Generator().manual_seed(self.draw.getrandbits(62))
        self.folder, self.steps = folder, []
        self.limits = LoadLimits(matching_seconds=1.0)
        self.config = draw_config(self.draw)
        self.tensors = self._draw_tensors()
        self.weights = folder / self.draw.choice([SAFETENSORS, SAFETENSORS, PICKLE])
        self.is_valid = bool(self.tensors)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for _ in range(self.draw.choice([0, 1, 1, 1, 2, 3])):
            self._mutate(self.draw.choice(BEFORE_WRITING))
        self._write()
        for _ in range(self.draw.choice([0, 0, 1, 1, 2])):
            self._mutate(self.draw.choice(AFTER_WRITING))
        if self.is_valid:  # a busy machine is no fault of the folder
            self.limits = LoadLimits(matching_seconds=30.0)

    def _mutate(self, step) -> None:
        self.steps.append(step.__name__)
        self.is_valid = False
        step(self)

    def _draw_tensors(self):
        draw, tensors = self.draw, {}
        modules = [path for path in SPECS if is_targeted(self.config, path)]
        for path in draw.sample(modules, draw.randint(min(1, len(modules)), len(modules))):
            spec, rank = SPECS[path], rank_of(self.config, path)
            if self.config["lora_bias"] and spec.kind == "embedding":
                continue
            linear = spec.kind == "linear"
            key_a, key_b = ("A.weight", "B.weight") if linear else ("embedding_A", "embedding_B")
            dtype = draw.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
            root = f"{PREFIX}{path}.lora_"
            tensors[root + key_a] = self.randn(rank, spec.in_features).to(dtype)
            tensors[root + key_b] = self.randn(spec.out_features, rank).to(dtype)
            if self.config["lora_bias"]:
                tensors[f"{root}B.bias"] = self.randn(spec.out_features)
        return tensors

    def randn(self, *shape):
        return torch.randn(shape, generator=self.torch)

    def _write(self) -> None:
        text = json.dumps(self.config)
        (self.folder / CONFIG).write_bytes(text.encode("utf-8", "surrogatepass"))
        if self.weights.name == SAFETENSORS:
            self.tensors = {
                name.encode("utf-8", "replace").decode(): value.clone().contiguous()
                for name, value in self.tensors.items()
            }
            save_file(self.tensors, self.weights, self.draw.choice([None, {"format": "pt"}]))
        else:
            content = self.draw.choice([dict, OrderedDict])(self.tensors)
            new = self.draw.random() < 0.7
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.save(content, self.weights, _use_new_zipfile_serialization=new)
