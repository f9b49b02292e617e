"""A checkpoint of a stranger can neither hang nor end the process, nor cost more than allowed."""

import io
import json
import os
import pickle
import signal
import struct
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch

import lora_backends
from lora_backends import InvalidInputError
from lora_backends.adapters import AdapterPool, LoadLimits, ModuleSpec, read_checkpoint
from lora_backends.adapters.files import pickle_file, safetensors_file
from lora_backends.adapters.files.formats import CONFIG_FILE, PICKLE_FILE, SAFETENSORS_FILE

Q_PROJ = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{Q_PROJ}"


@pytest.fixture
def write_bin(write_adapter, lora):
    """Return a function that writes a folder with a .bin of the tensors, or of bytes."""

    def write(content=None, **options):
        folder = write_adapter()
        (folder / SAFETENSORS_FILE).unlink()
        if isinstance(content, bytes):
            (folder / PICKLE_FILE).write_bytes(content)
        else:
            torch.save(lora() if content is None else content, folder / PICKLE_FILE, **options)
        return folder

    return write


def refused(folder, match, **arguments):
    with pytest.raises(InvalidInputError, match=match) as caught:
        read_checkpoint(folder, **arguments)
    assert str(folder) in str(caught.value)


# Limits


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("file_bytes", 100, "a file of [0-9]+ bytes"),
        ("header_bytes", 80, "a header of [0-9]+ bytes"),
        ("unpacked_bytes", 200, "tensors of 224 bytes"),
        ("tensors", 1, "2 tensors"),
    ],
)
def test_a_limit_is_named_with_how_to_raise_it(name, value, given, write_adapter):
    folder = write_adapter()
    (folder / CONFIG_FILE).write_text('{"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4}')
    limits = LoadLimits(**{name: value})
    refused(folder, rf"given: {given}\n.*\n.*LoadLimits\({name}=\d+\).*\[limits\]", limits=limits)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [("file_bytes", 100), ("header_bytes", 200), ("unpacked_bytes", 200), ("tensors", 1)],
)
def test_a_limit_holds_for_bin_too(name, value, legacy, write_bin):
    folder = write_bin(_use_new_zipfile_serialization=not legacy)
    (folder / CONFIG_FILE).write_text('{"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4}')
    refused(
        folder, rf"the limit {name}(.*\n)*.*LoadLimits\({name}=", limits=LoadLimits(**{name: value})
    )


def test_a_configuration_is_limited(write_adapter):
    folder = write_adapter(revision="x" * 10_000)
    refused(folder, "limit header_bytes", limits=LoadLimits(header_bytes=9000))


def test_a_pool_applies_its_limits(write_adapter):
    specs = {Q_PROJ: ModuleSpec("linear", 8, 6)}
    folder, pool = write_adapter(), AdapterPool(specs, limits=LoadLimits(tensors=1))
    with pytest.raises(InvalidInputError, match="the limit tensors"):
        pool.load("a", folder)
    assert AdapterPool(specs).load("a", folder).slot == 0


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", None, float("nan")])
def test_a_limit_is_a_number_above_0(value):
    with pytest.raises(InvalidInputError, match=r"limits.tensors is .*\n  allowed: an int above 0"):
        LoadLimits(tensors=value)
    assert LoadLimits(matching_seconds=1).matching_seconds == 1


def test_limits_are_no_other_value(write_adapter):
    for given in (3, 0, {"tensors": 9}):
        with pytest.raises(InvalidInputError, match=r"limits is .*\n  allowed: LoadLimits"):
            read_checkpoint(write_adapter(), limits=given)


# Files that are no regular files, or do not stay


@pytest.mark.parametrize("name", [CONFIG_FILE, SAFETENSORS_FILE, PICKLE_FILE])
def test_a_fifo_or_device_in_the_place_of_a_file_is_refused(name, write_adapter):
    folder = write_adapter()
    if name == PICKLE_FILE:
        (folder / SAFETENSORS_FILE).unlink()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(folder, f"{name}\n  given: a FIFO")
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    refused(folder, f"{name}\n  given: a device")


