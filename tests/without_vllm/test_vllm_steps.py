"""The plug-in does next to nothing in a step of vLLM whose batch stays the same."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from lora_backends.integrations.vllm import prompts
from lora_backends.integrations.vllm.adapters import follow, invocations
from lora_backends.integrations.vllm.adapters.load import Extras


class Untouched:
    """Rows of a batch that nothing may look at."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} of the rows was read")


def same(*given):
    """Stand for a method of vLLM: return what it gets."""
    return given[1:]


class Worker(SimpleNamespace):
    """Stands for vLLM's manager of adapters; it counts how often it lists them."""

    def __init__(self, **loras):
        super().__init__(held=dict(enumerate(loras.values(), start=1)), listed=0, removed=[])
        self._adapter_manager = self
        self._registered_adapters = SimpleNamespace(cache=self.held)
        self.requests = [
            SimpleNamespace(lora_name=name, lora_int_id=i, lora_path=f"/adapters/{name}")
            for i, name in enumerate(loras, start=1)
        ]

    def list_adapters(self):
        self.listed += 1
        return dict(self.held)

    def remove_adapter(self, id_):
        self.removed.append(id_)
        del self.held[id_]

    def load(self, name, monkeypatch):
        """Load an adapter through the plug-in, as vLLM does when a request first names it."""
        (request,) = (each for each in self.requests if each.lora_name == name)
        lora = self.held[request.lora_int_id]
        monkeypatch.setattr(follow, "_read", lambda *_: lora)
        return follow._load_adapter(None, self, request)


def test_steps_without_invocations_look_at_no_row():
    manager = SimpleNamespace()
    invocations.note_activated(manager, Extras())
    invocations._batch.rows = lambda: pytest.fail("no rows are needed")
    try:
        assert invocations._from_invocation(same, manager, mapping := Untouched()) == (mapping,)
    finally:
        invocations._batch.rows = None
    with pytest.raises(AssertionError, match="index_mapping"):
        invocations._changed(manager, mapping, None)  # as it is where there are invocations


def test_an_adapter_with_an_invocation_is_noted_when_it_gets_a_slot():
    lora = SimpleNamespace(lora_backends_extras=Extras(invocation=(7, 8)))
    manager = SimpleNamespace(
        _registered_adapters=SimpleNamespace(cache={1: SimpleNamespace(), 2: lora})
    )
    for id_, expected in ((1, None), (2, True), (1, True)):
        follow._activate(lambda *_: True, manager, id_)
        assert getattr(manager, "lora_backends_has_invocations", None) is expected


def test_an_adapter_that_keeps_its_slot_is_not_looked_at():
    assert follow._activate(lambda *_: False, Untouched(), 3) is False


def test_rows_of_logits_are_counted_only_when_a_head_asks():
    inside = SimpleNamespace(cu_num_logits_np=Untouched())
    prompts._sample(same, None, None, inside)
    asked = []
    for ends in ([0, 1, 2, 3], [0, 2, 2, 3]):
        inside.cu_num_logits_np = np.array(ends)
        prompts._sample(lambda *_: asked.append(prompts.rows_per_request()), None, None, inside)
    assert asked == [None, [2, 0, 1]] and prompts.rows_per_request() is None


def test_prompts_are_noted_at_the_steps_that_bring_requests():
    def step(*new):
        requests = [
            SimpleNamespace(req_id=name, prompt_token_ids=prompt, lora_request=lora)
            for name, prompt, lora in new
        ]
        runner.req_states.req_id_to_index.update(dict.fromkeys((each[0] for each in new), 0))
        invocations._note_prompts(same, runner, SimpleNamespace(scheduled_new_reqs=requests))

    runner = SimpleNamespace(req_states=SimpleNamespace(req_id_to_index={}))
    step(("a", [1], 1), ("b", [2], 1), ("c", [3], None))
    assert runner.lora_backends_prompts == {"a": [1], "b": [2]}
    states, runner.req_states = runner.req_states, Untouched()
    invocations._note_prompts(same, runner, SimpleNamespace(scheduled_new_reqs=[]))
    runner.req_states = states
    del states.req_id_to_index["b"]
    step(("a", [4], None), ("d", [5], 1))  # "a" is another request now, without an adapter
    assert runner.lora_backends_prompts == {"d": [5]}


