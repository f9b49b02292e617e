"""`adapter_config.json`: what is refused, and who has which rank, scaling and LoRA at all."""

import json
import math
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.adapters import LoadLimits
from lora_backends.adapters.peft import config as config_files
from lora_backends.adapters.peft import expressions as child
from lora_backends.adapters.peft.config import PeftLoraConfig
from lora_backends.adapters.peft.module_rules import module_rules

LIMITS = LoadLimits()


@pytest.fixture
def read(tmp_path):
    def write_and_read(**values):
        path = tmp_path / "adapter_config.json"
        path.write_text(
            json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **values})
        )
        return read_config(path)

    return write_and_read


def read_config(path):
    """Read a file, and match its patterns with the path of one module."""
    config = config_files.read_config(path, LIMITS)
    module_rules(config, ["model.layers.0.self_attn.q_proj"], path, LIMITS)
    return config


def rule(config, module):
    return module_rules(config, [module], Path("adapter_config.json"), LIMITS)[module]


def module_rank(config, module):
    return rule(config, module).rank


def module_scaling(config, module):
    return rule(config, module).scaling


def targets_module(config, module):
    return rule(config, module).targeted


def make(**values):
    return PeftLoraConfig.model_validate(
        {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **values}
    )


# What is accepted


def test_file_with_every_default_of_peft_is_accepted(tmp_path):
    LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]).save_pretrained(tmp_path)
    config = read_config(tmp_path / "adapter_config.json")
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 6, ["q_proj"])


def test_missing_r_and_alpha_take_the_defaults_of_peft(tmp_path):
    path = tmp_path / "adapter_config.json"
    path.write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    config, default = read_config(path), LoraConfig()
    assert (config.r, config.lora_alpha) == (default.r, default.lora_alpha)


@pytest.mark.parametrize(
    "values",
    [
        {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "revision": "main"},
        {"inference_mode": True, "peft_version": "0.9", "base_model_name_or_path": "x/y"},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM"}, "runtime_config": {"a": 1}},
        {"eva_config": {"rho": 2.0}, "corda_config": {"verbose": True}, "loftq_config": {"b": 4}},
        {"megatron_core": "megatron.core", "qalora_group_size": 16},
        {"velora_config": {"num_groups": 4}},
        {"monteclora_config": {"num_samples": 2}},
        {"lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-6, "lora_dtype": "float32"},  # ms-swift
    ],
    ids=lambda values: next(iter(values)),
)
def test_fields_without_effect_at_inference_are_accepted(read, values):
    read(**values)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica", "Gaussian"])
def test_initialisations_that_leave_the_base_alone_are_accepted(read, init):
    assert read(init_lora_weights=init).init_lora_weights == init


SWITCHES = ["use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying"]


@pytest.mark.parametrize("key", [*SWITCHES, "init_lora_weights"])
def test_a_switch_that_is_null_is_off(read, key):
    """Axolotl writes `fan_in_fan_out = null`, and PEFT loads it."""
    assert getattr(read(**{key: None}), key) is False


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_unknown_key_with_an_empty_value_is_accepted(read, value):
    read(some_future_field=value)


@pytest.mark.parametrize("targets", [["q_proj"], ".*q_proj", "all-linear"])
def test_ensure_weight_tying_without_an_embedding_is_accepted(read, targets):
    read(ensure_weight_tying=True, target_modules=targets)


# What is refused by name

REFUSED = {
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "trainable_token_indices": [1, 2],
    "layer_replication": [[0, 2], [1, 3]],
    "alora_invocation_tokens": [5, 6],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 0.1},
    "megatron_config": {"tensor_model_parallel_size": 2},
    "init_lora_weights": "pissa",
    "some_future_field": 0,
}


@pytest.mark.parametrize("key", REFUSED)
def test_feature_is_refused_by_its_name_and_value(read, key):
    with pytest.raises(UnsupportedInputError) as caught:
        read(**{key: REFUSED[key]})
    assert f"{key} = {json.dumps(REFUSED[key])}" in str(caught.value)
    assert "adapter_config.json" in str(caught.value)
    assert "to do: merge the adapter" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_bias", True),
        ("init_lora_weights", "mica"),
        ("velora_config", {}),
        ("monteclora_config", {"use_entropy": False}),
        ("target_parameters", ["mlp.gate.weight"]),
    ],
)
def test_what_peft_does_not_combine_with_dora_is_refused(read, key, value):
    assert read(use_dora=True).use_dora
    with pytest.raises(InvalidInputError, match=f"does not combine DoRA with {key}"):
        read(use_dora=True, **{key: value})


