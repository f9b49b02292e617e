import json
import os

import pytest

from lora_backends import BackendUnavailableError, InvalidInputError, LoRAConfig
from lora_backends.adapters import LoadLimits
from lora_backends.cli.generating.config import GenerateConfig


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "lora.toml"
        path.write_text(text)
        return path

    return write


def test_arguments_override_the_environment_which_overrides_the_file(file, monkeypatch):
    path = file("max_rank = 16\nmax_adapters = 3\ndevice = 'meta'\n[adapters]\na = 'x'\n")
    monkeypatch.setenv("LORA_BACKENDS_MAX_RANK", "32")
    monkeypatch.setenv("LORA_BACKENDS_MAX_ADAPTERS", "5")
    config = LoRAConfig.from_file(path, max_adapters=7)
    assert (config.max_adapters, config.max_rank, config.device) == (7, 32, "meta")
    assert config.adapters == {"a": path.parent / "x"}
    assert config.backend == "auto"


def test_tables_come_from_the_environment_as_json(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_BACKEND_OPTIONS", '{"segment_size": 32}')
    assert LoRAConfig().backend_options == {"segment_size": 32}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_rnk = 3", "max_rnk in FILE: unknown key; did you mean 'max_rank'"),
        ("max_rank = '16'", "max_rank in FILE: Input should be a valid integer"),
        ("max_rank = true", "max_rank in FILE: Input should be a valid integer"),
        ("max_adapters = 0", "max_adapters in FILE: Input should be greater than or equal to 1"),
        ("backend = 'torchref'", "did you mean 'torch_ref'"),
        ("backend = 3", "backend in FILE: Input should be a valid string"),
        (
            "dtype = 'float8'",
            "Input should be 'float16', 'bfloat16', 'float32', 'float64' or 'auto'",
        ),
        ("adapters = 'a'", "adapters in FILE: Input should be a valid dictionary"),
        ("[adapters]\na = 3", "adapters.a in FILE"),
        ("[adapters]\nretrieval.query = 'a'", "quote a name with dots"),
        ("max_rank = ", "FILE is not valid TOML"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_file(file, text, told):
    path = file(text)
    with pytest.raises(InvalidInputError) as raised:
        LoRAConfig.from_file(path)
    assert told.replace("FILE", str(path)) in str(raised.value)


def test_every_problem_is_told_at_once(file):
    with pytest.raises(InvalidInputError) as raised:
        LoRAConfig.from_file(file("max_rank = 0\nmax_adapters = 0\n"))
    assert "max_rank" in str(raised.value) and "max_adapters" in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match="nothing.toml"):
        LoRAConfig.from_file(tmp_path / "nothing.toml")


def test_a_wrong_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_MAX_RANK", "many")
    with pytest.raises(InvalidInputError, match="environment variable LORA_BACKENDS_MAX_RANK"):
        LoRAConfig()


def test_an_unknown_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_BAKEND", "torch_ref")
    with pytest.raises(InvalidInputError, match="did you mean 'LORA_BACKENDS_BACKEND'"):
        LoRAConfig()


def test_variables_that_are_no_fields_are_known(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_TILES", "anywhere")
    monkeypatch.setenv("LORA_BACKENDS_VLLM", "auto")
    assert LoRAConfig().backend == "auto"
    monkeypatch.setenv("LORA_BACKENDS_TILE", "anywhere")
    with pytest.raises(InvalidInputError, match="did you mean 'LORA_BACKENDS_TILES'"):
        LoRAConfig()


def test_unknown_arguments_are_named():
    with pytest.raises(InvalidInputError, match="bakend in the arguments: unknown key"):
        LoRAConfig(bakend="torch_ref")


def test_a_nested_unknown_key_gets_the_names_of_its_own_table(file):
    path = file("[[prompts]]\ntext = 'hi'\nadaptor = 'pirate'\n")
    with pytest.raises(InvalidInputError) as raised:
        GenerateConfig.from_file(path)
    message = str(raised.value)
    assert "prompts.0.adaptor" in message and "did you mean 'adapter'" in message
    assert "allowed: text, adapter" in message


def test_a_table_is_replaced_whole(file, monkeypatch):
    path = file("[adapters]\na = 'x'\n")
    assert LoRAConfig.from_file(path, adapters={}).adapters == {}
    monkeypatch.setenv("LORA_BACKENDS_ADAPTERS", '{"b": "/y"}')
    assert list(LoRAConfig.from_file(path).adapters) == ["b"]
    assert list(LoRAConfig.from_file(path, adapters={"c": "/z"}).adapters) == ["c"]


def test_options_in_a_file_go_with_its_backend(file):
    path = file("backend = 'auto'\n[backend_options]\ntile = 8\n")
    assert LoRAConfig.from_file(path).backend_options == {"tile": 8}
    assert LoRAConfig.from_file(path, backend="torch_ref").backend_options == {}
    assert LoRAConfig.from_file(path, backend="auto").backend_options == {"tile": 8}


def test_broken_json_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_BACKEND_OPTIONS", "{bad")
    with pytest.raises(InvalidInputError, match="backend_options"):
        LoRAConfig()


def test_a_device_that_is_none_is_refused():
    with pytest.raises(InvalidInputError, match="device in the arguments"):
        LoRAConfig(device="banana")


def test_an_unknown_backend_is_unavailable_and_invalid():
    for error in (InvalidInputError, BackendUnavailableError):
        with pytest.raises(error, match="did you mean 'torch_ref'"):
            LoRAConfig(backend="torchref")


DEEP = "[" * 5000 + "]" * 5000
LONG = "9" * 5000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"backend = {DEEP}", "is not valid TOML"),
        (f"max_rank = {LONG}", "is not valid TOML"),
        (f"[backend_options]\na = {LONG}", "is not valid TOML"),
        (f"max_rank = {LONG[:4000]}", "less than or equal to 2147483647"),
        (f"max_adapters = {LONG[:30]}", "less than or equal to 2147483647"),
        (f"backend = '{'x' * 10**6}'", "lora.toml: no backend named 'xxx"),
    ],
    ids=[
        "deep",
        "5000 digits",
        "5000 digits in a table",
        "4000 digits",
        "30 digits",
        "a long word",
    ],
)
def test_deep_and_huge_values_in_a_file_are_refused_shortly(file, text, told):
    with pytest.raises(InvalidInputError, match=told) as raised:
        LoRAConfig.from_file(file(text))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MAX_RANK", LONG),
        ("MAX_RANK", LONG[:4000]),
        ("BACKEND_OPTIONS", f'{{"a": {LONG}}}'),
        ("BACKEND_OPTIONS", f'{{"a": {"[" * 100_000}'),
        ("BACKEND_OPTIONS", f'{{"a": {"[" * 20_000 + "]" * 20_000}}}'),
    ],
    ids=["5000 digits", "4000 digits", "5000 digits in a table", "an open list", "deep"],
)
def test_deep_and_huge_values_in_the_environment_are_refused(monkeypatch, variable, value):
    monkeypatch.setenv(f"LORA_BACKENDS_{variable}", value)
    with pytest.raises(InvalidInputError, match="max_rank|the environment is wrong"):
        LoRAConfig()


