"""Mixtures of experts: every row is PEFT's with that row's adapter alone, in float32."""

import copy
import functools
import inspect
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from helpers.sweeps.mixtures import ATTENTION, KNOWN, UP, build, in_peft, updates, write_folder
from torch import nn

from lora_backends import (
    InvalidInputError,
    UnsupportedInputError,
    backend_names,
    unavailable_reasons,
)
from lora_backends.adapters import read_checkpoint
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.hooks.expert_products import FORWARDS

BOUND = 2e-5
"""Most that a logit may differ. Another row's adapter changes 0.1 and more."""

BACKENDS = [name for name in backend_names() if not unavailable_reasons(name, "cpu")]
NEW_TOKENS = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
ROWS = ["all", None, "down", "router", "all"]


def configs(name):
    """Return adapters of every kind: both sites, one, and a router with the other."""
    attention = [ATTENTION.get(name, "q_proj")]
    up = f"experts.{UP.get(name, 'gate_up_proj')}"
    router = "router" if name in ("gpt_oss", "phimoe") else "gate"
    return {
        "all": {
            "r": 2,
            "target_modules": attention,
            "target_parameters": [up, "experts.down_proj"],
        },
        "down": {"r": 3, "target_modules": [], "target_parameters": ["experts.down_proj"]},
        "router": {
            "r": 4,
            "lora_alpha": 6,
            "use_rslora": True,
            "target_modules": attention,
            "target_parameters": [f"{router}.weight", up],
        },
    }


class Mixture:
    """A wrapped model, its adapters loaded, and PEFT's model of every adapter alone."""

    def __init__(self, name, folder, backend="torch_ref", **options):
        self.folders = {adapter: folder / adapter for adapter in configs(name)}
        self.alone = {None: build(name)}
        for seed, (adapter, config) in enumerate(configs(name).items()):
            self.alone[adapter] = in_peft(build(name), self.folders[adapter], seed, **config)
        self.model = MultiLoRAModel(build(name), backend, max_adapters=4, max_rank=4, **options)
        for adapter, path in self.folders.items():
            self.model.load_adapter(adapter, path)
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, 60, (len(ROWS), 6), generator=generator)

    @torch.no_grad()
    def expected(self, rows):
        own = [self.alone[adapter](input_ids=self.ids).logits for adapter in rows]
        return torch.stack([logits[row] for row, logits in enumerate(own)])

    def logits(self, rows):
        return self.model(adapters=rows, input_ids=self.ids).logits

    def check(self, rows=ROWS):
        torch.testing.assert_close(self.logits(rows), self.expected(rows), rtol=0, atol=BOUND)


@pytest.fixture
def mixture(tmp_path):
    """A Qwen3-MoE with three adapters."""
    return Mixture("qwen3_moe", tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_of_a_mixed_batch_is_pefts(backend, tmp_path):
    mixture = Mixture("qwen3_moe", tmp_path, backend)
    mixture.check()
    plain = mixture.expected([None] * len(ROWS))
    for adapter in ("all", "down", "router"):
        difference = mixture.expected([adapter] * len(ROWS)) - plain
        assert difference.abs().amax((1, 2)).min() > 0.05, "the adapter does nothing"
    tokens = mixture.model.generate(adapters=ROWS, input_ids=mixture.ids, **NEW_TOKENS)
    for row, adapter in enumerate(ROWS):
        expected = mixture.alone[adapter].generate(input_ids=mixture.ids, **NEW_TOKENS)
        assert torch.equal(tokens[row], expected[row])


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "qwen3_moe"])
def test_every_row_is_pefts_in_other_architectures(name, tmp_path):
    Mixture(name, tmp_path).check()


