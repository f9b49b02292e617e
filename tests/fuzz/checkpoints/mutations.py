"""Ways to damage a checkpoint folder: its configuration, tensors, bytes, records and entries."""

import json
import math
import os
import re
import string
import struct
import warnings
import zipfile

import torch

from lora_backends.adapters import LoadLimits

from .folders import CONFIG, PICKLE, PREFIX, SAFETENSORS, SPECS

SLOW_PATTERNS = [
    r"(([a-z0-9._])+)+!",
    r"(.*)*x",
    r"(\w+\.?)+\d!",
    r"^(.+.+)+$(?!.)!",
    r"(a|a|[^b])*c",
]
NASTY = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e300, math.nan,
    math.inf, "", " ", "q_proj", "(", "*", "[", "all-linear", "\0", "\udc80", "é", "x" * 5000, [],
    [None], ["q_proj", 3], ["q_proj"], [[]], {}, {"a": 1}, {"(": 1}, {"q_proj": None}, {"": 3},
    {"q_proj": 2}, {".*": 3}, [0, 1], [1.5], ["layers"], "layers", "LORA", "lora_only", "pissa",
]  # fmt: skip
PLAUSIBLE = {
    **dict.fromkeys(["use_rslora", "lora_bias", "fan_in_fan_out"], [True, False]),
    **dict.fromkeys(["ensure_weight_tying", "use_dora", "use_qalora"], [True, False]),
    "target_modules": ["all-linear", "ALL-LINEAR", ".*", ["q_proj"], ["lm_head", "embed_tokens"]],
    "exclude_modules": ["all-linear", ".*q_proj", ["q_proj"], "", []],
    "layers_to_transform": [0, 10, [0], [], [-1], None],
    "layers_pattern": ["layers", "", [], ["h", ""], r"(layers)", None],
    "rank_pattern": [{}, {"^q_proj": 3}, {"q_proj$": 2}, {"layers.0": 1}, {".q_proj": 2}, None],
    "alpha_pattern": [{"lm.head": 3}, {"model": 3, "self_attn.q_proj": 0}, {"v_proj": -1.5}],
    "task_type": ["CAUSAL_LM", "SEQ_CLS", "", None],
    "init_lora_weights": ["gaussian", "pissa", "EVA", True],
    "r": [1, 4, 12, 13],
    "lora_alpha": [0, -2, 7.25],
}
PICKLED = [
    b"K\x05", b"J\xff\xff\xff\x7f", b"}", b"(", b"t", b"R", b"b", b"0", b"2", b"\x86", b"h\x01",
    b"r\xff\xff\xff\x7f", b"ctorch\nTensor\n", b"cos\nsystem\n", b"X\x01\0\0\0a", b"Q",
    b"c__builtin__\nbytearray\n", b"\x8a\x09" + b"\xff" * 8 + b"\0", b"N", b"\x88", b".",
]  # fmt: skip
ADDED_PARTS = """lora_A.weight lora_B.bias base_layer.weight lora_embedding_A weight
lora_magnitude_vector token_adapter.delta""".split()
KEYS = """peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules
exclude_modules layers_to_transform layers_pattern lora_bias fan_in_fan_out bias init_lora_weights
ensure_weight_tying task_type use_dora modules_to_save target_parameters trainable_token_indices
layer_replication alora_invocation_tokens use_qalora use_bdlora arrow_config kasa_config
megatron_config lora_dropout revision some_future_field""".split()


# Mutations of configuration and tensors


def set_a_key(case):
    case.config[case.draw.choice(KEYS)] = case.draw.choice(NASTY)


def switch_a_key(case):
    """Set a key to another value that is of its type."""
    key, values = case.draw.choice(list(PLAUSIBLE.items()))
    case.config[key] = case.draw.choice(values)


def drop_a_key(case):
    case.config.pop(case.draw.choice(list(case.config)))


def use_a_slow_pattern(case):
    pattern = case.draw.choice(SLOW_PATTERNS)
    key = case.draw.choice(["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"])
    case.config[key] = {pattern: 3} if key.endswith("pattern") else pattern
    case.limits = LoadLimits(matching_seconds=0.3)


def use_a_random_pattern(case):
    pieces = [*"^$.*?|+()[]{}\\", r"\d", "(?!", "(?<=", "(?P<idx>", "{2,}", "q_proj", "a", r"\1"]
    pattern = "".join(case.draw.choices(pieces, k=case.draw.randint(1, 12)))
    key = case.draw.choice(["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"])
    case.config[key] = {pattern: 3} if key.endswith("pattern") else pattern


def nest_a_value(case):
    depth, value = case.draw.choice([3, 400]), case.draw.choice(NASTY)
    for _ in range(depth):
        value = [value] if case.draw.random() < 0.5 else {"a": value}
    case.config[case.draw.choice(KEYS)] = value


def drop_a_tensor(case):
    if case.tensors:
        case.tensors.pop(case.draw.choice(list(case.tensors)))


