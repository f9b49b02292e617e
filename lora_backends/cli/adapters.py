"""`lora-backends adapters`: the PEFT adapters in a folder, and whether they can be read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from lora_backends.adapters import read_checkpoint
from lora_backends.adapters.describe import AdapterInfo, described
from lora_backends.adapters.files.folders import adapter_folders
from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.cli.console import table
from lora_backends.cli.options import JsonFlag
from lora_backends.common.files import as_path, kind_of
from lora_backends.errors import InvalidInputError, LoRABackendError, shown


def adapters(
    folder: Annotated[Path, typer.Argument(help="An adapter, or a folder with several.")],
    as_json: JsonFlag = False,
) -> None:
    """List the adapters in a folder: rank, targets, dtype and bytes, or why one is refused.

    The base model is not looked at. The exit status is 1 if an adapter is refused.
    """
    path = as_path(folder, "FOLDER")
    if kind_of(path / CONFIG_FILE) is not None:
        folders = {path.resolve().name: path}
    else:
        folders = adapter_folders(path)
    if not folders:
        raise InvalidInputError(
            f"there is no adapter in {path}\n  allowed: a folder with {CONFIG_FILE}, or with such "
            f"folders in it"
        )
    infos = [_described(name, each) for name, each in folders.items()]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(info) for info in infos], indent=2))
    else:
        columns = ["adapter", ">rank", "targets", "dtype", ">bytes"]
        table("", columns, [_row(info) for info in infos], lines=False)
    for info in infos:
        # on standard error, so that the table can be piped
        if info.problem is not None and not as_json:
            typer.echo(f"\n{_plain(info.name)}: {info.problem}", err=True)
    if any(info.problem is not None for info in infos):
        raise typer.Exit(1)


def _described(name: str, folder: Path) -> AdapterInfo:
    try:
        return described(name, "disk", read_checkpoint(folder, own_modules=True))
    except LoRABackendError as error:
        return AdapterInfo(name, "disk", folder=str(folder), problem=str(error))


def _row(info: AdapterInfo) -> list[str]:
    name = _plain(info.name)
    if info.problem is not None:
        return [name, "", "refused, see below", "", ""]
    return [name, str(info.rank), ", ".join(info.targets), info.dtype, f"{info.bytes:,}"]


def _plain(name: str) -> str:
    """Return a folder's name without characters that act on a terminal."""
    # a folder's name may hold escape sequences
    return name if name.isprintable() else shown(name)