def test_no_layer_is_wrapped_for_prompt_logprobs_that_nobody_asks_for():
    compute = object()
    runner = SimpleNamespace(num_prompt_logprobs={}, model=SimpleNamespace(compute_logits=compute))
    found = prompts._v1(lambda runner, _: runner.model.compute_logits, runner, None)
    assert found is compute
    runner.num_prompt_logprobs["a"] = 1
    hidden = np.zeros(2)
    found = prompts._v1(lambda runner, _: runner.model.compute_logits, runner, hidden)
    assert found is not compute and runner.model.compute_logits is compute


def test_only_steps_with_blends_look_for_outdated_ones(monkeypatch):
    worker = Worker(part=SimpleNamespace(), other=SimpleNamespace(), blend=SimpleNamespace())
    for name in ("part", "other"):
        worker.load(name, monkeypatch)
    ordered, _ = follow._in_order(same, worker, worker.requests[:2][::-1], None)
    assert ordered == worker.requests[:2] and worker.listed == 0
    worker.held[3].lora_backends_extras = Extras(parts={"part": worker.requests[0]})
    worker.load("blend", monkeypatch)
    follow._in_order(same, worker, worker.requests, None)
    assert worker.listed == 1 and not worker.removed
    worker.requests[0] = SimpleNamespace(**vars(worker.requests[0]))  # the part is loaded again
    worker.load("part", monkeypatch)
    follow._in_order(same, worker, worker.requests[:2], None)
    assert worker.listed == 1 and not worker.removed, "the blend is not in this step"
    follow._in_order(same, worker, worker.requests, None)
    assert worker.removed == [3]
    worker.held[3] = SimpleNamespace()  # its id is given to an adapter that is no blend
    worker.load("blend", monkeypatch)
    listed = worker.listed
    follow._in_order(same, worker, worker.requests, None)
    assert worker.listed == listed


class Hub:
    """Stands for vLLM's search of an adapter's folder, which asks a hub for other names."""

    def __init__(self, folder, monkeypatch):
        self.asked = []

        def get_adapter_absolute_path(path):
            self.asked.append(path)
            return str(folder) if path == "someone/adapter" else path

        module = SimpleNamespace(get_adapter_absolute_path=get_adapter_absolute_path)
        for name in ("vllm", "vllm.lora"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace())
        monkeypatch.setitem(sys.modules, "vllm.lora.utils", module)
        monkeypatch.setattr(invocations, "_downloaded", {})


def request_for(path):
    return SimpleNamespace(
        lora_request=SimpleNamespace(lora_name="adapter", lora_path=path), prompt_token_ids=[1]
    )


def keys(request):
    """Return the extra keys of a request's next block."""
    return invocations._keys(lambda *_: (("adapter",), 0), request, 0, 16)


def test_the_keys_of_a_requests_blocks_read_its_adapter_once(tmp_path, monkeypatch):
    hub, request = Hub(tmp_path, monkeypatch), request_for(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert [keys(request) for _ in range(3)] == [(("adapter",), 0)] * 3
    assert hub.asked == [str(tmp_path)]


def test_a_hub_is_asked_once_for_an_adapter_that_it_has(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "snapshot", monkeypatch)
    assert keys(request_for("someone/adapter")) == (("adapter",), 0), "it cannot be had yet"
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "adapter_config.json").write_text("{}")
    for _ in range(3):
        keys(request_for("someone/adapter"))
    assert hub.asked == ["someone/adapter"] * 2
    config = '{"alora_invocation_tokens": [7, 8]}'
    (tmp_path / "snapshot" / "adapter_config.json").write_text(config)
    assert invocations.invocation_at("someone/adapter") == (7, 8), "its file is read anew"


def test_a_blend_whose_part_is_loaded_from_elsewhere_gets_other_keys(monkeypatch):
    monkeypatch.setattr(invocations, "_paths", {"part": "/one"})
    request = request_for("blend:part*0.5")
    before = keys(request)
    assert before == (("adapter", ("blend_of", "/one")), 0) == keys(request)
    invocations._paths["part"] = "/two"
    assert keys(request) == (("adapter", ("blend_of", "/two")), 0)