def test_tensors_outlive_their_file(write_adapter):
    folder = write_adapter()
    delta = read_checkpoint(folder).modules[Q_PROJ]
    os.truncate(folder / SAFETENSORS_FILE, 0)
    assert (delta.lora_a == 1).all() and (delta.lora_b == 1).all()


# Archives and pickles


def rewrite(folder, change, compression=zipfile.ZIP_STORED):
    """Write the archive anew, its records changed by a function of name and content."""
    path = folder / PICKLE_FILE
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, change(name, content))


def test_an_archive_written_anew_is_read(write_bin):
    folder = write_bin()
    rewrite(folder, lambda _, content: content)
    assert list(read_checkpoint(folder).modules) == [Q_PROJ]


def test_a_compressed_archive_is_refused(write_bin, lora):
    folder = write_bin(lora(wide=100_000))
    rewrite(folder, lambda _, content: content, zipfile.ZIP_DEFLATED)
    refused(folder, "records of the archive are compressed")


def test_records_that_overlap_are_refused(write_bin):
    folder = write_bin()
    path = folder / PICKLE_FILE
    content = bytearray(path.read_bytes())
    start = content.rfind(b"PK\x01\x02")  # its entry claims more bytes than the file has
    struct.pack_into("<II", content, start + 20, 10**6, 10**6)
    path.write_bytes(bytes(content))
    refused(folder, "records of the archive overlap")


def test_a_storage_of_another_size_than_the_pickle_says_is_refused(write_bin):
    folder = write_bin()
    rewrite(folder, lambda name, content: content[:-4] if "data/" in name else content)
    refused(folder, "a storage has another size")


def test_another_byte_order_is_refused(write_bin):
    folder = write_bin()
    other = {"little": b"big", "big": b"little"}[sys.byteorder]
    rewrite(folder, lambda name, content: other if name.endswith("byteorder") else content)
    refused(folder, "another byte order")


@pytest.mark.parametrize("legacy", [False, True])
def test_elements_that_share_memory_are_refused(legacy, write_bin, lora):
    tensors = lora() | {f"{KEY}.lora_A.weight": torch.ones(1, 1).expand(2**40, 4)}
    folder = write_bin(tensors, _use_new_zipfile_serialization=not legacy)
    refused(folder, rf"share memory\n.*\n.*\[{2**40}, 4\] over 1 elements")


def test_parts_of_one_storage_are_read(write_bin):
    both = torch.arange(80.0).view(10, 8)
    tensors = {f"{KEY}.lora_A.weight": both[:4], f"{KEY}.lora_B.weight": both[4:, :6].T[:, :4]}
    delta = read_checkpoint(write_bin(tensors)).modules[Q_PROJ]
    assert torch.equal(delta.lora_a, both[:4])
    assert torch.equal(delta.lora_b, both[4:, :6].T[:, :4])


@pytest.mark.parametrize("legacy", [False, True])
def test_small_views_do_not_keep_their_storage(legacy, write_bin):
    whole = torch.arange(100_000.0)
    tensors = {f"{KEY}.lora_A.weight": whole[:32].view(4, 8)}
    tensors[f"{KEY}.lora_B.weight"] = whole[64:88].view(4, 6).T
    delta = read_checkpoint(write_bin(tensors, _use_new_zipfile_serialization=not legacy))
    delta = delta.modules[Q_PROJ]
    assert torch.equal(delta.lora_a, whole[:32].view(4, 8))
    assert torch.equal(delta.lora_b, whole[64:88].view(4, 6).T)
    for tensor in (delta.lora_a, delta.lora_b):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_of_parameters_with_metadata_is_read(legacy, write_bin, lora):
    state = OrderedDict((name, torch.nn.Parameter(value)) for name, value in lora().items())
    state._metadata = {"": {"version": 1}}
    folder = write_bin(state, _use_new_zipfile_serialization=not legacy)
    delta = read_checkpoint(folder).modules[Q_PROJ]
    assert type(delta.lora_a) is torch.Tensor and not delta.lora_a.requires_grad
    assert torch.equal(delta.lora_a, torch.ones(4, 8))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_bin_of_many_tensors_is_read(legacy, write_bin, lora):
    tensors = {}
    for layer in range(1000):
        tensors |= lora(Q_PROJ.replace("0", str(layer)), rank=4, wide=8)
    folder = write_bin(tensors, _use_new_zipfile_serialization=not legacy)
    assert len(read_checkpoint(folder).modules) == 1000


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout, write_bin, lora):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    refused(write_bin(lora() | {"nested": nested}), "dense|needs code")