@pytest.mark.parametrize("value", [10**5000, -(10**5000), 2**31], ids=["long", "negative", "int32"])
def test_huge_arguments_are_refused(value):
    with pytest.raises(InvalidInputError, match="max_rank in the arguments"):
        LoRAConfig(max_rank=value)
    with pytest.raises(InvalidInputError, match="max_new_tokens in the arguments"):
        GenerateConfig(max_new_tokens=value)


def test_an_argument_nested_deeply_is_refused():
    deep = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(InvalidInputError, match="backend in the arguments"):
        LoRAConfig(backend=deep)


@pytest.mark.parametrize("value", [DEEP, LONG, f"0x{'f' * 5000}", "{a = " * 500 + "1" + "}" * 500])
@pytest.mark.parametrize("key", ["max_rank", "adapters", "backend_options", "limits", "unknown"])
def test_deep_and_huge_values_are_typed_errors(key, value, file):
    path = file(f"{key} = {value}")
    with pytest.raises(InvalidInputError) as raised:
        LoRAConfig.from_file(path)
    assert str(path) in str(raised.value) and len(str(raised.value)) < 2000


@pytest.mark.parametrize("variable", ["MAX_RANK", "BACKEND_OPTIONS", "ADAPTERS", "LIMITS"])
@pytest.mark.parametrize("value", ["[" * 100_000, LONG, f'{{"a": {LONG}}}'], ids=len)
def test_deep_and_huge_variables_are_typed_errors(variable, value, monkeypatch):
    monkeypatch.setenv(f"LORA_BACKENDS_{variable}", value)
    with pytest.raises(InvalidInputError):
        LoRAConfig()


