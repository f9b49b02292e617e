"""LoRA of experts: what PEFT computes from every layout of a checkpoint, or an error by name."""

import json
import warnings

import pytest
import torch
from helpers.sweeps.mixtures import build, in_peft, peft_layers, updates, write_folder

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.adapters import (
    AdapterPool,
    ExpertSpec,
    LoadLimits,
    ModuleSpec,
    read_checkpoint,
)
from lora_backends.hf.hooks.experts import expert_specs, find_experts
from lora_backends.hf.hooks.routers import find_routers
from lora_backends.hf.layout.sites import find_sites

LAYER = "model.layers.0.mlp.experts"
E, H, W, R = 4, 6, 5, 2  # experts, hidden width, width of an expert, rank
GATE_UP, DOWN = f"{LAYER}.gate_up_proj", f"{LAYER}.down_proj"
SPECS = {GATE_UP: ExpertSpec(E, H, (W, W)), DOWN: ExpertSpec(E, W, (H,))}
GPT_OSS = {
    GATE_UP: ExpertSpec(E, H, (W, W), interleaved=True, transposed=True),
    DOWN: ExpertSpec(E, W, (H,), transposed=True),
}
STACKED = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def read(folder, specs=SPECS, **arguments):
    return read_checkpoint(folder, {}, experts=specs, **arguments)


def rejected(error, folder, specs=SPECS, **arguments):
    """Return the message of the error that reading a folder raises."""
    with pytest.raises(error) as caught:
        read(folder, specs, **arguments)
    message = str(caught.value)
    assert str(folder) in message
    assert "given:" in message
    assert "allowed:" in message
    return message


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def stacked(rank=R, experts=E, wide=H, high=2 * W, seed=0):
    return random(experts * rank, wide, seed=seed), random(high, rank * experts, seed=seed + 1)


def pair(path, a, b, weight=".weight"):
    return {f"{path}.lora_A{weight}": a, f"{path}.lora_B{weight}": b}


def both_sites():
    return {
        **pair(f"{LAYER}.base_layer", *stacked()),
        **pair(LAYER, *stacked(wide=W, high=H, seed=5)),
    }


# What PEFT saves


