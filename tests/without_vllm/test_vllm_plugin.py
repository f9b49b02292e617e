"""The plug-in for vLLM, as far as it goes without vLLM: `make test-vllm` tests it inside."""

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch
from helpers.engines import ENGINES

from lora_backends import (
    BackendUnavailableError,
    InvalidInputError,
    UnsupportedInputError,
)
from lora_backends.common.names import VLLM_VARIABLE
from lora_backends.integrations import plans as of_plans
from lora_backends.integrations.plans import Plans
from lora_backends.integrations.vllm.ids import slots_of
from lora_backends.integrations.vllm.layers import true_ranks
from lora_backends.integrations.vllm.plugin import backend_asked_for, check_settings, check_version


def test_the_plugin_sleeps_until_it_is_asked_for(monkeypatch):
    monkeypatch.delenv(VLLM_VARIABLE, raising=False)
    (entry,) = entry_points(group="vllm.general_plugins", name="lora_backends")
    module, _, function = entry.value.partition(":")
    code = f"import sys; from {module} import {function} as f; f(); f()\n"
    code += "print(sorted({'torch', 'numpy', 'vllm', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("version", ["0.26.0", "0.26.0rc1", "0.33.0+cpu", "0.100", "1.0.0"])
def test_versions_from_the_oldest_on_are_taken(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.9.2", "0.1.dev1+g1234", "dev"])
def test_older_versions_are_refused_by_their_number(version):
    with pytest.raises(BackendUnavailableError) as error:
        check_version(version)
    assert f"given: vLLM {version}" in str(error.value)


@pytest.mark.parametrize(
    ("part", "setting", "named"),
    [
        ("model_config", "is_encoder_decoder", "a-model, with an encoder"),
        ("cache_config", "kv_sharing_fast_prefill", "kv_sharing_fast_prefill"),
        ("parallel_config", "use_ubatching", "microbatches"),
        ("speculative_config", "enable_adaptive_verification", "enable_adaptive_verification"),
    ],
)
def test_settings_that_give_layers_unannounced_rows_are_refused(part, setting, named):
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="a-model", is_encoder_decoder=False),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        parallel_config=SimpleNamespace(use_ubatching=False),
        speculative_config=None,
    )
    check_settings(config)
    config.speculative_config = SimpleNamespace()  # of a version without the setting
    check_settings(config)
    check_settings(SimpleNamespace(model_config=None))
    check_settings(None)
    setattr(getattr(config, part), setting, True)
    with pytest.raises(UnsupportedInputError, match=f"given: {named}"):
        check_settings(config)


def test_a_name_that_is_not_registered_is_refused_with_those_that_are(monkeypatch):
    monkeypatch.setenv(VLLM_VARIABLE, "torch-ref")
    with pytest.raises(BackendUnavailableError, match="did you mean 'torch_ref'.*registered: "):
        backend_asked_for()
    for name in ("auto", "torch_ref"):
        monkeypatch.setenv(VLLM_VARIABLE, name)
        assert backend_asked_for() == name


def test_ranks_that_are_not_one_per_slice_count_for_every_slice():
    two, five = torch.ones(2, 7), torch.ones(5, 7)
    assert true_ranks([two, None, five], 3) == [2, 0, 5]
    assert true_ranks(five, 1) == [5]
    assert true_ranks(five, 3) == [5, 5, 5]
    assert true_ranks([two, five], 4) == [5] * 4
    assert true_ranks((), 2) == [0, 0]


@pytest.mark.parametrize("rows", [1, 300])
def test_an_id_without_a_slot_is_named(rows):
    slots = {0: -1, 5: 1, 7: 0}
    assert slots_of([7, 0, 5] * rows, slots).tolist() == [0, -1, 1] * rows
    with pytest.raises(InvalidInputError, match="given: 6\n  allowed: 0, 5, 7,"):
        slots_of([7, 6, 5] * rows, slots)


class Recorder:
    """A backend for a GPU that records what its plans are filled with."""

    name, cuda_graphs, device = "recorder", True, torch.device("cuda")

    def prepare_batch(self, batch, out=None, capacity=None):
        plan = out or SimpleNamespace(capacity=capacity, refills=[])
        plan.refills.append(batch.token_slots.tolist())
        return plan


@pytest.fixture
def capturing(monkeypatch):
    state = SimpleNamespace(now=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.now)
    return state


def test_a_plan_has_room_for_the_rows_of_x(capturing):
    plans = Plans(Recorder(), num_slots=2, capacity=100)
    plans.set_slots([1, -1, 0])
    assert [plans.of(rows).capacity for rows in (3, 8, 9, 16, 33, 64, 65, 100)] == [
        *(8, 8, 16, 16, 64, 64, 100, 100)
    ]
    for rows in (2, 101):
        with pytest.raises(InvalidInputError, match=f"{rows} rows(.|\n)*3 to 100 rows"):
            plans.of(rows)


