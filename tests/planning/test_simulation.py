"""The simulated pool decides as the real one, and plans follow from the simulation."""

import itertools
import json
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from lora_backends import InvalidInputError
from lora_backends.adapters import AdapterPool, AdapterStore, ModuleSpec
from lora_backends.adapters.pool import policy
from lora_backends.planning.cards import Card, Measured
from lora_backends.planning.fleet import Fleet, make_plan
from lora_backends.planning.shapes import LayerGroup, ModelShapes
from lora_backends.planning.simulation import WARM_UP, Simulation, Times
from lora_backends.planning.traffic import Arrival, Traffic

TIMES = Times(step=lambda rows, adapters: 0.01, prompt=lambda tokens: 0.0, load=0.0, read=0.0)
CARD = Card("a card", 10**9, 1e12, 1e15, 1e-6, 0.0, (Measured(64, 64, 1, 8, 4, 8, 0.8),), "test")
SMALL_CARD, MANY = replace(CARD, memory_bytes=10**8), Traffic(2000, 1.0)
MODEL = ModelShapes(
    origin="model", base_bytes=10**8, base_parameters=5 * 10**7, cache_bytes_per_token=100.0,
    adapter_bytes=10**6, slot_bytes=10**6, file_bytes=10**6, layers=(LayerGroup(64, (64,), 4),),
    rank=8, max_rank=8, dtype="bfloat16", adapter_dtype="bfloat16",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Return a folder of 40 equal adapters."""
    for i in range(40):
        path = tmp_path / "adapters" / f"adapter {i}"
        path.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}
        (path / "adapter_config.json").write_text(json.dumps(config))
        pair = {"A": torch.ones(2, 6), "B": torch.ones(4, 2)}
        tensors = {f"base_model.model.q.lora_{half}.weight": t for half, t in pair.items()}
        save_file(tensors, path / "adapter_model.safetensors")
    return tmp_path / "adapters"


@pytest.mark.parametrize(("slots", "rows", "in_memory"), [(4, 8, 9), (12, 4, 20), (8, 8, 1000)])
def test_hits_are_those_of_a_replay_through_the_real_store(folder, slots, rows, in_memory):
    pool = AdapterPool({"q": ModuleSpec("linear", 6, 4)}, slots, 2)
    store = AdapterStore(pool, cpu_bytes=80 * in_memory, folder=folder, watch_s=None)
    requests = Traffic(40, 40.0, output_tokens=20, requests=500).draw()
    outcome = Simulation(
        requests, TIMES, slots=slots, rows=rows, adapter_bytes=80, memory_bytes=80 * in_memory
    ).run()
    held, hits, reads, counted = {}, 0, 0, 0
    for event, number, name in outcome.trace:
        if event == "end":
            held.pop(number).__exit__(None, None, None)
            continue
        was_there, before = name in pool.slots, store.disk_reads
        held[number] = pool.slots.in_use([name], by="request")
        held[number].__enter__()
        if number >= WARM_UP * len(requests):
            hits, reads, counted = hits + was_there, reads + store.disk_reads - before, counted + 1
    store.close()
    assert not held
    assert store.kept_bytes == 80 * min(in_memory, 40, len({r.adapter for r in requests}))
    assert counted == outcome.requests == 400
    assert abs(outcome.hit_rate - hits / counted) <= 0.02
    assert abs(outcome.disk_rate - reads / counted) <= 0.02
    assert 0.1 < outcome.hit_rate < 1


def test_every_request_begins_once_and_ends():
    requests = Traffic(30, 100.0, output_tokens=10, requests=300).draw()
    outcome = Simulation(requests, TIMES, slots=3, rows=6, adapter_bytes=1, memory_bytes=5).run()
    begun = [number for event, number, _ in outcome.trace if event == "begin"]
    ended = [number for event, number, _ in outcome.trace if event == "end"]
    assert sorted(begun) == sorted(ended) == list(range(300))
    open_ = itertools.accumulate(1 if event == "begin" else -1 for event, _, _ in outcome.trace)
    assert max(open_) == 6


def test_a_batch_of_one_row_waits_as_a_queue_does():
    """Requests of one step each: a request waits for the steps of those before it."""
    requests = [Arrival(0.0, 0, 1, 1)] * 5
    times = TIMES._replace(step=lambda rows, adapters: 1.0)
    outcome = Simulation(requests, times, slots=1, rows=1, adapter_bytes=1, memory_bytes=1).run()
    # the median of 1, 2, 3 and 4; the first request is the warm-up
    assert outcome.wait_p50_s == pytest.approx(2.5)
    assert outcome.hit_rate == 1.0 and outcome.mean_rows == 1.0


def test_copies_and_reads_take_their_times():
    requests = [Arrival(float(i), i % 2, 1, 1) for i in range(10)]
    times = TIMES._replace(load=0.1, read=0.3)
    outcome = Simulation(requests, times, slots=1, rows=1, adapter_bytes=1, memory_bytes=1).run()
    assert outcome.disk_rate == 1.0 and outcome.wait_p50_s == pytest.approx(0.4)
    assert outcome.loading == pytest.approx(0.1, rel=0.2)
    warm = Simulation(requests, times, slots=2, rows=1, adapter_bytes=1, memory_bytes=2).run()
    assert warm.hit_rate == 1.0 and warm.wait_p95_s == pytest.approx(0.0)


def test_a_first_step_comes_after_all_that_begins_with_it():
    """Three requests at once: all their prompts and copies precede the first step."""
    requests = [Arrival(0.0, i, 1, 1) for i in range(3)]
    times = TIMES._replace(prompt=lambda tokens: 1.0, load=0.5)
    outcome = Simulation(requests, times, slots=3, rows=3, adapter_bytes=1, memory_bytes=3).run()
    assert outcome.wait_p50_s == outcome.wait_p95_s == pytest.approx(4.5)


def test_a_disk_reads_one_adapter_at_a_time():
    requests = [Arrival(0.1 * i, i, 1, 1) for i in range(100)]
    times = TIMES._replace(read=0.3)
    outcome = Simulation(requests, times, slots=9, rows=9, adapter_bytes=1, memory_bytes=9).run()
    assert outcome.wait_p95_s > 15 and not outcome.keeps_up
    assert (
        Simulation(requests, TIMES, slots=9, rows=9, adapter_bytes=1, memory_bytes=9).run().keeps_up
    )


def test_slots_of_a_fleet_that_is_overrun_are_not_good_enough():
    fleet = Fleet(rows=8, base_step_s=0.02, prompt_tokens_per_s=1e5)
    plan = make_plan(MODEL, Traffic(100, 1e5, requests=2000), CARD, fleet)
    assert plan.thrashes_below is None
    late = [Arrival(0.001 * i, 0, 1, 1) for i in range(4000)]
    stopped = Simulation(
        late, TIMES._replace(step=lambda rows, adapters: 0.01), slots=1, rows=1,
        adapter_bytes=1, memory_bytes=1,
    ).run()  # fmt: skip
    assert not stopped.keeps_up and stopped.wait_p95_s > stopped.wait_p50_s > 0.1


def test_memory_is_not_added_up_again_for_each_adapter(monkeypatch):
    """Otherwise the time of a plan would grow with the square of the number of adapters."""
    sums = []
    monkeypatch.setattr(policy, "sum", lambda values: sums.append(1), raising=False)
    Simulation(
        Traffic(500, 20.0, requests=50).draw(), TIMES, slots=8, rows=8, adapter_bytes=2,
        memory_bytes=301, in_memory=range(500)[::-1],
    ).run()  # fmt: skip
    assert not sums


def test_what_is_kept_is_the_same_with_a_running_total():
    by_sum, by_total, total = OrderedDict(), OrderedDict(), 0
    for i in range(60):
        item = SimpleNamespace(bytes=1 + i * i % 17)
        summed = policy.keep(by_sum, str(i % 13), item, 40)
        total = policy.keep(by_total, str(i % 13), item, 40, total)
        assert list(by_sum) == list(by_total) and summed == total
        assert total == sum(each.bytes for each in by_sum.values()) <= 40


def test_traffic_is_what_was_asked_for():
    traffic = Traffic(50, 10.0, zipf=1.0, prompt_tokens=100, output_tokens=30, requests=4000)
    requests = traffic.draw()
    assert requests == traffic.draw() != replace(traffic, seed=1).draw()
    assert requests[-1].arrival == pytest.approx(400, rel=0.1)
    share = sum(r.adapter == 0 for r in requests) / 4000
    assert share == pytest.approx(traffic.popularity()[0], rel=0.1)
    assert sum(r.prompt for r in requests) / 4000 == pytest.approx(100, rel=0.1)
    adapters, load = traffic.divided(4)
    assert load == pytest.approx(0.25, abs=0.03)
    assert sum(traffic.popularity()[i] for i in adapters) == pytest.approx(load)
    assert {r.adapter for r in traffic.draw(load, adapters)} <= set(adapters)


def test_a_fleet_grows_with_its_traffic_and_shrinks_with_patience():
    fleet = Fleet(rows=8, base_step_s=0.02, prompt_tokens_per_s=1e5)
    quiet, busy, hopeless = (
        make_plan(MODEL, Traffic(100, rate, 0.5, output_tokens=50, requests=600), CARD, fleet)
        for rate in (2.0, 40.0, 5000.0)
    )
    assert quiet.cards["by adapter"] == 1 and 4 <= busy.cards["by adapter"] <= 8
    assert hopeless.cards["by adapter"] is None and not hopeless.by_slots[-1].keeps_up
    assert quiet.slots_that_fit == int((0.9e9 - 10**8 - 8 * 562 * 100) / 10**6)
    assert quiet.base_step_s == 0.02 and quiet.lora_step_s > 0
    rates = [outcome.hit_rate for outcome in quiet.by_slots]
    assert rates[-1] > rates[0] and quiet.by_slots[-1].slots == 100
    assert busy.cards_outcome["by adapter"].keeps_up
    json.dumps(busy.describe())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda: Traffic(0, 1.0), "adapters is 0"),
        (lambda: Traffic(1, float("nan")), "rate is nan"),
        (lambda: Traffic(1, 1.0, zipf=-1.0), "zipf is -1"),
        (lambda: Fleet(rows=0), "rows is 0"),
        (lambda: Traffic(float("nan"), 1.0), "adapters is nan"),
        (lambda: Traffic(10**12, 1.0), "adapters is 1000000000000"),
        (lambda: Traffic(1, 5e-324), "rate is 5e-324"),
        (lambda: Traffic(1, 1.0, prompt_tokens=10**400), "prompt_tokens is 1"),
        (lambda: Traffic(1, 1.0, seed=[1]), "seed is"),
        (lambda: Fleet(rows=float("nan")), "rows is nan"),
        (lambda: Fleet(cpu_bytes=float("nan")), "cpu_bytes is nan"),
        (lambda: Fleet(max_wait_s="1"), "max_wait_s is '1'"),
        (lambda: Fleet(spare=1.0), "spare is 1"),
        (lambda: Fleet(base_step_s=0.0), "base_step_s is 0"),
        (lambda: make_plan(MODEL, Traffic(9, 1.0), SMALL_CARD, Fleet()), "no slot fits"),
        (lambda: make_plan(MODEL, MANY, CARD, Fleet(slots=900)), "900 slots do not fit"),
    ],
)
def test_what_is_refused(change, match):
    with pytest.raises(InvalidInputError, match=match):
        change()
