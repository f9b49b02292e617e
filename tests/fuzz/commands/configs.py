"""Random configurations: TOML text, environment and arguments, valid or spoilt."""

import copy
import datetime
import json
import math
import random
from typing import Any

from ..checkpoints.mutations import NASTY

BACKENDS = ["auto", "torch_ref", "numba_cpu", "triton", "csgmv"]
VALID = {
    "backend": lambda draw: draw.choice(BACKENDS),
    "device": lambda draw: draw.choice(["auto", "cpu", "cuda", "meta", "cuda:1"]),
    "dtype": lambda draw: draw.choice(["auto", "float16", "bfloat16", "float32", "float64"]),
    "max_adapters": lambda draw: draw.choice([1, 2, 8, 2**31 - 1]),
    "max_rank": lambda draw: draw.choice([1, 16, 64, 2**31 - 1]),
    "backend_options": lambda draw: draw.choice([{}, {"tile": 8}, {"a": {"b": [1, "x", 0.5]}}]),
    "adapters": lambda draw: draw.choice([{}, {"a": "/x"}, {"a": "/x", "b c": "/y/ü"}]),
    "limits": lambda draw: draw.choice([{}, {"tensors": 7}, {"matching_seconds": 0.5}]),
}
DEFAULTS = {
    "backend": "auto",
    "device": "auto",
    "dtype": "auto",
    "max_adapters": 8,
    "max_rank": 64,
    "backend_options": {},
    "adapters": {},
    "limits": {},
}
JOB = {
    "model": lambda draw: draw.choice([{"path": "m"}, {"package": "p"}, {"path": "m", "x": 1}]),
    "prompts": lambda draw: draw.choice([[{"text": "hi"}], [{"text": "a", "adapter": "a"}], []]),
    "max_new_tokens": lambda draw: draw.choice([1, 3, 40]),
    "chat": lambda draw: draw.choice([True, False]),
}
WORDS = [
    "max_rnk", "bakend", "", " ", "a.b", "é", "\x1b[31m", "x" * 3000, "__class__", "model_config",
    "adapter", "prompts.0", "-", "LIMITS", "None", "self", "values", "\u202e", "0", "tile\n",
]  # fmt: skip
ODD = [
    *NASTY, datetime.datetime(2020, 2, 30 - 1), datetime.date(2020, 1, 1), datetime.time(1, 2),
    b"bytes", {1: 2}, {None: None}, ("a",), {"a"}, object(), float, 10**5000, [[[[]]]],
    "~nosuchuser/x", "\x1b[2J", "cpu:0", "cuda:-1", "cuda:99999999999999999999", "~", "/", ".",
    ["x"] * 500, {f"k{i}": i for i in range(500)}, {"tensors": -1}, {"text": "x"}, [{"text": 3}],
]  # fmt: skip
PIECES = [
    "\0", "\ufeff", "\r", "\r\n", "[[", "]]", "=", "'", '"', '"""', "nan", "inf", "0x", "1_",
    "2020-01-01T00:00:00Z", "[a]\n", "[a.b]\n", "a.b.c = 1\n", "\x1b", "#", "\\uD800", "9" * 5000,
    "[" * 3000, "{a = " * 300, "\\", "\t", "max_rank = 3\n", "é", "\u2028",
]  # fmt: skip