def test_bias_lora_only_is_refused(read):
    with pytest.raises(UnsupportedInputError, match='bias = "lora_only"'):
        read(bias="lora_only")


@pytest.mark.parametrize("key", ["arrow_config", "kasa_config", "use_bdlora"])
def test_empty_object_that_switches_a_feature_on_is_refused(read, key):
    with pytest.raises(UnsupportedInputError, match=key):
        read(**{key: {}})


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_16", "olora", "corda", "corda_ipm", "loftq", "no_such_init"]
)
def test_initialisation_that_changes_the_base_is_refused(read, init):
    with pytest.raises(UnsupportedInputError, match=f'init_lora_weights = "{init}"'):
        read(init_lora_weights=init)


@pytest.mark.parametrize("init", ["lora_ga", "LoRA_GA"])
def test_lora_ga_is_refused_as_its_file_lacks_its_start(read, init):
    with pytest.raises(UnsupportedInputError, match=f'"{init}": training took its start off'):
        read(init_lora_weights=init, lora_ga_config={"direction": "ArB2r"})


def test_a_converted_adapter_of_lora_ga_is_accepted(read):
    assert read(init_lora_weights=True, lora_ga_config={"direction": "ArB2r"}).init_lora_weights


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_invocation_beside_a_start_taken_off_the_base_is_refused(init, tmp_path):
    """PEFT takes the start off for every token, and adds the LoRA from the invocation on."""
    values = {"peft_type": "LORA", "target_modules": ["q_proj"], "init_lora_weights": init}
    path = tmp_path / "adapter_config.json"
    config_files.checked_config(values, path, own_modules=True)
    with pytest.raises(UnsupportedInputError, match="alora_invocation_tokens(.|\n)*" + init):
        config_files.checked_config(
            {**values, "alora_invocation_tokens": [9]}, path, own_modules=True
        )


@pytest.mark.parametrize("targets", [["q_proj", "model.embed_tokens"], ["lm_head"], ".*lm_head"])
def test_ensure_weight_tying_of_embedding_or_head_is_refused(read, targets):
    with pytest.raises(UnsupportedInputError, match="ensure_weight_tying = true"):
        read(ensure_weight_tying=True, target_modules=targets)


@pytest.mark.parametrize("peft_type", ["ADALORA", "IA3", "LOHA", "VERA", "lora", None, 3])
def test_other_method_is_refused(read, peft_type):
    with pytest.raises(
        UnsupportedInputError, match=f"peft_type {re.escape(json.dumps(peft_type))}"
    ):
        read(peft_type=peft_type)


def test_every_refused_feature_is_listed(read):
    with pytest.raises(UnsupportedInputError) as caught:
        read(**REFUSED)
    assert all(f"{key} = " in str(caught.value) for key in REFUSED)


# What is wrong

WRONG = [
    ("r", "8"),
    ("r", 8.0),
    ("r", True),
    ("r", 0),
    ("r", -1),
    ("r", None),
    ("r", 10**400),
    ("lora_alpha", "16"),
    ("lora_alpha", math.nan),
    ("lora_alpha", math.inf),
    ("lora_alpha", 10**400),
    ("lora_alpha", None),
    ("use_rslora", 1),
    ("use_rslora", "yes"),
    ("rank_pattern", ["q_proj"]),
    ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", {"q_proj": "8"}),
    ("rank_pattern", {"(": 8}),
    ("alpha_pattern", {"q_proj": None}),
    ("alpha_pattern", {"q_proj": math.nan}),
    ("alpha_pattern", {"(?i)q_proj": 2}),
    ("target_modules", None),
    ("target_modules", 5),
    ("target_modules", ["q_proj", 5]),
    ("target_modules", {"q_proj": 1}),
    ("target_modules", "(q_proj"),
    ("exclude_modules", "*"),
    ("exclude_modules", 1),
    ("layers_to_transform", "1"),
    ("layers_to_transform", [1.5]),
    ("layers_pattern", 3),
    ("layers_pattern", "layers"),
    ("lora_bias", "true"),
    ("fan_in_fan_out", 0),
    ("bias", "some"),
    ("init_lora_weights", 3),
    ("ensure_weight_tying", 1),
    ("task_type", 3),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=lambda item: str(item)[:20])
def test_wrong_value_names_key_file_and_what_is_allowed(read, key, value):
    with pytest.raises(InvalidInputError) as caught:
        read(**{key: value})
    message = str(caught.value)
    assert key in message
    assert "adapter_config.json" in message
    assert "given:" in message
    assert "allowed:" in message


