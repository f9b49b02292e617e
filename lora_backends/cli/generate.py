"""`lora-backends generate`: one batch of a real model, every row with its own adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_backends.cli.console import output, output_of_plugins_aside, step, table
from lora_backends.cli.generating.config import GenerateConfig, adapters_of, job, prompts_of
from lora_backends.cli.generating.entries import Entry, described
from lora_backends.cli.generating.model import encoded, load, naming_faults
from lora_backends.cli.options import Adapter, AnyDevice, Backend, JsonFlag, MaxNewTokens, Model
from lora_backends.errors import UnsupportedInputError
from lora_backends.selection.registry import backend_names, unavailable_reasons

if TYPE_CHECKING:
    from lora_backends.hf import MultiLoRAModel
    from lora_backends.hf.generating.greedy import Prompts

TIMED_TOKENS = 16
"""New tokens per row when contenders are timed: enough for a ratio, quick on a CPU."""


def generate(
    config: Annotated[Path | None, typer.Option(help="TOML file with the job.")] = None,
    model: Model = None,
    adapter: Adapter = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A row of the batch; repeatable; replaces the file's.")
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(
            help="Adapter of each --prompt in order, or one for all; - is the base, "
            "pirate:0.7+json:0.3 a blend."
        ),
    ] = None,
    backend: Backend = None,
    device: AnyDevice = None,
    adapter_dtype: Annotated[
        str | None, typer.Option(help="int8, float8_e4m3fn, float8_e5m2, or auto: the model's.")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run each row alone, too; status 1 if it differs.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Time the base model, every backend and PEFT.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Answer prompts in one batch of a Transformers model, each row through its own adapter."""
    settings = job(
        config,
        adapters=adapters_of(adapter),
        prompts=prompts_of(prompt, use),
        model=model,
        backend=backend,
        device=device,
        adapter_dtype=adapter_dtype,
        max_new_tokens=max_new_tokens,
    )
    with output_of_plugins_aside(as_json):
        report = _run(settings, check, compare, show=not as_json)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    if any(row.get("same_alone") is False for row in report["rows"]):
        raise typer.Exit(1)


def _run(settings: GenerateConfig, check: bool, compare: bool, show: bool) -> dict[str, Any]:
    """Load the model, answer, check and compare as asked; return the report."""
    model, tokenizer = load(settings)

    from lora_backends.hf.generating.greedy import rows_that_differ_alone

    adapters = settings.entries()
    prompts = encoded(model, tokenizer, settings)
    # with `show` every part is printed as soon as it is known: answers row by row, timings last
    answers, rows = _answer(model, tokenizer, prompts, settings, show)
    report: dict[str, Any] = {"backend": model.backend.name, "rows": rows}
    if settings.adapter_dtype != "auto":
        reports = map(model.adapter_report, sorted(settings.adapters))
        report["adapters"] = {
            each.name: {"dtype": settings.adapter_dtype, "bytes": each.nbytes, "error": each.error}
            for each in reports
        }
        if show:
            _print_adapters(report["adapters"])
    if check:
        with step("running every row alone"):
            different = rows_that_differ_alone(
                model, prompts, adapters, answers, settings.max_new_tokens
            )
        for index, row in enumerate(rows):
            row["same_alone"] = index not in different
        if show:
            _print_check(rows)
    if compare:
        report["tokens_per_second"] = _compare(model, prompts, settings)
        if show:
            _print_speeds(report["tokens_per_second"])
    return report