EMPTY_ARCHIVE = {"a/version": b"3"}


def archive_of(data):
    """Return an archive whose pickle is `data`."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, record in {**EMPTY_ARCHIVE, "a/data.pkl": data}.items():
            archive.writestr(name, record)
    return content.getvalue()


def exponential(depth=60):
    """Return a pickle of {t: None}, whose key t takes 2^depth steps to hash."""
    doubling = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(depth))
    return b"\x80\x02}K\x01" + doubling + b"Ns."


HOSTILE_PICKLES = {
    "allocates": b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "allocates a tensor": b"\x80\x02ctorch\nTensor\nJ\xff\xff\xff\x7f\x85R.",
    "hashes": exponential(),
    "memo": b"\x80\x02}r\xff\xff\xff\xff.",
    "opcodes": b"\x80\x02" + b"N" * 2_000_000 + b"}.",
    "marks": b"\x80\x02" + b"(" * 500_000 + b"t" * 500_000 + b".",
    "nested": b"\x80\x02N" + b"\x85" * 900 + b".",
    "long": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "string": b"\x80\x02X\xff\xff\xff\xff.",
    "digits": b"\x80\x02I" + b"9" * 5000 + b"\n.",
    "dup": b"\x80\x02}2222.",
    "extension": b"\x80\x02\x82\x01.",
    "build": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.",
    "reduce": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "nothing": b"\x80\x02.",
    "ends": b"\x80\x02}",
    "is empty": b"",
    "pops": b"\x80\x02\x87.",
    "no mark": b"\x80\x02}u.",
    "many axes": b"\x80\x02"
    + b"".join(
        [
            b"ctorch._utils\n_rebuild_tensor_v2\n((",
            b"X\x07\0\0\0storage",
            b"ctorch\nFloatStorage\nX\x01\0\0\0aNK\x01tQK\0(",
            b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
            b"K\x01" * 900,
            b"t(",
            b"K\x01" * 900,
            b"ttR.",
        ]
    ),
    "odd items": b"\x80\x02}(Nu.",
    "appends": b"\x80\x02}Na.",
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_a_hostile_pickle_is_refused_at_once(name, legacy, write_bin, deadline):
    magic = [pickle.dumps(x, 2) for x in (pickle_file._MAGIC, pickle_file._VERSION)]
    content = HOSTILE_PICKLES[name]
    legacy_content = b"".join([*magic, pickle.dumps({"little_endian": True}, 2), content])
    folder = write_bin(legacy_content if legacy else archive_of(content))
    with deadline(20):
        refused(folder, "cannot read the PEFT checkpoint")


@pytest.mark.parametrize("place", ["magic", "system", "keys", "byte order", "key"])
def test_no_object_of_a_hostile_pickle_is_hashed_or_shown(place, write_bin, deadline):
    """Tuples that hold the one before twice take 2^60 steps to hash, compare with or print."""
    doubling = exponential()[3:-3]  # pushes the tuple
    magic = [pickle.dumps(x, 2) for x in (pickle_file._MAGIC, pickle_file._VERSION)]
    system = pickle.dumps({"little_endian": sys.byteorder == "little"}, 2)
    hostile = b"\x80\x02" + doubling + b"."
    order = b"\x80\x02}X\r\0\0\0little_endian" + doubling + b"s."
    parts = {
        "magic": [hostile, magic[1]],
        "system": [*magic, hostile],
        "byte order": [*magic, order],
        "keys": [*magic, system, b"\x80\x02}.", b"\x80\x02]" + doubling + b"a."],
        "key": [*magic, system, b"\x80\x02}" + doubling + b"Ns."],
    }
    folder = write_bin(b"".join(parts[place]))
    with deadline(20):
        refused(folder, "cannot read the PEFT checkpoint")


def test_a_header_of_too_many_names_is_refused_at_once(write_adapter, deadline):
    folder = write_adapter()
    names = {f"n{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(60_000)}
    header = json.dumps(names).encode()
    (folder / SAFETENSORS_FILE).write_bytes(struct.pack("<Q", len(header)) + header)
    with deadline(20):
        refused(folder, "limit tensors")


def test_a_header_of_one_very_long_name_is_refused_at_once(write_adapter, lora, deadline):
    tensors = {f"base_model.model.{'layers.0.' * 10**6}q_proj.lora_A.weight": torch.ones(4, 8)}
    folder = write_adapter(tensors)
    specs = {f"{'layers.0.' * 10**3}q_proj": ModuleSpec("linear", 8, 6)}
    with deadline(20):
        refused(folder, "not understood", modules=specs)


@pytest.fixture
def deadline():
    """Return a context manager that fails after some seconds; what it guards takes far less."""
    from contextlib import contextmanager

    @contextmanager
    def guard(seconds):
        def fail(*_):
            pytest.fail(f"no answer within {seconds} s")

        previous = signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    return guard


# Interrupts


class Cancelled(RuntimeError):
    """What a handler of a signal raises."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, Cancelled, MemoryError])
