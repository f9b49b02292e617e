"""Random command lines: every command and option, with files to point at, valid or spoilt."""

import copy
import json
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoints.mutations import NASTY
from .configs import ConfigCase, toml

BACKENDS = ["torch_ref", "numba_cpu", "triton", "csgmv"]
OPERATIONS = "run_lora_a run_lora_b run_linear run_qkv run_gate_up run_embedding run_logits".split()
CONFIG_JSON = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "head_dim": 16,
}  # fmt: skip
CASES = [
    "LoRACase(slots=(0, -1, 0), ranks=((2,),), max_rank=4, in_features=5, output_slices=(8,), "
    "scalings=((0.5,),), base=torch.float32)",
    "LoRACase(slots=(0,) * 17, ranks=((1, 2, 0),), max_rank=2, in_features=3, "
    "output_slices=(3, 1, 2), scalings=((0.5, 1.0, -1.0),), bias=True)",
]
TEXTS = [
    "", " ", "-", "--", "0", "-1", "1", "1.5", "nan", "2147483648", "9" * 30, "9" * 5000, "é",
    "\udcff", "\x1b[31mred", "x" * 5000, "auto", "cpu", "cuda", "cuda:7", "meta", "a,b", "1,,2",
    "1:2:3", "0:1,0:2", "~nosuchuser/x", "~", "/", ".", "..", "/dev/zero", "/dev/null", "None",
    "true", "[]", "{}", "[" * 5000, "@file", "a=b", "=", "a.b=3", "*", "²", "١", "[bold]x[/]",
    "\\[", "a\nb", "\t", "0" * 100, "1e3", "+1", "0x10", "1_000", "run_linear", "all",
]  # fmt: skip


def _ints(draw, most=5, low=1, high=40) -> str:
    return ",".join(str(draw.randint(low, high)) for _ in range(draw.randint(1, most)))


def _sequences(draw) -> str:
    return ",".join(f"{draw.randint(-1, 3)}:{draw.randint(0, 30)}" for _ in range(3))


def _one(*values: str):
    return lambda draw: draw.choice(values)


def _path(*names: str):
    return lambda draw: draw.choice(names)


FILES = [
    "nowhere", "folder", "fifo", "zero", "noise", "huge", "deep.json", "deep.toml", "loop",
    "empty", "batch.json", "batch.toml", "config.json", "result.json", "job.toml", "folder/x/y",
]  # fmt: skip
EXPLAIN = {
    "--num-slots": lambda draw: str(draw.randint(4, 9)),
    "--backend": _one(*BACKENDS),
    "--operation": _one(*OPERATIONS),
    "--preset": _one("llama3-8b", "smollm2", "qwen3-30b-a3b", "llama3-70b"),
    "--projection": _one("qkv", "o", "gate_up", "down", "embedding"),
    "--ranks": lambda draw: str(draw.randint(0, 64)),
    "--max-rank": _one("64", "128"),
    "--dtype": _one("bfloat16", "float16", "float32"),
    "--svg": _path("new.svg", "folder/new.svg"),
}
BENCH = {
    "--preset": _one("smollm2", "llama3-8b"),
    "--config-json": _path("config.json"),
    "--in-features": lambda draw: str(draw.randint(1, 64)),
    "--output-slices": partial(_ints, most=3),
    "--tokens": _ints,
    "--adapters": _ints,
    "--rank": _ints,
    "--mixes": _one("identical", "distinct", "uniform", "skewed", "uniform,skewed"),
    "--operations": _one("all", *OPERATIONS),
    "--backends": _one("torch_ref", "torch_ref,numba_cpu"),
    "--option": _one("csgmv.segment_size=16", "triton.batch_invariant=true"),
    "--dtype": _one("float32", "bfloat16", "float16", "float64"),
    "--device": _one("cpu"),
    "--output": _path("out.json", "new/out.json"),
}
GENERATE = {
    "--config": _path("job.toml"),
    "--model": _path("model", "nowhere", "someone/a-model", "noise", "folder"),
    "--adapter": _one("a=adapter", "b=nowhere", "c=folder", "d=noise", "e=someone/an-adapter"),
    "--prompt": _one("a b", "c"),
    "--use": _one("-", "a", "b"),
    "--backend": _one("torch_ref", "auto"),
    "--device": _one("cpu", "auto"),
    "--max-new-tokens": _one("1", "2"),
}
TUNE = {
    "--budget": _one("1s", "2m", "1h"),
    "--preset": _one("smollm2"),
    "--tokens": _ints,
    "--adapters": _ints,
    "--rank": _ints,
    "--dtype": _one("float16"),
    "--device": _one("cpu", "cuda"),
    "--output": _path("tiles.json"),
}
VERIFY = {
    "--device": _one("cpu"),
    "--option": _one("tile=16", "batch_invariant=true"),
    "--seed": _one("0", "1", "-1", "99999999999999999999"),
    "--property": _one("linear_matches_float64", "padding_is_never_read"),
    "--case": _one(*CASES),
}
FLAGS = {
    "list": ["--json", "--help"],
    "explain": ["--help"],
    "bench": ["--json", "--help"],
    "generate": ["--json", "--check", "--compare", "--help"],
    "tune": ["--help"],
    "verify": ["--json", "--thorough", "--fail-fast", "--help"],
}
OPTIONS = {
    "list": {"--device": _one("cpu", "cuda", "meta")},
    "explain": EXPLAIN,
    "bench": BENCH,
    "generate": GENERATE,
    "tune": TUNE,
    "verify": VERIFY,
}


