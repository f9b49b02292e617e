"""`lora-backends adapters`: what a folder holds, and what is refused in it."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lora_backends.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"


def run(*arguments):
    return CliRunner().invoke(app, ["adapters", *map(str, arguments)])


def test_a_folder_of_adapters_is_listed():
    result = run(EXAMPLES, "--json")
    assert result.exit_code == 0
    found = {info["name"]: info for info in json.loads(result.stdout)}
    assert [(name, info["rank"], info["dtype"]) for name, info in found.items()] == [
        ("json", 8, "float16"),
        ("pirate", 4, "float16"),
        ("telegram", 8, "float16"),
    ]
    assert found["json"]["targets"] == ["q_proj", "v_proj"] and found["json"]["bytes"] == 921_600
    assert "down_proj, gate_proj" in run(EXAMPLES).stdout


def test_one_adapter_is_listed_by_the_name_of_its_folder():
    assert [info["name"] for info in json.loads(run(EXAMPLES / "json", "--json").stdout)] == [
        "json"
    ]


def test_a_refused_adapter_is_told_with_its_reason_beside_the_others(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "json" / "adapter_model.safetensors").write_bytes(b"damaged")
    (tmp_path / "json").rename(tmp_path / "\x1b[31m")
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "pirate" in result.stdout and "refused, see below" in result.stdout
    assert "the file is damaged" in result.stderr
    assert "\x1b" not in result.output
    problems = [info["problem"] for info in json.loads(run(tmp_path, "--json").stdout)]
    assert [problem is None for problem in problems] == [False, True, True]


@pytest.mark.parametrize("folder", ["", "nothing"])
def test_a_folder_without_adapters_is_an_error(tmp_path, folder):
    result = run(tmp_path / folder)
    assert result.exit_code != 0 and "adapter" in str(result.exception)
