"""`lora-backends agree`: whether training and generation compute the same LoRA."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_backends.cli.console import output, output_of_plugins_aside, step, table
from lora_backends.cli.generating.config import GenerateConfig, adapters_of, job, prompts_of
from lora_backends.cli.generating.model import check_adapters, encoded, load
from lora_backends.cli.options import Adapter, AnyDevice, Backend, JsonFlag, MaxNewTokens, Model
from lora_backends.errors import InvalidInputError
from lora_backends.selection.choice import get_backend

if TYPE_CHECKING:
    from lora_backends.hf.agreement import Agreement

INVARIANT = "batch_invariant"


def agree(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the job, as of generate.")
    ] = None,
    model: Model = None,
    adapter: Adapter = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; repeatable; replaces the file's.")
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(help="Adapter of each --prompt in order, or one for all; default: the only."),
    ] = None,
    backend: Backend = None,
    device: AnyDevice = None,
    dtype: Annotated[str | None, typer.Option(help="Of the base model, or auto.")] = None,
    max_new_tokens: MaxNewTokens = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare log-probabilities of a training forward with those of generate, token by token.

    Names the first module whose output differs. Feeds each module's rows from generation through
    its LoRA in both batch shapes, with batch_invariant=True where the backend has the option; exit
    status 1 if they differ in any bit. The base model itself may differ: matrix libraries choose
    another order of sums for another number of rows.
    """
    if adapter and prompt and not use:
        use = [adapter[0].partition("=")[0]] if len(adapter) == 1 else None
    settings = job(
        config,
        adapters=adapters_of(adapter),
        prompts=prompts_of(prompt, use),
        model=model,
        backend=backend,
        device=device,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
    )
    with output_of_plugins_aside(as_json):
        report = _run(settings)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    raise typer.Exit(0 if report["same_lora"] else 1)


def _run(settings: GenerateConfig) -> dict[str, Any]:
    names = _names(settings)
    check_adapters(settings)
    settings = _invariant(settings)
    # Adapters that are trained are loaded apart, below.
    bare = [prompt.model_copy(update={"adapter": None}) for prompt in settings.prompts]
    model, tokenizer = load(settings.model_copy(update={"adapters": {}, "prompts": bare}))

    from lora_backends.hf.agreement import compare

    for name in dict.fromkeys(names):
        model.load_adapter(name, settings.adapters[name], trainable=True)
    prompts = encoded(model, tokenizer, settings)
    rows = []
    for number, name in enumerate(names):
        with step(f"comparing prompt {number + 1} of {len(names)}"):
            ids = prompts.row(number).input_ids[0]
            agreement = compare(model, name, ids, settings.max_new_tokens)
        rows.append(_row(settings.prompts[number].text, name, agreement, tokenizer))
    return {
        "backend": model.backend.name,
        INVARIANT: model.backend.batch_invariant,
        "same_lora": all(row["same_lora"] for row in rows),
        "rows": rows,
    }


def _names(settings: GenerateConfig) -> list[str]:
    """Return the adapter of each prompt that has one; every prompt needs one, and no blend."""
    names = []
    for number, entry in enumerate(settings.entries(), 1):
        if not isinstance(entry, str):
            raise InvalidInputError(
                f"prompt {number} uses {'no adapter' if entry is None else 'a blend'}\n"
                f"  allowed: the name of one adapter\n  to do: give --prompt TEXT --use NAME"
            )
        names.append(entry)
    return names


def _invariant(settings: GenerateConfig) -> GenerateConfig:
    """Return settings that ask the backend to be batch invariant, where it has the option."""
    chosen = get_backend(settings)
    options = dict(settings.backend_options)
    if INVARIANT in inspect.signature(type(chosen)).parameters:
        options.setdefault(INVARIANT, True)
    return settings.model_copy(update={"backend": chosen.name, "backend_options": options})


def _row(prompt: str, name: str, agreement: Agreement, tokenizer: Any) -> dict[str, Any]:
    first = agreement.first_token
    return {
        "prompt": prompt,
        "adapter": name,
        "tokens": len(agreement.tokens),
        "largest_difference": agreement.largest,
        "differences": agreement.differences,
        "first_token": first,
        "first_token_text": None if first is None else tokenizer.decode([agreement.tokens[first]]),
        "first_module": agreement.first_module,
        "cause": agreement.cause,
        "compared_loras": agreement.compared_loras,
        "different_loras": agreement.different_loras,
        "same_lora": agreement.same_lora,
    }


def _print(report: dict[str, Any]) -> None:
    rows = []
    for row in report["rows"]:
        first = row["first_token"]
        rows.append(
            [
                row["adapter"],
                str(row["tokens"]),
                f"{row['largest_difference']:.1e}",
                "none" if first is None else f"{first + 1}, {row['first_token_text']!r}",
                row["first_module"] or "none",
                row["cause"] or "",
            ]
        )
    table(
        f"log-probabilities of a training forward and of generate, backend {report['backend']}",
        ["adapter", ">tokens", ">largest", "first token", "first module", "by its"],
        rows,
    )
    promise = "batch invariant" if report[INVARIANT] else "not batch invariant"
    for row in report["rows"]:
        different, count = row["different_loras"], row["compared_loras"]
        verdict = (
            f"differs in {len(different)} of {count} modules: {different[0]}, ..."
            if different
            else f"is the same bit for bit in {count} modules"
        )
        output().print(
            f"{row['adapter']}: the LoRA alone ({promise}) {verdict}", markup=False, soft_wrap=True
        )
