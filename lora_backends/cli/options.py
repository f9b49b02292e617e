"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lora_backends.model_shapes import PRESETS

Model = Annotated[str | None, typer.Option(help="Folder or hub id of the base model.")]
Adapter = Annotated[
    list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A PEFT checkpoint; repeatable.")
]
Backend = Annotated[str | None, typer.Option(help="Backend, or auto.")]
AnyDevice = Annotated[str | None, typer.Option(help="cpu, cuda, ... or auto.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Length of an answer.")]
Preset = Annotated[str | None, typer.Option(help=f"Layers of a model: {', '.join(PRESETS)}.")]
ConfigJson = Annotated[
    Path | None, typer.Option(help="Layers of the model of a Transformers config.json.")
]
InFeatures = Annotated[int | None, typer.Option(help="One layer: width of x.")]
OutputSlices = Annotated[
    str | None, typer.Option(help="One layer: widths of y's slices, e.g. 4096,1024,1024.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU.")]
DType = Annotated[str | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