def test_several_wrong_values_are_reported_together(read):
    with pytest.raises(InvalidInputError, match="wrong value of r, use_rslora"):
        read(r="8", use_rslora="no")


@pytest.mark.parametrize("key", ["layers_to_transform", "layers_pattern"])
def test_choice_of_layers_beside_a_regular_expression_is_an_error(read, key):
    with pytest.raises(InvalidInputError, match=key):
        read(target_modules=".*q_proj", **{key: [0] if key == "layers_to_transform" else "layers"})


def test_broken_layers_pattern_is_an_error(read):
    with pytest.raises(InvalidInputError, match="layers_pattern holds a broken regular"):
        read(layers_to_transform=[0], layers_pattern=["layers", "h("])


def test_missing_peft_type_is_an_error(tmp_path):
    path = tmp_path / "adapter_config.json"
    path.write_text('{"r": 4}')
    with pytest.raises(InvalidInputError, match="no peft_type"):
        read_config(path)


@pytest.mark.parametrize("text", [b"", b"{", b"{'r': 8}", b"\xff\xfe", b"[" * 100_000])
def test_broken_json_is_an_error(tmp_path, text):
    path = tmp_path / "adapter_config.json"
    path.write_bytes(text)
    with pytest.raises(InvalidInputError, match="is not readable JSON"):
        read_config(path)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"LORA"'])
def test_json_that_is_no_object_is_an_error(tmp_path, text):
    path = tmp_path / "adapter_config.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match="holds no JSON object"):
        read_config(path)


# Patterns that take long

HANGS = r"(([a-z0-9._])+)+!"
PATTERNS = {
    "rank_pattern": {HANGS: 4},
    "alpha_pattern": {HANGS: 4},
    "target_modules": HANGS,
    "exclude_modules": HANGS,
    "layers_pattern": [HANGS],
}


@pytest.mark.parametrize("key", PATTERNS)
def test_a_pattern_that_takes_too_long_is_refused_by_its_limit(key):
    config = make(**{key: PATTERNS[key]}, layers_to_transform=[1])
    module, limits = "model.layers.0.self_attn.q_proj", LoadLimits(matching_seconds=0.5)
    start = time.monotonic()
    with pytest.raises(InvalidInputError) as caught:
        module_rules(config, [module], Path("adapter_config.json"), limits)
    assert time.monotonic() - start < 30  # it would take longer than the universe exists
    message = str(caught.value)
    assert "matching_seconds of at most 0.5" in message and f"{key} = " in message
    assert "LoadLimits(matching_seconds=5.0)" in message and "under [limits]" in message


@pytest.mark.parametrize("end", ["raise MemoryError", "raise SystemExit", "print('[')"])
def test_patterns_whose_process_ends_early_are_refused(end, monkeypatch):
    monkeypatch.setattr(child, "_PROGRAM", end)
    with pytest.raises(InvalidInputError, match="expressions could not be matched") as caught:
        rule(make(rank_pattern={"q.*": 2}), "q_proj")
    assert end.startswith("raise Mem") == ("MemoryError" in str(caught.value))


def test_names_without_metacharacters_start_no_process(monkeypatch):
    monkeypatch.setattr(child.subprocess, "run", None)
    patterns = {"layers.0.q_proj": 2, "v-proj ~x": 3}
    config = make(rank_pattern=patterns, exclude_modules=["x"], layers_to_transform=[0])
    assert module_rank(config, "model.layers.0.q_proj") == 2
    assert module_rank(config, "model.layers.0.v-proj ~x") == 3
    assert module_rank(config, "model.layers.0.k_proj") == 4


def test_many_names_take_no_longer_than_the_limit():
    config = make(rank_pattern={f"layers.{i}.q_proj": 2 for i in range(3000)})
    modules, limits = [f"layers.{i}.q_proj" for i in range(3000)], LoadLimits(matching_seconds=0.01)
    with pytest.raises(InvalidInputError, match="limit matching_seconds"):
        module_rules(config, modules, Path("adapter_config.json"), limits)


@pytest.mark.parametrize("executable", [None, "", "/no/such/python"])
def test_without_a_process_of_its_own_a_pattern_is_refused(executable, monkeypatch):
    monkeypatch.setattr(child.sys, "executable", executable)
    with pytest.raises(InvalidInputError, match="write the names of modules"):
        rule(make(rank_pattern={"q.*": 2}), "q_proj")