class CommandCase:
    """A command line, the files that it may name, and the environment; `valid` must succeed."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.draw, self.folder, self.steps = draw, folder, []
        weights = {"explain": 8, "bench": 6, "generate": 4, "verify": 2, "tune": 1, "list": 1}
        self.command = draw.choices(list(weights), list(weights.values()))[0]
        self.environment: dict[str, str] = {}
        self.valid = False
        self.result = bench_result(draw)
        self.arguments = getattr(self, f"_{self.command}")()
        write_files(self)
        for _ in range(draw.choice([0, 1, 1, 2, 3])):
            step = draw.choice(MUTATIONS)
            self.steps.append(step.__name__)
            self.valid = False
            step(self)

    @property
    def argv(self) -> list[str]:
        return ["lora-backends", self.command, *self.arguments]

    def _some(self, options: dict[str, Any], most: int) -> list[str]:
        names = self.draw.sample(sorted(options), self.draw.randint(0, min(most, len(options))))
        return [word for name in names for word in (name, options[name](self.draw))]

    def _flags(self, chance: float = 0.3) -> list[str]:
        flags = FLAGS[self.command]
        return [flag for flag in flags if self.draw.random() < chance / (1 + 9 * ("lp" in flag))]

    def _list(self) -> list[str]:
        self.valid = True
        return [*self._some(OPTIONS["list"], 1), *self._flags()]

    def _explain(self) -> list[str]:
        batch = self.draw.choice([
            ["--slots", _ints(self.draw, 40, -1, 3)], ["--sequences", _sequences(self.draw)],
            ["--batch", self.draw.choice(["batch.json", "batch.toml"])],
        ])  # fmt: skip
        chosen = self._some(EXPLAIN, 5)
        self.valid = not {"--operation", "--projection"} & set(chosen)
        if self.draw.random() < 0.3:
            chosen += ["--in-features", str(self.draw.randint(1, 300))]
            chosen += ["--output-slices", _ints(self.draw, 4, 1, 300)]
        return [*batch, *chosen, *self._flags(0.05)]

    def _bench(self) -> list[str]:
        if self.draw.random() < 0.4:
            self.valid = True
            plot = ["--plot", "plots"] if self.draw.random() < 0.05 else []
            return ["--from-json", "result.json", *plot, *self._flags()]
        return [*self._some(BENCH, 6), *self._flags()]

    def _generate(self) -> list[str]:
        return [*self._some(GENERATE, 6), *self._flags(0.1)]

    def _tune(self) -> list[str]:
        return [self.draw.choice(BACKENDS), *self._some(TUNE, 4), *self._flags()]

    def _verify(self) -> list[str]:
        return ["torch_ref", *self._some(VERIFY, 4), *self._flags(0.1)]


def bench_result(draw: random.Random) -> dict[str, Any]:
    """Return what `bench` would have written."""
    names = draw.sample(["torch_ref", "numba_cpu", "vllm"], draw.randint(1, 3))
    rows = []
    for tokens in draw.sample([1, 16, 64, 512], draw.randint(0, 4)):
        results: dict[str, Any] = {
            name: {"us": 3.5 * tokens, "us_q1": 3.0 * tokens, "us_q3": 4.0 * tokens,
                   "efficiency": 0.5}
            for name in names
        }  # fmt: skip
        if draw.random() < 0.2:
            results[names[0]] = {"error": "WrongResultError: wrong"}
        rows.append(
            {"projection": "o", "in_features": 8, "output_slices": [8], "tokens": tokens,
             "adapters": 8, "rank": 4, "mix": "uniform", "operation": "run_linear",
             "active_adapters": min(8, tokens), "limit_us": 2.0, "bytes": 100, "flop": 200,
             "results": results}
        )  # fmt: skip
    return {
        "format": "lora-backends results 2", "device": "a CPU", "threads": 1, "versions": {},
        "date": "2026-01-01", "method": "m", "dtype": "float32", "complete": True,
        "limits": {"copy_gb_per_s": 10.0, "launch_us": 0.0, "gemm_gflop_per_s": 100.0},
        "notes": [], "left_out": {"vllm": "no"}, "rows": rows,
        "contenders": {name: {"timing": "eager", "options": {}} for name in names}, "summary": {},
    }  # fmt: skip


def write_files(case: CommandCase) -> None:
    """Write what options may name, into the empty folder of the case."""
    folder, named = case.folder, set(case.arguments)
    slots = [case.draw.randint(-1, 3) for _ in range(8)]
    batch = {"slots": slots} if case.draw.random() < 0.5 else {"sequences": [[0, 3], [-1, 2]]}
    batch |= {"num_slots": 4}
    (folder / "folder").mkdir()
    if "batch.json" in named:
        (folder / "batch.json").write_text(json.dumps(batch))
    if "batch.toml" in named:
        (folder / "batch.toml").write_text(toml(batch))
    if "config.json" in named:
        (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
    if "result.json" in named:
        (folder / "result.json").write_text(json.dumps(case.result))
    if "job.toml" in named:
        config = ConfigCase(case.draw, job=True)
        (folder / "job.toml").write_bytes((config.text or "").encode("utf-8", "surrogatepass"))


def write_odd_file(folder: Path, name: str, draw: random.Random) -> None:
    """Put something into the place of a file that no reader should trust."""
    path = folder / name
    if os.path.lexists(path):
        return
    content = {
        "noise": lambda: draw.randbytes(draw.choice([1, 100, 5000])),
        "deep.json": lambda: b"[" * 100_000,
        "deep.toml": lambda: b"a = " + b"[" * 3000 + b"]" * 3000,
        "empty": lambda: b"",
    }
    if name in content:
        path.write_bytes(content[name]())
    elif name == "fifo":
        os.mkfifo(path)
    elif name == "zero":
        path.symlink_to("/dev/zero")
    elif name == "loop":
        path.symlink_to(path)
    elif name == "huge":
        with open(path, "wb") as file:
            file.truncate(2**33)


# Mutations


def set_an_option(case: CommandCase) -> None:
    options = OPTIONS[case.command]
    name = case.draw.choice(sorted(options))
    valid = options[case.draw.choice(sorted(options))]
    case.arguments += [name, case.draw.choice([*TEXTS, valid(case.draw)])]


def change_a_word(case: CommandCase) -> None:
    if not case.arguments:
        return
    index, edit = case.draw.randrange(len(case.arguments)), case.draw.randrange(5)
    word = case.arguments[index]
    where = case.draw.randint(0, len(word))
    if edit == 0:
        case.arguments[index] = case.draw.choice(TEXTS)
    elif edit == 1:
        case.arguments[index] = word[:where] + case.draw.choice(TEXTS) + word[where:]
    elif edit == 2:
        case.arguments[index] = word[:where] + word[where + 1 :]
    elif edit == 3:
        del case.arguments[index]
    else:
        case.arguments.insert(
            index, case.draw.choice(["--jsn", "--help", "-h", "-x", "--", *TEXTS])
        )


def name_an_odd_file(case: CommandCase) -> None:
    """Replace the value of an option, mostly one that names a file."""
    name = case.draw.choice(FILES)
    write_odd_file(case.folder, name, case.draw)
    paths = {"generate": ["--config", "--model", "--adapter"], "explain": ["--batch", "--svg"],
             "bench": ["--config-json", "--from-json", "--output", "--plot"],
             "tune": ["--output"]}.get(case.command)  # fmt: skip
    if not paths:
        return
    option = case.draw.choice(paths)
    if option in case.arguments[:-1]:
        case.arguments[case.arguments.index(option) + 1] = name
    else:
        case.arguments += [option, f"a={name}" if option == "--adapter" else name]


def damage_a_file(case: CommandCase) -> None:
    """Change values or bytes of a file that is named."""
    files = [path for path in case.folder.iterdir() if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.stat().st_size < 10**6]
    if not files:
        return
    path = case.draw.choice(sorted(files))
    content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        where = case.draw.randint(0, len(content))
        piece = case.draw.choice([b"\xff", b"\0", b"[", b"9" * 5000, b"'", b"= ", b"\n"])
        path.write_bytes(content[:where] + piece + content[where:])
        return
    for _ in range(case.draw.choice([1, 1, 3])):
        value = _edited(value, case.draw)
    path.write_text(json.dumps(value))


def _edited(value: Any, draw: random.Random) -> Any:
    """Return a value of JSON with one change somewhere in it."""
    if draw.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return copy.deepcopy(draw.choice([*NASTY, {}, [], {"us": 0}, {"us": "x"}, [[1]], -5, 0]))
    if isinstance(value, list):
        index = draw.randrange(len(value))
        edited = [*value[:index], _edited(value[index], draw), *value[index + 1 :]]
        return edited if draw.random() < 0.9 else value[:index] + value[index + 1 :]
    key = draw.choice(sorted(value))
    if draw.random() < 0.2:
        return {k: v for k, v in value.items() if k != key}
    if draw.random() < 0.1:
        return value | {draw.choice(["x", "", "slots", "rows"]): draw.choice(NASTY)}
    return value | {key: _edited(value[key], draw)}


def set_the_environment(case: CommandCase) -> None:
    name = case.draw.choice(["BACKEND", "DEVICE", "MAX_RANK", "ADAPTERS", "TILES", "NONSENSE"])
    values = [text for text in TEXTS if "\0" not in text]
    case.environment[f"LORA_BACKENDS_{name}"] = case.draw.choice(values)


MUTATIONS = [
    set_an_option, set_an_option, change_a_word, change_a_word, name_an_odd_file,
    name_an_odd_file, damage_a_file, damage_a_file, set_the_environment,
]  # fmt: skip