class ConfigCase:
    """A configuration from three sources; `expected` is what it must give, if it is valid."""

    def __init__(self, draw: random.Random, job: bool) -> None:
        self.draw, self.job, self.steps = draw, job, []
        self.kinds = VALID | (JOB if job else {})
        self.values = {source: self._valid() for source in ("file", "environment", "arguments")}
        self.expected = self._merged()
        self.variables: dict[str, str] = {}
        for _ in range(draw.choice([0, 0, 1, 1, 2])):
            self._spoil(draw.choice([set_a_value, set_a_value, set_a_value, add_a_key, nest]))
        self.text: str | None = toml(self.values["file"])
        self.environment = self._environment() | self.variables
        for _ in range(draw.choice([0, 0, 0, 1, 2])):
            self._spoil(draw.choice([edit_the_text, edit_a_variable, add_a_variable]))
        self.arguments = self.values["arguments"]

    def _spoil(self, step: Any) -> None:
        self.steps.append(step.__name__)
        self.expected = None
        step(self)

    def _valid(self) -> dict[str, Any]:
        names = self.draw.sample(sorted(self.kinds), self.draw.choice([0, 1, 2, 4]))
        return {name: self.kinds[name](self.draw) for name in names}

    def _merged(self) -> dict[str, Any] | None:
        file, environment, arguments = self.values.values()
        if self.job:  # its valid values may contradict each other
            return None
        whole = DEFAULTS | file | environment | arguments
        owner = environment | arguments
        if "backend" in owner and owner["backend"] != file.get("backend"):
            own = arguments.get("backend_options", environment.get("backend_options"))
            whole["backend_options"] = own or {}
        return whole

    def _environment(self) -> dict[str, str]:
        found = {}
        for name, value in self.values["environment"].items():
            text = value if isinstance(value, str) else as_json(value)
            if isinstance(name, str) and "\0" not in f"{name}{text}" and "=" not in name and name:
                found[f"LORA_BACKENDS_{name.upper()}"] = text
        return found


# Mutations of values, text and variables


def odd(case: ConfigCase) -> Any:
    return copy.deepcopy(case.draw.choice(ODD))  # a later step may write into it


def set_a_value(case: ConfigCase) -> None:
    source = case.values[case.draw.choice(sorted(case.values))]
    source[case.draw.choice(sorted(case.kinds))] = odd(case)


def add_a_key(case: ConfigCase) -> None:
    """Add an unknown key, at the top or in a table."""
    source = case.values[case.draw.choice(sorted(case.values))]
    tables = [source, *(value for value in source.values() if isinstance(value, dict))]
    count = case.draw.choice([1, 1, 1, 300])
    for number in range(count):
        name = case.draw.choice(WORDS) + (str(number) if count > 1 else "")
        case.draw.choice(tables)[name] = copy.deepcopy(case.draw.choice([1, "x", *NASTY]))


def nest(case: ConfigCase) -> None:
    value = odd(case)
    for _ in range(case.draw.choice([3, 30, 400])):
        value = [value] if case.draw.random() < 0.5 else {"a": value}
    case.values[case.draw.choice(sorted(case.values))][case.draw.choice(sorted(case.kinds))] = value


def edit_the_text(case: ConfigCase) -> None:
    if not case.text:
        return
    where, edit = case.draw.randint(0, len(case.text)), case.draw.randrange(3)
    piece = case.draw.choice(PIECES)
    if edit == 0:
        case.text = case.text[:where] + piece + case.text[where:]
    elif edit == 1:
        case.text = case.text[:where] + case.text[where + case.draw.choice([1, 3, 20]) :]
    else:
        lines = case.text.splitlines(keepends=True)
        case.draw.shuffle(lines)
        case.text = "".join([*lines, *case.draw.choices(lines, k=2)])


def edit_a_variable(case: ConfigCase) -> None:
    if not case.environment:
        return
    name = case.draw.choice(sorted(case.environment))
    value = case.environment[name]
    where = case.draw.randint(0, len(value))
    piece = case.draw.choice([*PIECES[1:], "\udcff", "{", "[", "null", "true", " ", ","])
    case.environment[name] = value[:where] + piece + value[where:]


def add_a_variable(case: ConfigCase) -> None:
    name = case.draw.choice(["MAX_RNK", "bakend", "", "_", "LIMITS__TENSORS", "X" * 3000, "\udcff"])
    case.environment[f"LORA_BACKENDS_{name}"] = case.draw.choice(["1", "", "x" * 10_000])


# Text


def as_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return "{bad"


def toml(values: dict[str, Any]) -> str:
    """Return a table as TOML; what TOML has no word for is left as it shows itself."""
    try:
        return "".join(f"{_key(name)} = {_toml(value)}\n" for name, value in values.items())
    except RecursionError:
        return f"max_rank = {'[' * 3000}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return "9" * 5000 if abs(value) >= 10**4000 else str(value)
    if isinstance(value, float):
        return "nan" if math.isnan(value) else str(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(k)} = {_toml(v)}' for k, v in value.items())}}}"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def _key(name: Any) -> str:
    return json.dumps(str(name))