# As trainers write them: PEFT's own examples, and those of models that see
REAL_PATTERNS = [
    r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*",
    r"^(language_model|model)(?!.*(lm_head|output|emb|wte|shared)).*",
    r"^(model\.language_model(?=\.).*\.(q_proj|k_proj|v_proj|o_proj))$",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|ffn).*?(?:k_proj|v_proj|q_proj|"
    r"out_proj|fc1|fc2|o_proj|gate_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\."
    r"(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|k_proj|v_proj|o_proj)))",
    r"model\.layers\.(1[0-9]|2[0-7])\.self_attn\.(q|v)_proj",
    r"^layers.0.self_attn.q_proj",
    r"q_proj|v_proj",
]
REAL_MODULES = [
    f"{root}.layers.{layer}.{part}"
    for root in ("model", "model.language_model", "language_model.model", "model.visual")
    for layer in (0, 2, 17)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.fc1")
] + ["layers.0.self_attn.q_proj", "decoder.block.0.layer.1.EncDecAttention.q", "lm_head"]


def test_patterns_of_real_adapters_agree_with_re():
    found = set()
    for pattern in REAL_PATTERNS:
        config = make(target_modules=pattern, rank_pattern={pattern: 9})
        rules = module_rules(config, REAL_MODULES, Path("adapter_config.json"), LIMITS)
        for module in REAL_MODULES:
            targeted = re.fullmatch(pattern, module) is not None
            ranked = re.match(rf"(.*\.)?({pattern})$", module) is not None
            assert rules[module].targeted == targeted
            assert rules[module].rank == (9 if ranked else 4)
            found.add((targeted, ranked))
    assert len(found) == 3  # what is targeted is ranked


# Rank and scaling


def test_pattern_takes_whole_trailing_components():
    config = make(rank_pattern={"q_proj": 2, "layers.1.self_attn.k_proj": 3})
    assert module_rank(config, "model.layers.0.self_attn.q_proj") == 2
    assert module_rank(config, "model.layers.0.self_attn.xq_proj") == 4
    assert module_rank(config, "model.layers.1.self_attn.k_proj") == 3
    assert module_rank(config, "model.layers.11.self_attn.k_proj") == 4


def test_caret_binds_a_pattern_to_the_start_of_the_path():
    config = make(rank_pattern={"^layers.0.q_proj": 2})
    assert module_rank(config, "layers.0.q_proj") == 2
    assert module_rank(config, "model.layers.0.q_proj") == 4


def test_first_pattern_that_matches_wins():
    config = make(rank_pattern={".*q_proj": 2, "layers.0.q_proj": 3})
    assert module_rank(config, "layers.0.q_proj") == 2


def test_scaling_divides_by_the_rank_of_the_module():
    config = make(lora_alpha=8, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 2})
    assert module_scaling(config, "q_proj") == 4
    assert module_scaling(config, "v_proj") == 0.5
    assert module_scaling(config, "k_proj") == 2


def test_rslora_divides_by_the_square_root_of_the_rank_of_the_module():
    config = make(lora_alpha=8, use_rslora=True, rank_pattern={"q_proj": 16})
    assert module_scaling(config, "q_proj") == 2
    assert module_scaling(config, "v_proj") == 4


def test_a_child_whose_parent_was_killed_ends_by_itself():
    request = json.dumps([[["whole", "(a+)+!"]], ["a" * 60]])
    arguments = [sys.executable, "-I", "-S", "-c", child._program(0.1)]
    ended = subprocess.run(arguments, input=request.encode(), capture_output=True, timeout=60)
    assert ended.returncode < 0  # by the limit of its CPU time


components = st.sampled_from(["model", "layers", "h", "0", "1", "12", "q_proj", "experts", "q(1)"])
paths = st.lists(components, min_size=1, max_size=6).map(".".join)
pieces = st.sampled_from([*"^$.*?|+()", r"\d+", "[01]", "(q|v)_proj", "layers", "0", "q_proj", "."])
expressions = st.lists(pieces, min_size=1, max_size=5).map("".join) | paths


def compiles(expression):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(rf"(.*\.)?({expression})$")
            re.compile(expression)
    except re.error:
        return False
    return True


valid = expressions.filter(compiles)


@st.composite
def path_and_names(draw):
    """Draw a path, and some of its ends among other names."""
    path = draw(paths)
    parts = path.split(".")
    ends = st.integers(0, len(parts) - 1).map(lambda start: ".".join(parts[start:]))
    return path, draw(st.lists(ends | paths, max_size=3))


@settings(deadline=None, max_examples=40)  # most examples start a process
@given(path_and_names(), st.dictionaries(valid, st.integers(1, 9), max_size=3))
def test_patterns_agree_with_peft(path_names, patterns):
    path, names = path_names
    patterns = {name: 10 + i for i, name in enumerate(filter(compiles, names))} | patterns
    expected = patterns.get(get_pattern_key(patterns.keys(), path), 4)
    found = rule(make(lora_alpha=4, rank_pattern=patterns, alpha_pattern=patterns), path)
    assert (found.rank, found.scaling) == (expected, 1)