KINDS = {
    "both sites": {**STACKED, "r": 2, "lora_alpha": 6},
    "both sites, another order": {
        **STACKED,
        "target_parameters": STACKED["target_parameters"][::-1],
    },
    "gate and up": {"r": 2, "target_modules": [], "target_parameters": ["experts.gate_up_proj"]},
    "down": {"r": 3, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    "every linear layer": {"r": 2, "target_modules": "all-linear"},
    "names of Transformers 4": {"r": 2, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "rsLoRA": {**STACKED, "r": 4, "lora_alpha": 6, "use_rslora": True},
    "patterns": {
        **STACKED,
        "rank_pattern": {"layers.1.mlp.experts.gate_up_proj": 3, r".*\.down_proj": 1},
        "alpha_pattern": {"down_proj": 5},
    },
    "one parameter in full": {
        "target_modules": ["k_proj"],
        "target_parameters": ["model.layers.1.mlp.experts.gate_up_proj"],
    },
}


LAYOUTS = [("qwen3_moe", kind) for kind in KINDS] + [
    ("gpt_oss", kind) for kind, config in KINDS.items() if "target_parameters" in config
]


@pytest.mark.parametrize(("name", "kind"), LAYOUTS)
def test_every_layout_of_peft_is_read_as_peft_reads_it(name, kind, tmp_path):
    base = build(name)
    dtype, device = torch.float32, torch.device("cpu")
    experts = find_experts(base, dtype, device)
    sites = find_sites(base, dtype, device) | find_routers(base, experts, dtype, device)
    layers = peft_layers(in_peft(base, tmp_path, seed=1, **KINDS[kind]))
    checkpoint = read_checkpoint(
        tmp_path, {path: site.spec for path, site in sites.items()}, experts=expert_specs(experts)
    )
    assert sorted([*checkpoint.modules, *checkpoint.experts]) == sorted(layers)
    assert checkpoint.experts
    for path, delta in checkpoint.experts.items():
        theirs = layers[path].get_delta_weight("default").double()
        if name == "gpt_oss":
            theirs = theirs.transpose(1, 2)
        torch.testing.assert_close(updates(delta), theirs, rtol=1e-5, atol=1e-6)
    for path, linear in checkpoint.modules.items():
        ours = linear.scaling * linear.lora_b @ linear.lora_a
        torch.testing.assert_close(ours, layers[path].get_delta_weight("default").detach())


def test_a_router_in_target_parameters_is_a_linear_layer(tmp_path):
    tensors = pair("model.layers.0.mlp.gate", random(3, H), random(E, 3))
    folder = write_folder(
        tmp_path / "a",
        tensors,
        target_modules=["q_proj"],
        target_parameters=["gate.weight"],
        rank_pattern={r".*gate\.weight": 3},
        lora_alpha=6,
    )
    modules = {"model.layers.0.mlp.gate": ModuleSpec("linear", H, E)}
    delta = read_checkpoint(folder, modules, experts={}).modules["model.layers.0.mlp.gate"]
    assert (delta.kind, delta.rank, delta.scaling) == ("linear", 3, 2.0)


def test_a_parameter_that_is_stored_transposed_is_refused_by_name(tmp_path):
    folder = write_folder(
        tmp_path / "a",
        pair("h.0.c_proj", random(R, H), random(H, R)),
        target_modules=[],
        target_parameters=["c_proj.weight"],
    )
    modules = {"h.0.c_proj": ModuleSpec("linear", H, H, transposed=True)}
    with pytest.raises(UnsupportedInputError, match="stored transposed"):
        read_checkpoint(folder, modules)


# Versions of PEFT that exchanged A and B


def exchanged_pair(path, a, b, experts=E, rank=R):
    """Save matrices of [experts, out, in] as a version that takes `out` for the input."""
    first = a.reshape(experts, rank, -1)
    second = b.reshape(-1, rank, experts).permute(2, 0, 1)
    theirs_a = second.transpose(1, 2).reshape(experts * rank, -1)
    theirs_b = first.permute(2, 1, 0).reshape(-1, rank * experts)
    return pair(path, theirs_a, theirs_b)


def square_specs(**flags):
    return {DOWN: ExpertSpec(E, H, (H,), **flags)}


def saved(folder, exchanged, **config):
    a, b = stacked(wide=H, high=H)
    write = exchanged_pair if exchanged else pair
    return write_folder(folder, write(LAYER, a, b), **STACKED, **config)


def test_exchanged_matrices_are_told_by_their_shapes(tmp_path):
    a, b = stacked(wide=W, high=H)
    straight = write_folder(tmp_path / "a", pair(LAYER, a, b), **STACKED, peft_version="0.18.0")
    turned = write_folder(tmp_path / "b", exchanged_pair(LAYER, a, b), **STACKED)
    specs = {DOWN: SPECS[DOWN]}
    ours, theirs = (read(folder, specs).experts[DOWN] for folder in (straight, turned))
    assert torch.equal(updates(ours), updates(theirs))


@pytest.mark.parametrize("version", ["0.17.1", "0.18.0", "0.18.1", "0.19.0"])
def test_square_matrices_are_exchanged_by_versions_that_did(version, tmp_path):
    straight = saved(tmp_path / "a", exchanged=False, peft_version="0.19.1")
    turned = saved(tmp_path / "b", exchanged=True, peft_version=version)
    specs = square_specs()
    ours, theirs = (read(folder, specs).experts[DOWN] for folder in (straight, turned))
    assert torch.equal(updates(ours), updates(theirs))


@pytest.mark.parametrize("version", [None, "", "next", "0.18.1.dev0", "0.19.1.dev0", 18])
def test_square_matrices_of_an_unknown_version_are_refused_by_name(version, tmp_path):
    folder = saved(tmp_path / "a", exchanged=False, peft_version=version)
    message = rejected(UnsupportedInputError, folder, square_specs())
    assert f"peft_version = {json.dumps(version)}" in message
    assert DOWN in message


@pytest.mark.parametrize("version", ["0.17.1", "0.18.1", "0.19.1", "0.21.2", "0.22.0.dev0"])
def test_square_matrices_stored_transposed_are_never_exchanged(version, tmp_path):
    folder = saved(tmp_path / "a", exchanged=False, peft_version=version)
    delta = read(folder, square_specs(transposed=True)).experts[DOWN]
    a, _ = stacked(wide=H, high=H)
    assert torch.equal(delta.lora_a[:, 0], a.reshape(E, R, H))


def test_square_matrices_stored_transposed_by_one_version_are_refused(tmp_path):
    folder = saved(tmp_path / "a", exchanged=False, peft_version="0.19.0")
    rejected(UnsupportedInputError, folder, square_specs(transposed=True))


@pytest.mark.parametrize("exchanged", [False, True])
def test_square_matrices_are_as_those_beside_them(exchanged, tmp_path):
    write = exchanged_pair if exchanged else pair
    square = stacked(wide=H, high=H)
    tensors = {
        **write(f"{LAYER}.base_layer", *stacked()),
        **write(LAYER, *square),
    }
    folder = write_folder(tmp_path / "a", tensors, **STACKED, peft_version="0.19.0")
    specs = {GATE_UP: GPT_OSS[GATE_UP], **square_specs(transposed=True)}
    delta = read(folder, specs).experts[DOWN]
    assert torch.equal(delta.lora_a[:, 0], square[0].reshape(E, R, H))


# Modules per expert, and tensors with an axis of experts


def numbered(names, rank=R):
    """Return tensors of a module per expert, and the update of each site."""
    tensors, full = {}, {GATE_UP: torch.zeros(E, 2 * W, H), DOWN: torch.zeros(E, H, W)}
    for expert in range(E):
        for index, name in enumerate(names):
            wide, high = (W, H) if index == 2 else (H, W)
            a, b = random(rank, wide, seed=10 * expert + index), random(high, rank, seed=expert)
            tensors |= pair(f"{LAYER}.{expert}.{name}", a, b)
            rows = full[DOWN][expert] if index == 2 else full[GATE_UP][expert].view(2, W, H)[index]
            rows.copy_(4 * b @ a)  # lora_alpha is 8
    return tensors, full


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_module_per_expert(names, interleaved, tmp_path):
    tensors, full = numbered(names)
    folder = write_folder(tmp_path / "a", tensors, target_modules=list(names))
    deltas = read(folder, GPT_OSS if interleaved else SPECS).experts
    expected = full[GATE_UP]
    if interleaved:
        expected = expected.view(E, 2, W, H).transpose(1, 2).reshape(E, 2 * W, H)
    ours = updates(deltas[GATE_UP], interleaved)
    torch.testing.assert_close(ours, expected.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(updates(deltas[DOWN]), full[DOWN].double(), rtol=1e-5, atol=1e-5)
    assert deltas[GATE_UP].lora_a.shape == (E, 2, R, H)


def test_experts_without_lora_and_ranks_of_their_own(tmp_path):
    tensors = {
        **pair(f"{LAYER}.1.gate_proj", random(R, H), random(W, R)),
        **pair(f"{LAYER}.3.gate_proj", random(5, H), random(W, 5)),
        **pair(f"{LAYER}.3.up_proj", random(R, H), random(W, R)),
    }
    folder = write_folder(
        tmp_path / "a", tensors, rank_pattern={"experts.3.gate_proj": 5}, use_rslora=True
    )
    delta = read(folder).experts[GATE_UP]
    assert delta.ranks.tolist() == [[0, 0], [R, 0], [0, 0], [5, R]]
    assert delta.scalings[3].tolist() == pytest.approx([8 / 5**0.5, 8 / R**0.5])


def test_the_mixtral_of_transformers_4_is_what_peft_makes_of_it(tmp_path):
    import peft

    base = build("mixtral")
    experts, hidden, width = 3, 16, 24
    tensors = {}
    for layer in range(2):
        path = f"model.layers.{layer}.block_sparse_moe"
        tensors |= pair(f"{path}.gate", random(2, hidden), random(experts, 2, seed=layer))
        for e in range(experts):
            for name in ("w1", "w2", "w3"):
                wide, high = (width, hidden) if name == "w2" else (hidden, width)
                seed = 100 * layer + 10 * e + int(name[1])
                a, b = random(2, wide, seed=seed), random(high, 2, seed=seed)
                tensors |= pair(f"{path}.experts.{e}.{name}", a, b)
    folder = write_folder(tmp_path / "a", tensors, target_modules=["gate", "w1", "w2", "w3"])
    sites = find_experts(base, torch.float32, torch.device("cpu"))
    modules = {f"model.layers.{i}.mlp.gate": ModuleSpec("linear", hidden, experts) for i in (0, 1)}
    checkpoint = read_checkpoint(folder, modules, experts=expert_specs(sites))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = peft_layers(peft.PeftModel.from_pretrained(base, folder))
    assert sorted([*checkpoint.modules, *checkpoint.experts]) == sorted(layers)
    for path, delta in checkpoint.experts.items():
        theirs = layers[path].get_delta_weight("default").double()
        torch.testing.assert_close(updates(delta), theirs, rtol=1e-5, atol=1e-5)
    for path, linear in checkpoint.modules.items():
        ours = linear.scaling * linear.lora_b @ linear.lora_a
        torch.testing.assert_close(ours, layers[path].get_delta_weight("default").detach())


def test_a_list_of_projections_of_gpt_oss(tmp_path):
    tensors = {}
    for expert in range(E):
        tensors |= pair(
            f"{LAYER}.gate_up_projs.{expert}", random(R, H), random(2 * W, R, seed=expert)
        )
        tensors |= pair(f"{LAYER}.down_projs.{expert}", random(R, W), random(H, R, seed=expert))
    folder = write_folder(tmp_path / "a", tensors, target_modules=["gate_up_projs", "down_projs"])
    deltas = read(folder, GPT_OSS).experts
    for expert in range(E):
        expected = 4 * random(2 * W, R, seed=expert).double() @ random(R, H).double()
        torch.testing.assert_close(updates(deltas[GATE_UP])[expert], expected)
    assert deltas[GATE_UP].lora_a.shape == (E, 1, R, H)


@pytest.mark.parametrize("weight", ["", ".weight"])
@pytest.mark.parametrize("num_a", [1, 2])
def test_experts_that_share_the_outer_matrices(num_a, weight, tmp_path):
    a, b = random(1, num_a * R, H), random(E, 2 * W, R)
    tensors = {
        **pair(GATE_UP, a, b, weight),
        **pair(DOWN, random(E, R, W), random(1, H, R), weight),
    }
    folder = write_folder(tmp_path / "a", tensors, target_modules=["gate_up_proj", "down_proj"])
    deltas = read(folder).experts
    assert deltas[GATE_UP].lora_a.shape == (1, num_a, R, H)
    assert deltas[DOWN].lora_b.shape == (1, H, R)
    own = [a[0, :R], a[0, -R:]]  # of gate and of up
    expected = torch.cat([4 * b[:, :W] @ own[0], 4 * b[:, W:] @ own[1]], 1).double()
    torch.testing.assert_close(updates(deltas[GATE_UP]), expected, rtol=1e-5, atol=1e-5)


def test_shared_matrices_of_gate_and_up_apart(tmp_path):
    tensors = {
        **pair(f"{LAYER}.w1", random(1, R, H), random(E, W, R)),
        **pair(f"{LAYER}.w3", random(1, R, H, seed=3), random(E, W, R, seed=4)),
        **pair(f"{LAYER}.w2", random(E, R, W), random(1, H, R)),
    }
    deltas = read(write_folder(tmp_path / "a", tensors)).experts
    assert deltas[GATE_UP].lora_a.shape == (1, 2, R, H)
    assert deltas[GATE_UP].lora_b.shape == (E, 2 * W, R)


# What is refused


def without(name):
    return {key: tensor for key, tensor in both_sites().items() if name not in key}


def changed(path, a, b, **config):
    return {**both_sites(), **pair(path, a, b)}, {**STACKED, **config}


BROKEN = {
    "one site of two": (without("base_layer"), STACKED, "disagree"),
    "more sites than targets": (
        both_sites(),
        {"target_modules": [], "target_parameters": ["experts.down_proj"]},
        "disagree",
    ),
    "no target": (both_sites(), {"target_modules": ["q_proj"]}, "does not target"),
    "half a pair": (without("base_layer.lora_B"), STACKED, "not a pair"),
    "another rank": (both_sites(), {**STACKED, "r": 3}, "wrong shape"),
    "another width": (*changed(LAYER, random(E * R, W + 1), random(H, E * R)), "wrong shape"),
    "NaN": (*changed(LAYER, random(E * R, W) * torch.nan, random(H, E * R)), "NaN"),
    "integers": (*changed(LAYER, random(E * R, W).int(), random(H, E * R)), "floating"),
    "an expert too many": (
        pair(f"{LAYER}.{E}.down_proj", random(R, W), random(H, R)),
        {},
        "fewer experts",
    ),
    "an expert of another width": (
        pair(f"{LAYER}.0.down_proj", random(R, W), random(H + 1, R)),
        {},
        "wrong shape",
    ),
    "an expert twice": (
        {
            **pair(f"{LAYER}.0.w1", random(R, H), random(W, R)),
            **pair(f"{LAYER}.0.gate_proj", random(R, H), random(W, R)),
        },
        {},
        "given twice",
    ),
    "two layouts": (
        {**both_sites(), **pair(f"{LAYER}.0.down_proj", random(R, W), random(H, R))},
        {"target_modules": "all-linear", "target_parameters": STACKED["target_parameters"]},
        "more than one way",
    ),
    "a layer too many": (
        pair(f"{LAYER.replace('0', '7')}.0.down_proj", random(R, W), random(H, R)),
        {},
        "has no experts",
    ),
    "an axis of other experts": (
        pair(DOWN, random(E - 1, R, W), random(E - 1, H, R)),
        {},
        "wrong shape",
    ),
    "an untargeted expert": (
        pair(f"{LAYER}.0.down_proj", random(R, W), random(H, R)),
        {"target_modules": ["q_proj"]},
        "does not target",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_contradictions_are_refused(kind, tmp_path):
    tensors, config, words = BROKEN[kind]
    folder = write_folder(tmp_path / "a", tensors, **config)
    assert words in rejected(InvalidInputError, folder)


REFUSED = {
    "a bias per expert": (
        {
            **pair(f"{LAYER}.0.down_proj", random(R, W), random(H, R)),
            f"{LAYER}.0.down_proj.lora_B.bias": random(H),
        },
        {"lora_bias": True},
        "lora_bias",
    ),
    "DoRA": (
        {
            **pair(f"{LAYER}.0.down_proj", random(R, W), random(H, R)),
            f"{LAYER}.0.down_proj.lora_magnitude_vector": random(H),
        },
        {"use_dora": True},
        "use_dora (DoRA)",
    ),
    "a bias in the configuration": (both_sites(), {**STACKED, "lora_bias": True}, "lora_bias"),
    "a third parameter": (
        pair(f"{LAYER}.base_layer.base_layer", *stacked()),
        STACKED,
        "target_parameters",
    ),
    "two parameters of another module": (
        pair("model.layers.0.mlp.gate.base_layer", random(R, H), random(E, R)),
        STACKED,
        "target_parameters",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_features_are_refused_by_name(kind, tmp_path):
    tensors, config, words = REFUSED[kind]
    folder = write_folder(tmp_path / "a", tensors, **config)
    assert words in rejected(UnsupportedInputError, folder)


def test_interleaved_columns_with_an_a_for_each_slice_are_refused(tmp_path):
    folder = write_folder(tmp_path / "a", pair(GATE_UP, random(1, 2 * R, H), random(E, 2 * W, R)))
    assert "interleaves" in rejected(InvalidInputError, folder, GPT_OSS)


def test_a_base_model_without_experts_is_named(tmp_path):
    folder = write_folder(tmp_path / "a", both_sites(), **STACKED)
    assert "has no experts" in rejected(InvalidInputError, folder, {})


def test_experts_that_let_nothing_in_are_refused_by_their_reason(tmp_path):
    folder = write_folder(tmp_path / "a", both_sites(), **STACKED)
    specs = {path: ExpertSpec(1, 1, (1,), refusal="its forward was replaced") for path in SPECS}
    assert "its forward was replaced" in rejected(UnsupportedInputError, folder, specs)


def test_a_rank_beyond_the_room_names_the_room(tmp_path):
    folder = write_folder(tmp_path / "a", both_sites(), **STACKED)
    assert read(folder, max_rank=1, max_expert_rank=R).experts
    message = rejected(InvalidInputError, folder, max_rank=8, max_expert_rank=R - 1)
    assert f"set max_expert_rank to {R} or more" in message


def test_what_a_small_file_grows_to_is_bounded(tmp_path):
    path = f"{LAYER}.999999999.down_proj"
    folder = write_folder(tmp_path / "a", pair(path, random(R, W), random(H, R)))
    with pytest.raises(InvalidInputError, match="unpacked_bytes"):
        read_checkpoint(folder)
    one = write_folder(tmp_path / "b", pair(f"{LAYER}.0.down_proj", random(R, W), random(H, R)))
    message = rejected(InvalidInputError, one, limits=LoadLimits(unpacked_bytes=200))
    assert "unpacked_bytes" in message


def test_numbers_of_experts_are_read_without_a_base_model(tmp_path):
    folder = write_folder(tmp_path / "a", both_sites(), **STACKED, peft_version="0.21.2")
    deltas = read_checkpoint(folder).experts
    assert deltas[GATE_UP].lora_a.shape == (E, 1, R, H)
    assert torch.equal(updates(deltas[DOWN]), updates(read(folder).experts[DOWN]))


# The pool


def make_pool(**options):
    return AdapterPool({}, max_adapters=2, max_rank=4, experts=SPECS, **options)


def folders(tmp_path):
    shared = {
        **pair(GATE_UP, random(1, R, H), random(E, 2 * W, R)),
        **pair(DOWN, random(E, R, W), random(1, H, R)),
    }
    return {
        "stacked": write_folder(tmp_path / "stacked", both_sites(), **STACKED),
        "numbered": write_folder(
            tmp_path / "numbered", numbered(("gate_proj", "up_proj", "down_proj"))[0]
        ),
        "shared": write_folder(tmp_path / "shared", shared),
    }


def slot_of(pool, name):
    with pool.slots.in_use([name]) as slots:
        return slots[name]


def test_adapters_of_every_form_have_a_stack_that_holds_them(tmp_path):
    pool = AdapterPool({}, max_adapters=3, max_rank=4, experts=SPECS)
    for name, folder in folders(tmp_path).items():
        pool.load(name, folder)
        (own,) = [
            stack
            for stack in pool.active_experts[GATE_UP]
            if stack.ranks[slot_of(pool, name)].any()
        ]
        delta = read(folder).experts[GATE_UP]
        slot = slot_of(pool, name)
        assert torch.equal(own.lora_a[slot, :, :, :R], delta.lora_a)
        assert torch.equal(own.lora_b[slot, :, :, :R], delta.lora_b)
        assert torch.equal(own.ranks[slot], delta.ranks)
        assert torch.equal(own.scalings[slot], delta.scalings)
    assert len(pool.active_experts[GATE_UP]) == 3
    assert len(pool.active_experts[DOWN]) == 2  # the first two are of one form there


def test_a_slot_that_is_used_again_forgets_its_experts(tmp_path):
    pool, paths = make_pool(), folders(tmp_path)
    pool.load("first", paths["stacked"])
    (stack,) = pool.active_experts[GATE_UP]
    pool.load("first", paths["numbered"], replace_existing=True)
    assert not stack.ranks.any()
    assert stack not in pool.active_experts[GATE_UP]
    pool.unload("first")
    assert not pool.active_experts
    assert not pool.modules_of(0)


def test_a_load_that_fails_changes_no_experts(tmp_path):
    pool, paths = make_pool(dtype=torch.float16), folders(tmp_path)
    pool.load("first", paths["stacked"])
    before = [stack.lora_a.clone() for stack in pool.active_experts[DOWN]]
    huge = pair(LAYER, *(1e6 * t for t in stacked(wide=W, high=H)))
    folder = write_folder(tmp_path / "huge", {**both_sites(), **huge}, **STACKED)
    with pytest.raises(InvalidInputError, match="overflows"):
        pool.load("first", folder, replace_existing=True)
    assert pool.slots.names == ["first"]
    (stack,) = pool.active_experts[DOWN]
    assert torch.equal(stack.lora_a, before[0])
    assert stack.ranks[slot_of(pool, "first")].eq(R).all()


def test_a_checkpoint_in_memory_that_does_not_fit_is_refused(tmp_path):
    checkpoint = read(write_folder(tmp_path / "a", both_sites(), **STACKED))
    narrow = AdapterPool({}, max_adapters=1, max_rank=R - 1, experts=SPECS)
    with pytest.raises(InvalidInputError, match="max_expert_rank: 1"):
        narrow.add("a", checkpoint)
    other = {path: ExpertSpec(E + 1, s.in_features, s.output_slices) for path, s in SPECS.items()}
    with pytest.raises(InvalidInputError, match="does not fit the base model"):
        AdapterPool({}, experts=other).add("a", checkpoint)
    closed = {path: ExpertSpec(1, 1, (1,), refusal="it is closed") for path in SPECS}
    with pytest.raises(UnsupportedInputError, match="it is closed"):
        AdapterPool({}, experts=closed).add("a", checkpoint)