def _answer(
    model: MultiLoRAModel, tokenizer: Any, prompts: Prompts, settings: GenerateConfig, show: bool
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Return the new tokens of every row, and the rows of the report; print each as it ends."""
    from lora_backends.hf.generating.greedy import Watch

    adapters, length = settings.entries(), settings.max_new_tokens
    rows: list[dict[str, Any]] = [
        {"prompt": prompt.text, "adapter": adapter}
        for prompt, adapter in zip(settings.prompts, adapters, strict=True)
    ]

    def ended(index: int, tokens: list[int]) -> None:
        row = rows[index]
        if "answer" not in row:
            row["answer"] = tokenizer.decode(tokens).strip()
            if show:
                with progress.hidden():
                    _print_answer(row)

    what = f"answering {len(rows)} prompts in one batch with {model.backend.name}"
    with step(what) as progress:
        watch = Watch(prompts, lambda count: progress.note(f"{count} of {length} tokens"), ended)
        with naming_faults("the model cannot answer", "correct its generation_config.json"):
            sequences = model.generate(
                adapters=adapters, **prompts.inputs(length), stopping_criteria=[watch]
            )
        answers = prompts.answers(sequences)
        for index, tokens in enumerate(answers):
            ended(index, tokens)
    return answers, rows


def _compare(
    model: MultiLoRAModel, prompts: Prompts, settings: GenerateConfig
) -> dict[str, float | None]:
    """Return tokens per second of the base, every backend that runs here, and PEFT."""
    from lora_backends.hf import MultiLoRAModel
    from lora_backends.hf.generating.greedy import peft_mixed_batch, tokens_per_second

    adapters = settings.entries()
    used = {name for entry in adapters for name in _names(entry)}
    has_dora = any(model.pool.has_dora(model.pool.slots.slot(name)) for name in used)
    new_tokens = min(settings.max_new_tokens, TIMED_TOKENS)
    inputs = prompts.inputs(new_tokens, min_new_tokens=new_tokens)
    # the base model is timed without hooks
    base: Any = model.detach()
    speeds: dict[str, float | None] = {}

    def timed(name: str, call: Any) -> None:
        with step(f"timing {name}"):
            speeds[name] = tokens_per_second(call, len(adapters), new_tokens)

    timed("base model, no adapters", lambda: base.generate(**inputs))
    for name in backend_names():
        if unavailable_reasons(name, model.backend.device):
            continue
        # options belong to the configured backend alone
        update = {"backend": name, "backend_options": {}}
        label = f"lora_backends, {name}"
        try:
            candidate = MultiLoRAModel.from_config(base, settings.model_copy(update=update))
        except UnsupportedInputError:  # DoRA, for instance, which a backend need not have
            speeds[label] = None
            continue
        try:
            # DoRA or a blend may be refused only when it runs
            timed(label, lambda m=candidate: m.generate(adapters=adapters, **inputs))
        except UnsupportedInputError:
            speeds[label] = None
        finally:
            # the next contender wraps the same model
            candidate.detach()
    if not used:
        return speeds
    names = [entry for entry in adapters if not isinstance(entry, dict)]
    if has_dora or len(names) < len(adapters):  # a batch that PEFT refuses
        return {**speeds, "PEFT, mixed batch": None}
    folders = {name: settings.adapters[name] for name in names if name}
    try:
        with peft_mixed_batch(base, folders, names) as (peft_model, rows):
            timed("PEFT, mixed batch", lambda: peft_model.generate(adapter_names=rows, **inputs))
    except ImportError:
        speeds["PEFT, mixed batch"] = None
    return speeds


def _names(entry: Entry) -> Iterable[str]:
    return entry if isinstance(entry, dict) else [entry] if entry else []


def _why_not(name: str) -> str:
    is_missing = name.startswith("PEFT") and find_spec("peft") is None
    return "not installed" if is_missing else "cannot run it"


def _print_answer(row: dict[str, Any]) -> None:
    console = output()
    console.print(f"\n{row['prompt']}  [{described(row['adapter'])}]", style="bold", markup=False)
    console.print(row["answer"], markup=False)


def _print_check(rows: list[dict[str, Any]]) -> None:
    wrong = [str(number) for number, row in enumerate(rows, 1) if not row["same_alone"]]
    same = f"{len(rows) - len(wrong)} of {len(rows)} rows give the same tokens as when run alone"
    output().print(f"\n{same}{'; not: ' * bool(wrong)}{', '.join(wrong)}")


def _print_adapters(adapters: dict[str, Any]) -> None:
    table(
        "adapters",
        ["adapter", "dtype", ">MB", ">largest error"],
        [
            [name, kept["dtype"], f"{kept['bytes'] / 1e6:.2f}", f"{kept['error']:.4f}"]
            for name, kept in adapters.items()
        ],
    )


def _print_speeds(speeds: dict[str, float | None]) -> None:
    base = next(iter(speeds.values())) or 1.0
    table(
        "speed of the same batch",
        ["", ">tokens/s", ">of the base"],
        [
            [name, three_digits(speed), f"{speed / base:.2f}"]
            if speed is not None
            else [name, _why_not(name), ""]
            for name, speed in speeds.items()
        ],
    )


def three_digits(value: float) -> str:
    """Return a positive number with three significant digits, or all digits before the point."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"