def rename_a_tensor(case):
    if not case.tensors:
        return
    name = case.draw.choice(list(case.tensors))
    parts = name.split(".")
    edit = case.draw.randrange(6)
    if edit == 0:
        parts[case.draw.randrange(len(parts))] = case.draw.choice(["", "x", "h", "experts", "é"])
    elif edit == 1:
        case.draw.shuffle(parts)
    elif edit == 2:
        parts.insert(case.draw.randrange(len(parts)), case.draw.choice(["default", "base_layer"]))
    elif edit == 3:
        parts = parts[2:]
    elif edit == 4:
        parts = [".".join(parts) + case.draw.choice(["\n", "\0", " ", "." * 50, "x" * 3000])]
    else:
        parts[-1] = case.draw.choice(["lora_magnitude_vector", "lora_E", "bias", "alpha", "lora_a"])
    case.tensors[".".join(parts)] = case.tensors.pop(name)


def add_a_tensor(case):
    path = case.draw.choice([*SPECS, "no.such.module"])
    part = case.draw.choice(ADDED_PARTS)
    shape = case.draw.choice([(), (0,), (4,), (4, 6), (6, 4), (2, 4, 6), (1, 1)])
    case.tensors[f"{PREFIX}{path}.{part}"] = case.randn(*shape)


def change_a_tensor(case):
    if not case.tensors:
        return
    name, edit = case.draw.choice(list(case.tensors)), case.draw.randrange(8)
    value = case.tensors[name]
    if value.layout != torch.strided or value.is_meta or not value.ndim:
        return  # it was changed already
    if not 0 < value.numel() < 10**6:
        return
    if edit == 0:
        value = value.T if value.ndim == 2 else value[:0]
    elif edit == 1 and value.is_floating_point():
        value = value.clone(memory_format=torch.contiguous_format)
        value.view(-1)[case.draw.randrange(value.numel())] = case.draw.choice([math.nan, math.inf])
    elif edit == 2:
        value = value.to(case.draw.choice([torch.int64, torch.bool, torch.float64, torch.uint8]))
    elif edit == 3:
        value = torch.cat([value, value])
    elif edit == 4:
        value = value[:-1]
    elif edit == 5:
        value = value[None]
    elif edit == 6 and case.weights.name == PICKLE:
        value = torch.ones(1).expand(case.draw.choice([2**40, 100]), *value.shape[1:2])
    elif edit == 7 and case.weights.name == PICKLE:
        value = case.draw.choice([value.to_sparse(), value.to("meta"), torch.nn.Parameter(value)]
                                 if value.is_floating_point() else [value.to_sparse()])  # fmt: skip
    case.tensors[name] = value


def share_a_storage(case):
    """Make tensors views of one storage, some of them transposed: the values stay."""
    if case.weights.name != PICKLE or not case.tensors:
        return
    plain = {
        name: value
        for name, value in case.tensors.items()
        if value.layout == torch.strided and not value.is_meta and 0 < value.numel() < 10**6
    }
    whole, start = torch.zeros(3 + sum(value.numel() for value in plain.values())), 3
    for name, value in plain.items():
        turned = value.ndim == 2 and case.draw.random() < 0.5
        shape = value.T.shape if turned else value.shape
        view = whole[start : start + value.numel()].view(shape)
        view = view.T if turned else view
        case.tensors[name], start = view.copy_(value), start + value.numel()


def lower_a_limit(case):
    name = case.draw.choice(["file_bytes", "header_bytes", "tensors", "unpacked_bytes"])
    case.limits = LoadLimits(**{name: case.draw.choice([1, 3, 100, 1000, 10_000])})


# Mutations of files


def damage_bytes(case):
    path = case.draw.choice([case.weights, case.weights, case.folder / CONFIG])
    if not path.is_file():
        return
    content = bytearray(path.read_bytes())
    for _ in range(case.draw.choice([1, 1, 2, 10])):
        where, edit = case.draw.randint(0, len(content)), case.draw.randrange(5)
        length = case.draw.choice([1, 4, 8, 100])
        if edit == 0:
            content[where : where + 1] = bytes([case.draw.randrange(256)])
        elif edit == 1:
            del content[where : where + length]
        elif edit == 2:
            content[where:where] = case.draw.randbytes(length)
        elif edit == 3:
            content[where : where + length] = case.draw.choice([b"\0", b"\xff"]) * length
        else:
            del content[where:]
    path.write_bytes(bytes(content))


def damage_the_start(case):
    """Change the numbers and names at the start of a file, where most of its structure is."""
    if case.weights.is_file():
        content = bytearray(case.weights.read_bytes())
        for _ in range(case.draw.randint(1, 4)):
            where = case.draw.randrange(max(1, min(400, len(content))))
            content[where : where + 1] = bytes([case.draw.choice(b'\0\x01\x7f\x80\xff019"{}[],:')])
        case.weights.write_bytes(bytes(content))