@pytest.mark.parametrize("implementation", FORWARDS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_the_models_own_implementation_of_experts_stays(name, implementation, tmp_path):
    if name not in KNOWN:
        pytest.skip(f"this Transformers has no {name}")
    mixture = Mixture(name, tmp_path)
    mixture.model.base.set_experts_implementation(implementation)
    for base in mixture.alone.values():
        base.set_experts_implementation(implementation)
    mixture.check()
    assert mixture.model.base.config._experts_implementation == implementation
    alone = mixture.logits([None] * len(ROWS))
    assert torch.equal(alone, mixture.expected([None] * len(ROWS)))


def test_an_implementation_that_lets_nothing_in_is_refused_by_name(mixture):
    mixture.model.base.config._experts_implementation = "sonicmoe"
    with pytest.raises(UnsupportedInputError, match="'sonicmoe'.*lets no LoRA in") as caught:
        mixture.logits(ROWS)
    assert "model.layers.0.mlp.experts" in str(caught.value)


def test_one_adapter_for_all_rows(mixture):
    for adapter in ("all", "down", "router"):
        mixture.check([adapter] * len(ROWS))


def test_adapters_that_start_within_a_row(mixture):
    late = [None] * 3 + ["all"] * 3
    logits = mixture.model(adapters=[late, *ROWS[1:]], input_ids=mixture.ids).logits
    expected = mixture.expected(ROWS)
    torch.testing.assert_close(logits[1:], expected[1:], rtol=0, atol=BOUND)
    plain = mixture.expected([None] * len(ROWS))
    torch.testing.assert_close(logits[0, :3], plain[0, :3], rtol=0, atol=BOUND)
    assert (logits[0, 3:] - plain[0, 3:]).abs().max() > 0.05


def test_prepared_adapters_follow_an_update(mixture):
    with mixture.model.prepare(ROWS[::-1], tokens=6) as step:
        for rows in (ROWS[::-1], ROWS, [None, "down", None, "all", None]):
            step.update(rows)
            logits = mixture.model(adapters=step, input_ids=mixture.ids).logits
            torch.testing.assert_close(logits, mixture.expected(rows), rtol=0, atol=BOUND)


WIDTH = 8
"""Of an expert."""

SIZES = (("gate_proj", 16, WIDTH), ("up_proj", 16, WIDTH), ("down_proj", WIDTH, 16))


def per_expert(folder):
    """Write an adapter with a module per expert, which has another form in memory."""
    tensors, generator = {}, torch.Generator().manual_seed(9)
    for layer in range(2):
        for e in range(4):
            for name, wide, high in (
                ("gate_proj", 16, 8),
                ("up_proj", 16, 8),
                ("down_proj", 8, 16),
            ):
                path = f"model.layers.{layer}.mlp.experts.{e}.{name}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(2, wide, generator=generator)
                tensors[f"{path}.lora_B.weight"] = torch.randn(high, 2, generator=generator)
    names = ["gate_proj", "up_proj", "down_proj"]
    return write_folder(folder, tensors, target_modules=names, lora_alpha=1)


def shared_outer(folder):
    """Write an adapter whose experts share A of gate and of up, and B of down."""
    generator = torch.Generator().manual_seed(8)
    sizes = {"w1": (1, 16, 4, WIDTH), "w3": (1, 16, 4, WIDTH), "w2": (4, WIDTH, 1, 16)}
    tensors = {}
    for layer in range(2):
        for name, (of_a, wide, of_b, high) in sizes.items():
            path = f"model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(of_a, 2, wide, generator=generator)
            tensors[f"{path}.lora_B.weight"] = torch.randn(of_b, high, 2, generator=generator)
    return write_folder(folder, tensors, lora_alpha=1)


def merged(base, deltas):
    """Return a model with the updates of experts in its weights."""
    experts = {path: m for path, m in base.named_modules() if path.endswith(".experts")}
    for path, delta in deltas.items():
        module, _, name = path.rpartition(".")
        interleaved = "gate" in name and not experts[module].is_concatenated
        update = updates(delta, interleaved).float()
        weight = getattr(experts[module], name)
        weight.data += update.transpose(1, 2) if experts[module].is_transposed else update
    return base


@pytest.mark.parametrize("write", [per_expert, shared_outer])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_layouts_that_peft_does_not_save_are_updates_of_the_weights(name, write, tmp_path):
    sizes = {"intermediate_size": WIDTH, "moe_intermediate_size": WIDTH}
    model = MultiLoRAModel(build(name, **sizes), "torch_ref", max_rank=2)
    model.load_adapter("a", write(tmp_path / "a"))
    specs = {path: site.spec for path, site in model._wrapped.sites.items()}
    deltas = read_checkpoint(tmp_path / "a", specs, experts=model.pool.experts).experts
    assert deltas["model.layers.0.mlp.experts.gate_up_proj"].ranks.shape == (4, 2)
    ids = torch.randint(1, 60, (3, 5), generator=torch.Generator().manual_seed(2))
    logits = model(adapters=["a", None, "a"], input_ids=ids).logits
    plain = build(name, **sizes)
    with torch.no_grad():
        alone = plain(input_ids=ids).logits
        expected = merged(plain, deltas)(input_ids=ids).logits
    assert (expected - alone).abs().max() > 0.05
    expected[1] = alone[1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=BOUND)


def test_adapters_of_two_forms_share_a_batch(mixture, tmp_path):
    import peft

    folder = per_expert(tmp_path / "numbered")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = peft.PeftModel.from_pretrained(build("qwen3_moe"), folder).eval()
    mixture.alone["numbered"] = alone
    mixture.model.load_adapter("numbered", folder)
    mixture.check(["numbered", "all", None, "router", "numbered"])


def test_prepared_adapters_refuse_a_form_that_a_captured_graph_leaves_out(mixture, tmp_path):
    with mixture.model.prepare(ROWS, tokens=6) as step:
        mixture.model.load_adapter("numbered", per_expert(tmp_path / "numbered"))
        step.update(ROWS[::-1])
        with pytest.raises(InvalidInputError, match="'numbered' touches modules that were not"):
            step.update(["numbered", *ROWS[1:]])


def test_a_thread_without_a_block_of_its_own_is_refused(mixture):
    caught = []
    (experts, *_) = [m for p, m in mixture.model.base.named_modules() if p.endswith("experts")]

    def run():
        try:
            experts(torch.ones(1, 16), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
        except InvalidInputError as error:
            caught.append(str(error))

    with mixture.model.prepare(ROWS, tokens=6) as step, mixture.model.using(step):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert "runs the base model without adapters" in caught[0]


def test_calls_of_the_base_model_have_no_experts_adapters(mixture):
    with torch.no_grad():
        logits = mixture.model.base(input_ids=mixture.ids).logits
    assert torch.equal(logits, mixture.expected([None] * len(ROWS)))


def test_detach_leaves_the_base_model_as_it_was(tmp_path):
    mixture = Mixture("qwen3_moe", tmp_path, fuse=True)
    before = build("qwen3_moe")
    base = mixture.model.detach()
    for (path, module), (_, other) in zip(
        base.named_modules(), before.named_modules(), strict=True
    ):
        assert "forward" not in vars(module), path
        assert vars(module).keys() == vars(other).keys(), path
    for parameter, other in zip(base.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_copy_computes_with_its_own_experts(mixture):
    other = copy.deepcopy(mixture.model.base)
    for module in other.modules():
        if "down_proj" in module._parameters:
            module.down_proj.data.zero_()
    with torch.no_grad():
        assert not torch.equal(
            other(input_ids=mixture.ids).logits, mixture.model.base(input_ids=mixture.ids).logits
        )
    mixture.check()


def test_training_mode_is_refused(mixture):
    mixture.model.base.model.layers[0].mlp.experts.train()
    with pytest.raises(InvalidInputError, match="training mode"):
        mixture.logits(ROWS)


def test_16_bit_rows_are_near_pefts(tmp_path):
    mixture = Mixture("deepseek_v3", tmp_path)
    base = build("deepseek_v3").bfloat16()
    model = MultiLoRAModel(base, "torch_ref", max_rank=4)
    model.load_adapter("all", mixture.folders["all"])
    model.load_adapter("router", mixture.folders["router"])
    logits = model(adapters=["all", "router", None, "all", "all"], input_ids=mixture.ids).logits
    expected = mixture.expected(["all", "router", None, "all", "all"])
    assert (logits.float() - expected).abs().mean() < 0.02  # an adapter left out changes 0.2


# What is refused by name


def refused(base, folder, change=None):
    """Return the message that loading an adapter of experts raises; `change` comes before."""
    if change is not None:
        change(base)
    model = MultiLoRAModel(base, "torch_ref", max_rank=4)
    with pytest.raises(UnsupportedInputError) as caught:
        model.load_adapter("all", folder)
    assert not model.adapters
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    """An adapter of a Qwen3-MoE's experts."""
    in_peft(build("qwen3_moe"), tmp_path, 0, **configs("qwen3_moe")["all"])
    return tmp_path


def first_experts(base):
    return base.model.layers[0].mlp.experts


def replace_forward(base):
    experts = first_experts(base)
    experts.forward = type(experts).forward.__get__(experts)


def spread(base):
    first_experts(base)._is_expert_parallel = True


def add_parameter(base):
    first_experts(base).gate_up_scale = nn.Parameter(torch.ones(4))


def widen(base):
    experts = first_experts(base)
    experts.down_proj.data = experts.down_proj.data.double()


def normalise(base):
    first_experts(base).has_post_expert_norm = True


def pass_by(base):
    block = base.model.layers[0].mlp
    block.forward = lambda x: x


CLOSED = {
    "its forward was replaced": replace_forward,
    "its experts are spread over processes": spread,
    "it has parameters of an unknown meaning: gate_up_scale": add_parameter,
    "its down_proj is a Tensor of torch.float64": widen,
    "it normalises what an expert returns": normalise,
    "no pass of plain text reaches it": pass_by,
}


@pytest.mark.parametrize("reason", CLOSED)
def test_experts_that_let_nothing_in_are_refused_by_the_reason(reason, folder):
    message = refused(build("qwen3_moe"), folder, CLOSED[reason])
    assert f"model.layers.0.mlp.experts.gate_up_proj: {reason}" in message


def test_a_class_that_computes_something_else_is_refused(folder):
    base = build("qwen3_moe")
    experts = first_experts(base)
    own = type(experts).forward.__wrapped__

    def doubled(self, hidden_states, top_k_index, top_k_weights):
        return 2 * own(self, hidden_states, top_k_index, top_k_weights)

    class Doubled(type(experts)):
        @functools.wraps(doubled)
        def forward(self, *args):
            return doubled(self, *args)

    experts.__class__ = Doubled
    assert "its own forward computes something else" in refused(base, folder)


def test_a_class_outside_of_the_interface_is_refused(folder):
    class Plain(nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    base = build("qwen3_moe")
    base.model.layers[0].mlp.experts = Plain(first_experts(base))
    assert "does not go through Transformers' interface" in refused(base, folder)


def test_a_router_that_does_more_than_one_product_is_refused(tmp_path):
    in_peft(build("qwen3_moe"), tmp_path, 0, **configs("qwen3_moe")["router"])
    base = build("qwen3_moe")
    router = base.model.layers[0].mlp.gate
    source = inspect.unwrap(type(router).forward)

    class Normalised(type(router)):
        def forward(self, hidden_states):
            weight = self.weight
            return source(_WithWeight(self, nn.functional.normalize(weight)), hidden_states)

    router.__class__ = Normalised
    message = refused(base, tmp_path)
    assert "model.layers.0.mlp.gate: it is not one product of its input and its weight" in message


class _WithWeight:
    def __init__(self, module, weight):
        self._module, self.weight = module, weight

    def __getattr__(self, name):
        return getattr(self._module, name)


def test_a_call_that_is_not_understood_is_refused(mixture):
    block = mixture.model.base.model.layers[0].mlp
    experts = block.experts
    with mixture.model.prepare(["all"], tokens=1) as step:
        mixture.model(adapters=step, input_ids=mixture.ids[:1, :1])
        with mixture.model.using(step), pytest.raises(UnsupportedInputError, match="not known"):
            experts(torch.ones(1, 1, 16), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


def test_stacks_of_experts_have_room_for_their_own_rank(tmp_path):
    in_peft(build("qwen3_moe"), tmp_path, 0, **configs("qwen3_moe")["all"])  # rank 2
    model = MultiLoRAModel(build("qwen3_moe"), "torch_ref", max_rank=64, max_expert_rank=2)
    model.load_adapter("all", tmp_path)
    (stack,) = model.pool.active_experts["model.layers.0.mlp.experts.down_proj"]
    assert stack.max_rank == 2
    narrow = MultiLoRAModel(build("qwen3_moe"), "torch_ref", max_rank=64, max_expert_rank=1)
    with pytest.raises(InvalidInputError, match="set max_expert_rank to 2 or more"):
        narrow.load_adapter("all", tmp_path)


def test_a_row_may_blend_adapters_of_experts(mixture):
    blend = {"all": 0.5, "down": -1.5, "router": 1}
    weights = build("qwen3_moe").state_dict()
    base = {name: weight.clone() for name, weight in weights.items()}
    for adapter, strength in blend.items():
        own = copy.deepcopy(mixture.alone[adapter]).merge_and_unload().state_dict()
        for name, weight in weights.items():
            weight += strength * (own[name] - base[name])
    merged = build("qwen3_moe")
    merged.load_state_dict(weights)
    with torch.no_grad():
        expected = merged(input_ids=mixture.ids).logits
    rows = [blend, None, "down", blend, "all"]
    logits = mixture.logits(rows)
    for row, entry in enumerate(rows):
        own = expected[row] if entry is blend else mixture.expected([entry] * 5)[row]
        torch.testing.assert_close(logits[row], own, rtol=0, atol=BOUND)


def test_dora_of_a_router_is_refused_by_name(mixture):
    path = "model.layers.0.mlp.gate"
    checkpoint = read_checkpoint(
        mixture.folders["router"],
        mixture.model.pool.modules,
        experts=mixture.model.pool.experts,
    )
    delta = replace(checkpoint.modules[path], magnitude=torch.ones(4))
    dora = replace(checkpoint, modules={path: delta}, experts={})
    with pytest.raises(UnsupportedInputError, match=f"DoRA .use_dora. cannot scale module {path}"):
        mixture.model.add_adapter("dora", dora)