@pytest.mark.parametrize("file", [SAFETENSORS_FILE, PICKLE_FILE])
def test_an_interrupt_is_not_a_damaged_file(file, error, write_adapter, write_bin, monkeypatch):
    folder = write_adapter() if file == SAFETENSORS_FILE else write_bin()

    def interrupt(*_, **__):
        raise error

    if file == SAFETENSORS_FILE:
        monkeypatch.setattr(safetensors_file.safetensors.torch, "load", interrupt)
    else:
        monkeypatch.setattr(torch, "frombuffer", interrupt)
    with pytest.raises(error):
        read_checkpoint(folder)


# Values of JSON


@pytest.mark.parametrize("key", ["r", "revision", "unknown", "target_modules", "use_dora"])
@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, "9" * 5000, "9" * 4000, '"\\u0000"'])
def test_deep_and_huge_values_of_json_are_typed_errors(key, value, write_adapter):
    folder = write_adapter()
    values = {"peft_type": '"LORA"', "r": "4", "target_modules": '["q_proj"]', key: value}
    text = ", ".join(f'"{name}": {text}' for name, text in values.items())
    (folder / CONFIG_FILE).write_text(f"{{{text}}}")
    try:
        read_checkpoint(folder)
    except lora_backends.LoRABackendError as error:
        assert len(str(error)) < 2000 and str(folder) in str(error)
    else:
        assert key == "revision"


def test_a_message_lists_no_more_than_a_reader_reads(write_adapter):
    folder = write_adapter(**{f"unknown_{i}": 1 for i in range(10_000)})
    with pytest.raises(lora_backends.UnsupportedInputError, match="and 9980 more") as caught:
        read_checkpoint(folder)
    assert len(str(caught.value)) < 5000


# Default devices


def test_a_default_device_of_the_caller_changes_nothing(write_adapter, write_bin):
    for folder in (write_adapter(), write_bin()):
        with torch.device("meta"):
            delta = read_checkpoint(folder).modules[Q_PROJ]
        assert delta.lora_a.device.type == "cpu"
