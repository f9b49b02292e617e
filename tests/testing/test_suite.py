"""`verify`: what it reports, how small failing cases become, and that a seed repeats them."""

import dataclasses
import itertools
import json
import shlex
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from mutants import MUTANTS, TwoSteps

from lora_backends import InvalidInputError
from lora_backends.cli import main
from lora_backends.testing import (
    DEFAULT,
    LoRACase,
    case_from,
    check_case,
    properties,
    suite,
    verify,
)
from lora_backends.testing.cases.kinds import KINDS
from lora_backends.testing.properties import PROPERTIES, Property
from lora_backends.testing.properties.core import EXACT, no_interpreter
from lora_backends.torch_ref import TorchRefBackend

ONE_SLICE = repr(LoRACase((0,), ((1,),), 1, 1, (1,), ((1.0,),)))
NO_SUCH_SLOT = repr(LoRACase((5,), ((1,),), 1, 1, (1,), ((1.0,),)))


UNHURRIED = dataclasses.replace(DEFAULT, shrink_seconds=float("inf"))
"""The smallest case does not depend on how fast the machine finds it."""


@pytest.fixture
def run_cli(capsys, monkeypatch):
    """Return a function that runs `lora-backends verify` and returns its status and output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lora-backends", "verify", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return SimpleNamespace(status=ended.value.code, stdout=printed.out, stderr=printed.err)

    return run


class Counting(TorchRefBackend):
    """torch_ref that counts what would be launches of kernels."""

    launches = 0

    def run_linear(self, *args, **kwargs):
        self.launches += 2
        return super().run_linear(*args, **kwargs)

    def run_lora_a(self, *args, **kwargs):
        self.launches += 1
        return super().run_lora_a(*args, **kwargs)

    def run_lora_b(self, *args, **kwargs):
        self.launches += 1
        return super().run_lora_b(*args, **kwargs)


@pytest.fixture(scope="module")
def full_run():
    """Return the launches of each property on a counting backend, and its report."""
    backend, launches = Counting("cpu"), {}

    def count(prop, result):
        if result is not None:
            launches[prop.name] = backend.launches - sum(launches.values())

    return launches, verify(backend, progress=count)


def test_a_right_backend_passes(full_run):
    assert full_run[1].passed, full_run[1].to_text()


def test_the_default_profile_makes_few_launches(full_run):
    """At most seven minutes of them under the Triton interpreter, where one takes about 50 ms."""
    interpreted = [
        count
        for name, count in full_run[0].items()
        if no_interpreter not in properties()[name].requires
    ]
    assert sum(interpreted) * 0.05 < 420


def test_the_default_profile_stands_on_every_edge_many_times(full_run):
    every = [edge for kind in KINDS.values() for edge in kind.edges]
    assert {edge for edge in every if full_run[1].edges.get(edge, 0) < 20} == set()


def test_what_does_not_apply_says_why(full_run):
    reasons = {r.name: r.reason for r in full_run[1].results if r.status == "not applicable"}
    assert reasons["rows_do_not_depend_on_the_batch"] == (
        "the backend does not claim batch invariance"
    )
    assert "not on cpu" in reasons["graph_replay_equals_eager"]


def test_properties_that_the_triton_interpreter_cannot_run_say_so(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = ["threads_do_not_disturb_each_other", "large_offsets_do_not_wrap"]
    results = verify("torch_ref", "cpu", only=names).results
    assert {result.status for result in results} == {"not applicable"}
    assert all("Triton's interpreter" in result.reason for result in results)


def test_the_report_is_json(full_run):
    report = json.loads(full_run[1].to_json())
    assert report["passed"] is True
    assert [result["name"] for result in report["results"]] == list(properties())


@pytest.fixture(scope="module")
def tail_report():
    mutant = MUTANTS["TailTokenSkipped"]
    return verify(mutant.backend("cpu"), profile=UNHURRIED, only=[mutant.caught_by])


def test_a_skipped_tail_token_is_shown_with_few_tokens(tail_report):
    (result,) = tail_report.failures
    case = case_from(result.failure.case)
    assert case.num_tokens <= 2
    assert (case.num_slots, case.max_rank, case.in_features) == (1, 1, 1)


@pytest.mark.parametrize(
    "text", ["print(1)", "LoRACase(**{})", "torch.load('x')", "LoRACase.of(1)", "(1).real"]
)
def test_a_case_is_read_and_nothing_in_it_is_run(text):
    with pytest.raises(InvalidInputError, match="the case"):
        case_from(text)


def test_the_report_of_a_failure_names_case_place_bound_and_commands(tail_report):
    text = tail_report.to_text()
    case = tail_report.failures[0].failure.case
    last = case_from(case).num_tokens - 1
    for part in (
        f"smallest case:\n    {case}",
        f"y[{last}, 0]: token {last}, slot 0, slice 0, rank 1",
        ", bound ",
        "verify TailTokenSkipped --device cpu --property run_linear_is_within_the_bound --seed 0",
        f'--case "{case}"',
    ):
        assert part in text


def test_a_fault_at_the_edge_of_a_tile_is_shown_with_one_tile():
    mutant = MUTANTS["LastTokenOfTileSkipped"]
    report = verify(mutant.backend("cpu"), profile=UNHURRIED, only=[mutant.caught_by])
    (result,) = report.failures
    assert case_from(result.failure.case).num_tokens == 16


def test_the_smallest_case_fails_alone(tail_report):
    failure = tail_report.failures[0].failure
    backend = MUTANTS["TailTokenSkipped"].backend("cpu")
    again = check_case(backend, tail_report.failures[0].name, case_from(failure.case))
    assert again.failures[0].failure.message == failure.message


def test_the_machine_reports_the_steps_that_fail():
    mutant = MUTANTS["RefillIgnored"]
    # the steps that seed 1 finds become few much sooner than those of seed 0
    report = verify(mutant.backend("cpu"), profile=UNHURRIED, seed=1, only=["pool_machine"])
    (result,) = report.failures
    assert "load slot" in result.failure.case
    assert "refill plan" in result.failure.case
    assert len(result.failure.case.splitlines()) <= 6


def test_shrinking_stops_when_its_time_is_up(monkeypatch):
    """A second passes at every look at the clock, and every run of the backend is counted."""
    clock, calls = itertools.count(), []

    class Counted(MUTANTS["TailTokenSkipped"].backend):
        def run_linear(self, *args, **kwargs):
            calls.append(args)
            return super().run_linear(*args, **kwargs)

    def calls_of(seconds):
        calls.clear()
        profile = dataclasses.replace(DEFAULT, shrink_seconds=seconds)
        assert not verify(
            Counted("cpu"), profile=profile, only=["run_linear_is_within_the_bound"]
        ).passed
        return len(calls)

    ticking = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr(suite, "time", ticking)
    assert calls_of(3.0) < calls_of(1e9)


def test_a_seed_draws_the_same_cases_again():
    drawn = []

    class Recording(TwoSteps):
        def prepare_batch(self, batch, out=None):
            drawn[-1].append(batch.token_slots.tolist())
            return super().prepare_batch(batch, out)

    for seed in (3, 3, 4):
        drawn.append([])
        verify(Recording("cpu"), seed=seed, only=["integers_are_exact"])
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_an_only_case_follows_from_the_seed(monkeypatch):
    met = []
    alone = Property("alone", "", EXACT, lambda backend, case: met.append(repr(case)), examples=1)
    monkeypatch.setitem(PROPERTIES, "alone", alone)
    for seed in (0, 0, 1, 2):
        (result,) = verify("torch_ref", "cpu", seed=seed, only=["alone"]).results
        assert result.examples == 1
    assert met[0] == met[1] and len({*met}) == 3


def test_a_crash_is_reported_with_its_type_and_place():
    mutant = MUTANTS["EmptyBatchCrashes"]
    (result,) = verify(mutant.backend("cpu"), only=[mutant.caught_by], shrink=False).failures
    assert result.failure.message.startswith("RuntimeError: ")
    assert "arithmetic.py:" in result.failure.message


class Panic(BaseException):
    """As PyO3 raises for a panic of Rust."""


@pytest.mark.parametrize("error", [SystemExit(0), Panic("index out of bounds")])
@pytest.mark.parametrize("name", ["run_qkv_is_right", "pool_machine"])
def test_a_backend_that_ends_the_process_fails(error, name):
    class Ending(TwoSteps):
        def run_lora_a(self, x, weights, plan):
            raise error

    (result,) = verify(Ending("cpu"), only=[name], shrink=False).failures
    assert result.failure.message.startswith(f"{type(error).__name__}: {error}")


def test_an_interrupt_by_the_user_ends_the_suite():
    class Interrupted(TwoSteps):
        def run_lora_a(self, x, weights, plan):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(Interrupted("cpu"), only=["run_qkv_is_right"], shrink=False)


@pytest.mark.parametrize("dtype", TorchRefBackend.dtypes)
def test_a_backend_of_one_dtype_can_be_verified(dtype):
    class Single(TorchRefBackend):
        dtypes = (dtype,)

    names = ["run_linear_is_within_the_bound", "run_experts_is_within_the_bound"]
    names += ["large_and_small_deltas_are_right", "large_layers_are_right"]
    assert verify(Single("cpu"), only=names).passed


def test_fail_fast_stops_after_the_first_failure():
    report = verify(MUTANTS["WrongSlot"].backend("cpu"), shrink=False, fail_fast=True)
    assert [result.status for result in report.results].count("failed") == 1
    assert report.results[-1].status == "failed"


def test_progress_is_told_each_property_before_and_after():
    told = []
    names = ["run_qkv_is_right", "run_gate_up_is_right"]
    verify("torch_ref", "cpu", only=names, progress=lambda prop, r: told.append((prop.name, r)))
    assert [name for name, _ in told] == [names[0], names[0], names[1], names[1]]
    assert [result is None for _, result in told] == [True, False, True, False]


@pytest.mark.parametrize("arguments", [{"only": ["run_qkv_is_rigth"]}, {"profile": "defautl"}])
def test_an_unknown_name_is_refused_with_the_nearest(arguments):
    with pytest.raises(InvalidInputError, match="did you mean 'run_qkv_is_right'|'default'"):
        verify("torch_ref", "cpu", **arguments)


def test_a_narrow_intermediate_passes_once_it_is_declared():
    class Narrow(MUTANTS["NarrowH"].backend):
        def seen_h(self, h, weights, plan):
            return h.to(weights.dtype).to(h.dtype)

    class Declared(Narrow):
        narrow_intermediate = True

    names = ["run_linear_is_within_the_bound"]
    assert not verify(Narrow("cpu"), only=names, shrink=False).passed
    assert verify(Declared("cpu"), only=names, shrink=False).passed


def test_the_command_exits_0_and_prints_a_line_per_property_where_all_pass(run_cli):
    done = run_cli("torch_ref", "--device", "cpu", "--property", "run_qkv_is_right")
    assert done.status == 0
    assert done.stdout.startswith("ok     run_qkv_is_right: 25 cases")
    assert "torch_ref on cpu: 1 passed, 0 failed" in done.stdout
    assert done.stderr == ""


def test_the_command_prints_json_alone(run_cli):
    done = run_cli("torch_ref", "--device", "cpu", "--property", "run_qkv_is_right", "--json")
    report = json.loads(done.stdout)
    assert Counter(result["status"] for result in report["results"]) == {"passed": 1}


def test_the_command_runs_one_case(run_cli):
    case = repr(LoRACase((0,), ((1,),), 1, 1, (1,), ((1.0,),), values="integer"))
    done = run_cli("torch_ref", "--property", "integers_are_exact", "--case", case)
    assert done.status == 0, done.stderr
    assert "1 cases" in done.stdout


class Shifted(TorchRefBackend):
    """A backend that is right with its defaults."""

    def __init__(self, device="cpu", *, shift=0.0, note=""):
        super().__init__(device)
        self.shift = shift

    def run_linear(self, *args, **kwargs):
        return super().run_linear(*args, **kwargs).add_(self.shift)


@pytest.fixture
def shifted(monkeypatch):
    """Register `Shifted`; return the arguments that verify one property of it."""
    monkeypatch.setattr("lora_backends.selection.choice.backend_class", lambda _: Shifted)
    return ["shifted", "--device", "cpu", "--property", "run_linear_is_within_the_bound"]


def test_the_command_makes_the_backend_with_options(run_cli, shifted):
    assert run_cli(*shifted).status == 0
    done = run_cli(*shifted, "--option", "shift=1", "--json")
    assert done.status == 1
    assert json.loads(done.stdout)["options"] == ["shift=1"]


def test_the_commands_of_a_report_repeat_the_failure_with_its_options(run_cli, shifted):
    done = run_cli(*shifted, "--option", "shift=1", "--option", 'note=it\'s "3"')
    lines = [line.strip() for line in done.stdout.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("lora-backends verify")]
    assert len(commands) == 2
    assert 'note=it\'s "3" on cpu: 0 passed, 1 failed' in done.stdout
    for command in commands:
        again = run_cli(*command[2:])
        assert again.status == 1, again.stderr
        assert "shifted shift=1 note=it's" in again.stdout


def test_a_failure_of_one_case_names_no_command_that_draws_cases(run_cli, shifted):
    done = run_cli(*shifted, "--option", "shift=1", "--case", ONE_SLICE)
    assert done.status == 1
    assert "this case alone" in done.stdout
    assert "the same cases again" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["torch_ref", "--option", "tile"], "option 'tile'\n  allowed: KEY=VALUE"),
        (["torch_ref", "--option", "device=cpu"], "option 'device=cpu'\n  allowed: KEY=VALUE"),
        (["torch_ref", "--option", "tile=3"], "'torch_ref' has no option 'tile'"),
        (["torch_ref", "--case", ONE_SLICE, "--seed", "0"], "given: --seed\n  allowed beside it"),
        (["torch_ref", "--case", ONE_SLICE, "--thorough"], "given: --thorough\n"),
        (["torch_ref", "--case", ONE_SLICE, "--fail-fast"], "given: --fail-fast\n"),
        (["no_such"], "no LoRA backend named 'no_such'"),
        (["torch_ref", "--property", "nothing"], "there is no property named 'nothing'"),
        (["torch_ref", "--case", "LoRACase()"], "--case goes with one --property"),
        (
            ["torch_ref", "--property", "run_qkv_is_right", "--case", ONE_SLICE],
            "run_qkv_is_right takes other cases",
        ),
        (
            ["torch_ref", "--property", "run_linear_is_within_the_bound", "--case", NO_SUCH_SLOT],
            "the case contradicts itself",
        ),
    ],
)
def test_the_command_exits_2_where_nothing_can_be_run(run_cli, arguments, message):
    done = run_cli(*arguments)
    assert done.status == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_suite_makes_its_tensors_on_devices_of_its_own_choice():
    quick = dataclasses.replace(DEFAULT, effort=0.02)
    with torch.device("meta"):  # where tensors have no values
        report = verify(TwoSteps("cpu"), profile=quick)
    assert report.passed, report.to_text()
