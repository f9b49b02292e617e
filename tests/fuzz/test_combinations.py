"""Some cases of the combinations in every run; `python -m tests.fuzz.combinations` runs more."""

import pytest

pytest.importorskip("peft", reason="the adapters are PEFT's")

from fuzz.combinations import cases, configs, refusals, runs

from lora_backends.adapters.peft import module_rules

WORLDS, CASES = (3, 8), 8


@pytest.fixture(autouse=True)
def few_adapters(monkeypatch):
    """Let worlds run on torch alone, and share few adapters: PEFT takes longest to make them."""
    monkeypatch.setattr(cases, "ADAPTERS", 4)
    monkeypatch.setattr(runs, "BACKENDS", ("torch_ref",))


def faults(worlds=WORLDS, count=CASES):
    with runs.opened(0) as run:
        ran = [run(world * runs.CASES + case) for world in worlds for case in range(count)]
    return [one.fault for one in ran if one.fault], [one.outcome for one in ran]


def test_rows_of_random_adapters_are_those_of_peft_or_refused_by_the_name_of_a_feature():
    wrong, outcomes = faults()
    assert not wrong
    assert sum(outcome.endswith(": equal") for outcome in outcomes) > len(outcomes) / 4


def test_a_wrong_scaling_is_found(monkeypatch):
    """Of rsLoRA alone."""
    monkeypatch.setattr(module_rules, "math", type("math", (), {"sqrt": lambda x: x}))
    assert any("off by" in fault for fault in faults()[0])


def test_an_adapter_of_another_row_is_found(monkeypatch):
    call = runs.MultiLoRAModel.__call__

    def shifted(self, *args, adapters=None, **inputs):
        rotated = adapters[1:] + adapters[:1] if isinstance(adapters, list) else adapters
        return call(self, *args, adapters=rotated, **inputs)

    monkeypatch.setattr(runs.MultiLoRAModel, "__call__", shifted)
    assert any("off by" in fault for fault in faults(WORLDS[:1])[0])


def test_a_refusal_that_changes_the_model_is_found(monkeypatch):
    load = runs.MultiLoRAModel.load_adapter

    def loads(self, *args, **words):
        try:
            return load(self, *args, **words)
        except runs.LoRABackendError:
            next(self.base.parameters()).data.add_(1)
            raise

    monkeypatch.setattr(runs.MultiLoRAModel, "load_adapter", loads)
    monkeypatch.setattr(configs, "FEATURES", ((1.0, lambda *_: {"layer_replication": [(0, 2)]}),))
    assert any("base weights changed" in fault for fault in faults(WORLDS[:1])[0])


def test_a_refusal_counts_as_right_only_if_an_adapter_has_what_it_names():
    message = (
        "cannot read the PEFT checkpoint: the adapter uses features that this library cannot "
        "reproduce exactly\n  given: use_qalora = true: the input is pooled into groups"
    )
    assert refusals.feature_of(message, [{"use_qalora": True}]) == "use_qalora"
    assert refusals.feature_of(message, [{"use_rslora": True}]) is None
    assert refusals.feature_of("no reason", [{"use_qalora": True}]) is None