@pytest.mark.parametrize("path", [None, 3, "~nosuchuser/x", "nul\0byte", "x" * 300, "/dev/zero"])
def test_what_is_no_file_is_refused(path):
    with pytest.raises(InvalidInputError, match="no path|of a user that|cannot read"):
        LoRAConfig.from_file(path)


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lora.toml")
    with pytest.raises(InvalidInputError, match="given: a FIFO"):
        LoRAConfig.from_file(tmp_path / "lora.toml")


@pytest.mark.parametrize("folder", ["~nosuchuser/x", "nul\0byte"])
def test_an_adapter_that_is_no_path_is_named(folder, file):
    with pytest.raises(InvalidInputError, match=r"adapters\.a"):
        LoRAConfig(adapters={"a": folder})
    with pytest.raises(InvalidInputError, match=r"adapters\.a in .*lora.toml"):
        LoRAConfig.from_file(file(f"[adapters]\na = {json.dumps(folder)}"))


def test_an_adapter_has_a_name():
    with pytest.raises(InvalidInputError, match="empty name"):
        LoRAConfig(adapters={"": "folder"})


def test_limits_come_from_every_source(file, monkeypatch):
    path = file("[limits]\ntensors = 7\nmatching_seconds = 3\n")
    assert LoRAConfig.from_file(path).limits == LoadLimits(tensors=7, matching_seconds=3)
    monkeypatch.setenv("LORA_BACKENDS_LIMITS", '{"tensors": 8}')
    assert LoRAConfig.from_file(path).limits == LoadLimits(tensors=8)
    limits = LoadLimits(tensors=9)
    assert LoRAConfig.from_file(path, limits=limits).limits is limits


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ("tensors = '7'", "limits.tensors is '7'"),
        ("tensors = true", "limits.tensors is True"),
        ("tensors = 0", "an int above 0"),
        ("matching_seconds = nan", "a number above 0"),
        ("tensor = 7", "unknown limit 'tensor'"),
    ],
)
def test_a_wrong_limit_is_named_with_its_file(limits, told, file):
    path = file(f"[limits]\n{limits}")
    with pytest.raises(InvalidInputError) as raised:
        LoRAConfig.from_file(path)
    assert told in str(raised.value) and f"limits in {path}" in str(raised.value)


def test_an_error_of_many_problems_fits_on_a_screen(file):
    text = "".join(f"{'k' * 500}{number} = 1\n" for number in range(300))
    with pytest.raises(InvalidInputError, match="and 290 more") as raised:
        LoRAConfig.from_file(file(text))
    assert len(str(raised.value)) < 4000


def test_a_key_called_self_is_unknown_as_any_other():
    with pytest.raises(InvalidInputError, match="self in the arguments: unknown key"):
        LoRAConfig(**{"self": 3})