def test_alternatives_of_a_pattern_are_one_expression():
    config = make(rank_pattern={"q_proj|v_proj": 2})
    assert module_rank(config, "model.v_proj") == 2
    assert module_rank(config, "q_proj_norm") == 4


def test_path_that_is_a_key_counts_even_where_it_does_not_match_itself():
    assert module_rank(make(rank_pattern={"q(1)": 2}), "q(1)") == 2


@pytest.mark.parametrize("version", [None, "0.13.2", "0.14.0", "", "no version"])
def test_patterns_that_older_peft_read_in_another_way_are_refused_without_a_version(version):
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.q_proj": 32}}
    config = make(**patterns, peft_version=version)
    with pytest.raises(
        UnsupportedInputError, match=r"layers\.0\.q_proj': scaling 4 up to 0\.14, 16"
    ):
        rule(config, "layers.0.q_proj")
    assert rule(config, "layers.1.q_proj").scaling == 4  # both readings agree
    for newer in ("0.15.0", "0.17.2.dev0", "1.0"):
        assert rule(make(**patterns, peft_version=newer), "layers.0.q_proj").scaling == 16


@pytest.mark.parametrize("alphas", [{"q_proj": 6}, {"q_proj": 6, "v_proj": 3}, {}])
def test_patterns_with_one_meaning_need_no_version(alphas):
    config = make(rank_pattern={"q_proj": 2}, alpha_pattern=alphas)
    assert rule(config, "layers.0.q_proj").scaling == alphas.get("q_proj", 8) / 2


# Which modules are targeted


def agrees_with_peft(config, module):
    names = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    fields = {name: getattr(config, name) for name in names}
    theirs = SimpleNamespace(**fields, modules_to_save=None, target_parameters=None)
    return targets_module(config, module) == bool(check_target_module_exists(theirs, module))


@settings(deadline=None, max_examples=40)  # most examples start a process
@given(path_and_names(), st.none() | valid, st.none() | valid | st.lists(paths, max_size=2))
def test_targets_and_exclusions_agree_with_peft(path_names, expression, excluded):
    path, names = path_names
    targets = names if expression is None else expression
    assert agrees_with_peft(make(target_modules=targets, exclude_modules=excluded), path)


layer_choices = st.none() | st.integers(0, 12) | st.lists(st.sampled_from([0, 1, 12]), max_size=2)
layer_names = st.sampled_from(["", "layers", "h", "(layers|h)", "experts", r"model\.layers"])


@settings(deadline=None, max_examples=40)  # most examples start a process
@given(path_and_names(), layer_choices, st.none() | layer_names | st.lists(layer_names, max_size=2))
def test_choice_of_layers_agrees_with_peft(path_names, chosen, pattern):
    path, targets = path_names
    config = make(target_modules=targets, layers_to_transform=chosen, layers_pattern=pattern)
    assert agrees_with_peft(config, path)


def test_empty_choice_of_layers_chooses_all():
    assert targets_module(make(layers_to_transform=[]), "model.layers.1.q_proj")


def test_full_path_is_targeted_whatever_the_choice_of_layers():
    path = "model.layers.2.self_attn.q_proj"
    assert targets_module(make(target_modules=[path], layers_to_transform=[0]), path)


def test_first_numbered_component_is_the_layer():
    config = make(layers_to_transform=[1])
    assert targets_module(config, "model.layers.1.experts.0.q_proj")
    assert not targets_module(config, "model.layers.0.experts.1.q_proj")
    config = make(layers_to_transform=[1], layers_pattern="layers")
    assert targets_module(config, "model.layers.1.layers.0.q_proj")


def test_path_that_begins_with_the_list_of_layers_matches_no_layer_without_a_pattern():
    assert not targets_module(make(layers_to_transform=[1]), "h.1.q_proj")
    assert targets_module(make(layers_to_transform=[1], layers_pattern="h"), "h.1.q_proj")


@pytest.mark.parametrize("spelling", ["all-linear", "ALL-LINEAR"])
def test_all_linear_leaves_out_heads_and_exclusions(spelling):
    config = make(target_modules=spelling, exclude_modules=["up_proj"], task_type="SEQ_CLS")
    assert targets_module(config, "model.layers.0.mlp.down_proj")
    for module in ("model.layers.0.mlp.up_proj", "lm_head", "embed_out", "score", "classifier"):
        assert not targets_module(config, module)