def edit_the_header(case):
    if case.weights.name != SAFETENSORS or not case.weights.is_file():
        return
    content = case.weights.read_bytes()
    try:
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        entry = header[case.draw.choice(list(header))]
    except Exception:  # it was damaged already
        return
    if isinstance(entry, dict):
        key = case.draw.choice(["dtype", "shape", "data_offsets", "extra"])
        entry[key] = case.draw.choice(
            [*NASTY, "F16", "F64", "I8", "F8_E4M3", "F4", [0, 2**63], [-1, 4], [8, 0], [2**62, 4]]
        )
    text = json.dumps(header).encode("utf-8", "replace")
    if case.draw.random() < 0.2:
        text = text.replace(b'"F32"', b'"F32", "dtype": "F16"', 1)
    size = len(text) if case.draw.random() < 0.9 else case.draw.choice([0, 1, 2**40, 2**64 - 1])
    case.weights.write_bytes(struct.pack("<Q", size) + text + content[8 + length :])


def edit_the_archive(case):
    if not case.weights.is_file() or not zipfile.is_zipfile(case.weights):
        return
    try:
        with zipfile.ZipFile(case.weights) as archive:
            records = [(name, archive.read(name)) for name in archive.namelist()]
    except Exception:  # it was damaged already
        return
    if not records:
        return
    index, edit = case.draw.randrange(len(records)), case.draw.randrange(6)
    name, content = records[index]
    if edit == 0:
        del records[index]
    elif edit == 1:
        records[index] = (name, content[: case.draw.randint(0, len(content))])
    elif edit == 2:
        records.append((name, case.draw.randbytes(10)))
    elif edit == 3:
        records[index] = (case.draw.choice(["x", name + "x", "a/" + name, "../x"]), content)
    elif edit == 4:
        records = [(n, edit_pickle(case, c) if n.endswith(".pkl") else c) for n, c in records]
    compression = zipfile.ZIP_DEFLATED if edit == 5 else zipfile.ZIP_STORED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of duplicate names
        with zipfile.ZipFile(case.weights, "w", compression) as archive:
            for name, content in records:
                archive.writestr(name, content)


def edit_pickle(case, content):
    """Put opcodes into a pickle at random places, or change its numbers."""
    edited = bytearray(content)
    for _ in range(case.draw.randint(1, 3)):
        where = case.draw.randint(0, len(edited))
        piece = case.draw.choice(PICKLED)
        if case.draw.random() < 0.5:
            edited[where:where] = piece
        else:
            edited[where : where + len(piece)] = piece
    return bytes(edited)


def replace_an_entry(case):
    path = case.draw.choice([case.weights, case.folder / CONFIG])
    edit = case.draw.randrange(8)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if edit == 0:
        os.mkfifo(path)
    elif edit == 1:
        path.symlink_to(case.draw.choice(["/dev/zero", "/dev/null", "/dev/full", "nowhere", path]))
    elif edit == 2:
        path.mkdir()
    elif edit == 3:
        path.write_bytes(case.draw.randbytes(case.draw.choice([0, 1, 8, 100, 5000])))
    elif edit == 4:
        path.write_text("".join(case.draw.choices(string.printable, k=200)))
    elif edit == 5:
        path.write_text(case.draw.choice(["[" * 100_000, "9" * 5000, '{"r": ' + "9" * 5000 + "}"]))
    elif edit == 6:
        path.write_bytes(b"PK\x03\x04" + case.draw.randbytes(300))


def add_files(case):
    names = ["adapter_model-00001-of-00002.safetensors", "config.json", "README.md", PICKLE,
             "pytorch_lora_weights.safetensors", SAFETENSORS]  # fmt: skip
    path = case.folder / case.draw.choice(names)
    if not os.path.lexists(path):
        path.write_bytes(case.draw.randbytes(50))
    below = case.folder / "checkpoint-10"
    below.mkdir(exist_ok=True)
    (below / CONFIG).write_text("{}")


def edit_config_text(case):
    path = case.folder / CONFIG
    if not path.is_file():
        return
    text = path.read_bytes()
    place = case.draw.choice([found.start() for found in re.finditer(rb"[,:{\[]", text)] or [0])
    piece = case.draw.choice([b"NaN", b"Infinity", b"1e999", b'"r": 4,', b"//", b"'", b"9" * 5000,
                              b'"\\ud800"', b"\xff", b"null", b"[" * 500, b"-", b","])  # fmt: skip
    path.write_bytes(text[: place + 1] + piece + text[place + 1 :])


BEFORE_WRITING = [
    set_a_key, switch_a_key, switch_a_key, drop_a_key, use_a_slow_pattern, use_a_random_pattern,
    nest_a_value, drop_a_tensor, rename_a_tensor, add_a_tensor, change_a_tensor, change_a_tensor,
    share_a_storage, lower_a_limit,
]  # fmt: skip
AFTER_WRITING = [
    damage_bytes, damage_bytes, damage_the_start, edit_the_header, edit_the_header,
    edit_the_archive, edit_the_archive, replace_an_entry, add_files, edit_config_text,
]  # fmt: skip
