"""A few hundred of the fuzzed checkpoints in every run; `tests.fuzz.checkpoints` reads more."""

import json

import pytest

pytest.importorskip("peft", reason="the cases are made with PEFT's functions")

from fuzz.checkpoints.cases import Case
from fuzz.checkpoints.folders import is_targeted
from fuzz.checkpoints.run import opened
from fuzz.running import new_result, run_cases

CASES = 300


@pytest.fixture(scope="module")
def result():
    with opened(0) as run:
        return ran(run, CASES)


def ran(run, cases, result=None):
    result = result or new_result(seed=0)
    run_cases(run, cases, result, lambda _: None)
    return result


def test_every_case_is_read_right_or_refused_with_a_typed_error(result):
    assert result["faults"] == []
    assert result["done"] == CASES


def test_cases_are_read_and_refused_for_many_reasons(result):
    outcomes = result["outcomes"]
    assert outcomes["read"] > CASES / 20
    assert outcomes["refused: InvalidInputError"] > CASES / 4
    assert outcomes["refused: UnsupportedInputError"] > CASES / 20


def test_a_run_goes_on_where_it_ended(result):
    with opened(0) as run:
        halves = json.loads(json.dumps(ran(run, 30)))
        assert halves["done"] == 30
        ran(run, 60, halves)
        assert halves["outcomes"] == ran(run, 60)["outcomes"]


def test_a_case_follows_from_its_number(tmp_path):
    first, again = (Case(tmp_path / name, seed=3, number=8) for name in "ab")
    assert first.config == again.config and first.steps == again.steps
    assert first.is_valid == again.is_valid
    names = sorted(path.name for path in first.folder.iterdir())
    assert names == sorted(path.name for path in again.folder.iterdir())


def test_some_cases_are_valid(tmp_path):
    cases = [Case(tmp_path / "case", seed=1, number=number) for number in range(100)]
    valid = [case for case in cases if case.is_valid]
    assert len(valid) > 3 and all(case.tensors and not case.steps for case in valid)
    assert all(any(is_targeted(case.config, path) for path in _modules(case)) for case in valid)


def _modules(case):
    return {key.split(".lora_")[0].removeprefix("base_model.model.") for key in case.tensors}
