"""`lora-backends plan`."""

import json
import re

import pytest
from typer.testing import CliRunner

from lora_backends.cli import app

ARGUMENTS = ["--adapters", "50", "--rate", "5", "--requests", "200", "--rank", "4"]


@pytest.fixture
def run(make_base, tmp_path):
    """Return a function that plans a small model, with further options."""
    make_base("llama").config.save_pretrained(tmp_path)

    def planned(*options):
        return CliRunner().invoke(
            app, ["plan", "--config-json", str(tmp_path), *ARGUMENTS, *options]
        )

    return planned


def test_the_tables_and_the_plot(run, tmp_path):
    done = run("--plot", str(tmp_path / "plan.svg"), "--base-step-ms", "2", "--slots", "16")
    assert done.exit_code == 0, done.output
    assert re.search(r"slots that fit +\| +[\d,]+", done.stdout)
    assert "requests sent to the card of their adapter: 1 card\n" in done.stdout
    assert [int(n) for n in re.findall(r"^\| +(\d+) +\| +\d", done.stdout, re.M)] == [
        1,
        2,
        4,
        8,
        16,
    ]
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_json_has_the_same_numbers(run):
    done = run("--json", "--memory-gb", "80")
    plan = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert plan["model"]["rank"] == 4 and plan["slots"] == 50
    assert plan["by_slots"][-1]["hit_rate"] > plan["by_slots"][0]["hit_rate"]
    assert "trace" not in plan["by_slots"][0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--card", "h2000"], "NVIDIA H200"),
        (["--card", "bench.json"], "--memory-gb"),
        (["--memory-gb", "0"], "--memory-gb is 0"),
        (["--memory-gb", "inf"], "--memory-gb is inf"),
        (["--cpu-gb", "nan"], "--cpu-gb is nan"),
        (["--adapters", "10000000000"], "adapters is 10000000000"),
        (["--rate", "0"], "rate is 0"),
        (["--plot", "plan.foo"], "*.svg, *.png"),
        (["--target-modules", "nothing"], "nothing"),
    ],
)
def test_what_is_refused(run, options, words):
    done = run(*options)
    assert done.exit_code != 0 and words in str(done.exception or done.output)