def test_batches_of_one_slot_have_as_many_rows_as_x(capturing):
    plans = Plans(Recorder(), num_slots=2, capacity=20)
    plans.set_slots([0, 1, -1])
    plans.set_every(1)
    assert plans.of(2).refills[-1] == [1] * 2
    assert plans.of(20).refills[-1] == [1] * 20
    beyond = plans.of(30)
    assert (beyond.capacity, beyond.refills[-1]) == (30, [1] * 30)
    for rows in (3, 0):  # an encoder may get no rows, and some at its next layer
        plans.of(rows)
        assert not plans.is_idle
    plans.set_every(-1)
    assert plans.is_idle
    plans.set_slots([0, 1, -1])
    assert plans.of(4).refills[-1] == [0, 1, -1]


def test_a_refused_batch_leaves_the_last_one(capturing):
    plans = Plans(Recorder(), num_slots=2, capacity=20)
    plans.set_every(1)
    for refused in ([2], torch.tensor([-1, 2])):
        with pytest.raises(InvalidInputError, match="a slot that does not exist"):
            plans.set_slots(refused)
    with pytest.raises(InvalidInputError, match="a slot that does not exist"):
        plans.set_every(2)
    assert plans.of(3).refills[-1] == [1] * 3 and not plans.is_idle
    plans.set_slots(torch.tensor([-1, 0]))
    assert plans.slots == (-1, 0) and not plans.is_idle


def test_captured_plans_are_refilled_at_once_and_others_when_used(capturing):
    plans = Plans(Recorder(), num_slots=2, capacity=64)
    plans.set_slots([1] * 5)
    small, large = plans.of(8), plans.of(40)
    capturing.now = True
    assert plans.of(5) is small
    capturing.now = False
    plans.set_slots([0])
    assert small.refills[-1] == [0]
    assert large.refills[-1] == [1] * 5
    assert plans.of(33) is large and large.refills[-1] == [0]
    plans.set_slots([1] * 9)  # more rows than the captured plan takes: no graph of it is replayed
    assert small.refills[-1] == [0]
    seen = len(large.refills)
    assert plans.of(40) is plans.of(64) is large
    assert len(large.refills) == seen + 1, "one refill for all layers"


@pytest.mark.parametrize("name", ENGINES)
def test_all_captured_plans_with_room_hold_each_batch(name, capturing, monkeypatch):
    """An engine may pad a batch to any captured size: the engines' plans share one copy."""
    monkeypatch.setattr(of_plans, "_sizes", lambda *_: [8, 16, 32, 64])
    monkeypatch.setattr(of_plans, "is_capturing", lambda device: capturing.now)
    plans = Plans(ENGINES[name]("cpu"), num_slots=4, capacity=64)
    plans.set_slots([3] * 5)
    made = {rows: plans.of(rows) for rows in (8, 16, 32, 64)}
    capturing.now = True
    for rows in (8, 16, 64):  # not 32, which lies between them
        plans.of(rows)
    capturing.now = False
    for slots in ([1, -1, 2], [], [0] * 16, [2] * 40, [3, 0, 1]):
        plans.set_slots(slots)
        for rows, plan in made.items():
            if rows != 32 and rows >= len(slots):
                assert plan.token_slots().tolist() == slots + [-1] * (rows - len(slots))
    assert plans.of(20) is made[32]
    assert made[32].token_slots()[:4].tolist() == [3, 0, 1, -1]


def test_a_graph_captures_no_plan_that_the_host_would_have_to_refill(capturing):
    plans = Plans(Recorder(), num_slots=2, capacity=64)
    plans.set_slots([1])
    capturing.now = True
    with pytest.raises(UnsupportedInputError, match="before they have run"):
        plans.of(1)


def test_a_graph_captures_no_backend_that_cannot_be_captured(capturing):
    backend = Recorder()
    backend.cuda_graphs = False
    plans = Plans(backend, num_slots=2, capacity=64)
    plans.set_slots([1])
    plans.of(1)
    capturing.now = True
    with pytest.raises(UnsupportedInputError, match="cannot capture backend 'recorder'"):
        plans.of(1)


def test_a_batch_without_adapters_is_idle():
    backend = Recorder()
    backend.device = torch.device("cpu")
    plans = Plans(backend, num_slots=2, capacity=64)
    assert plans.is_idle
    plans.set_slots([-1, -1])
    assert plans.is_idle
    plans.set_slots([-1, 0])
    assert not plans.is_idle
