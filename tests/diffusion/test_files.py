"""Files of all supported formats give the same LoRA as diffusers' own loader."""

import json

import pytest
import torch
from helpers.diffusion.diffusion_loras import modules_of, tensors_of
from helpers.diffusion.tiny_pipelines import PIPELINES
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file

from lora_backends.diffusers import MultiLoRAPipeline

SDXL_SGM = {  # kohya trains SDXL on the UNet of Stability AI, with other names
    "lora_unet_input_blocks_0_0": "unet.conv_in",
    "lora_unet_time_embed_0": "unet.time_embedding.linear_1",
    "lora_unet_label_emb_0_2": "unet.add_embedding.linear_2",
    "lora_unet_input_blocks_1_0_in_layers_2": "unet.down_blocks.0.resnets.0.conv1",
    "lora_unet_input_blocks_2_0_op": "unet.down_blocks.0.downsamplers.0.conv",
    "lora_unet_input_blocks_3_0_emb_layers_1": "unet.down_blocks.1.resnets.0.time_emb_proj",
    "lora_unet_input_blocks_3_0_out_layers_3": "unet.down_blocks.1.resnets.0.conv2",
    "lora_unet_input_blocks_3_0_skip_connection": "unet.down_blocks.1.resnets.0.conv_shortcut",
    "lora_unet_input_blocks_3_1_proj_in": "unet.down_blocks.1.attentions.0.proj_in",
    "lora_unet_input_blocks_3_1_transformer_blocks_0_attn1_to_q": (
        "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    ),
    "lora_unet_middle_block_1_transformer_blocks_1_attn2_to_out_0": (
        "unet.mid_block.attentions.0.transformer_blocks.1.attn2.to_out.0"
    ),
    "lora_unet_output_blocks_0_1_transformer_blocks_0_ff_net_0_proj": (
        "unet.up_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj"
    ),
    "lora_unet_out_2": "unet.conv_out",
}


TEXT = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")] + ["mlp.fc1", "mlp.fc2"]
for end in TEXT:
    flat = f"text_model_encoder_layers_0_{end.replace('.', '_')}"
    SDXL_SGM[f"lora_te1_{flat}"] = f"text_encoder.encoder.layers.0.{end}"
    SDXL_SGM[f"lora_te2_{flat}"] = f"text_encoder_2.text_model.encoder.layers.0.{end}"


def _pair(name, module, rank=4, down="lora_down", up="lora_up"):
    out, *patch = module.weight.shape
    ones = [1] * (len(patch) - 1)
    return {
        f"{name}.{down}.weight": torch.randn(rank, *patch),
        f"{name}.{up}.weight": torch.randn(out, rank, *ones),
    }


def _with_alphas(names, pipe, alpha):
    torch.manual_seed(3)
    tensors = {}
    for index, (name, path) in enumerate(names.items()):
        tensors |= _pair(name, _module(pipe, path))
        tensors[f"{name}.alpha"] = torch.tensor(float(alpha(index)))
    return tensors


def _module(pipe, path):
    component, _, inner = path.partition(".")
    return getattr(pipe, component).get_submodule(inner)


def kohya_sdxl(pipe):
    # One alpha for all: test_each_alpha_of_a_file_counts has several.
    return _with_alphas(SDXL_SGM, pipe, lambda index: 3.0)


def kohya_sd(pipe):
    """Return the names of diffusers' UNet with underscores instead of dots."""
    names = {
        f"lora_unet_{path.replace('.', '_')}": f"unet.{path}"
        for path in modules_of(pipe, "unet")
        if "attentions" in path or "resnets.0.conv" in path
    }
    return _with_alphas(names, pipe, lambda index: 2.0)


def old_diffusers(pipe):
    """Return LoRA of attention layers, with the names that diffusers used before PEFT."""
    tensors = {}
    for path, module in modules_of(pipe, "unet").items():
        parent, _, name = path.removesuffix(".0").rpartition(".")
        if name in ("to_q", "to_k", "to_v", "to_out"):
            full = f"unet.{parent}.processor.{name}_lora"
            tensors |= _pair(full, module, down="down", up="up")
    for path, module in modules_of(pipe, "text_encoder").items():
        name = f"text_encoder.text_model.{path}.lora_linear_layer"
        tensors |= _pair(name, module, down="down", up="up")
    return tensors


def _fused(name, modules, rank=6, down="lora_down", up="lora_up"):
    """Return one A and one B for several modules that a trainer has fused."""
    width = sum(module.out_features for module in modules)
    return {
        f"{name}.{down}.weight": torch.randn(rank, modules[0].in_features),
        f"{name}.{up}.weight": torch.randn(width, rank),
    }


def kohya_flux(pipe, name="lora_unet_{}", join="_"):
    torch.manual_seed(4)
    block = pipe.transformer.transformer_blocks[0]
    attention = block.attn
    images = [attention.to_q, attention.to_k, attention.to_v]
    texts = [attention.add_q_proj, attention.add_k_proj, attention.add_v_proj]
    paths = {
        "img_attn.qkv": images,
        "txt_attn.qkv": texts,
        "img_attn.proj": [attention.to_out[0]],
        "txt_mlp.0": [block.ff_context.net[0].proj],
        "img_mod.lin": [block.norm1.linear],
    }
    tensors = {}
    for path, modules in paths.items():
        full = name.format(join.join(("double_blocks", "0", *path.split("."))))
        tensors |= _fused(full, modules) | {f"{full}.alpha": torch.tensor(2.5)}
    single = pipe.transformer.single_transformer_blocks[0]
    full = name.format(join.join(("single_blocks", "0", "linear2")))
    return tensors | _fused(full, [single.proj_out]) | {f"{full}.alpha": torch.tensor(1.5)}


def kohya_flux_with_text(pipe):
    names = {name: path for name, path in SDXL_SGM.items() if "_te1_" in name}
    return kohya_flux(pipe) | _with_alphas(names, pipe, lambda index: 1.0 + index)


def bfl_flux(pipe):
    """Return the names of Black Forest Labs' code, with ComfyUI's prefix."""
    return kohya_flux(pipe, "diffusion_model.{}", ".")


def xlabs_flux(pipe):
    torch.manual_seed(5)
    attention = pipe.transformer.transformer_blocks[0].attn
    images = [attention.to_q, attention.to_k, attention.to_v]
    texts = [attention.add_q_proj, attention.add_k_proj, attention.add_v_proj]
    name = "double_blocks.0.processor"
    return {
        **_fused(f"{name}.qkv_lora1", images, down="down", up="up"),
        **_fused(f"{name}.qkv_lora2", texts, down="down", up="up"),
        **_fused(f"{name}.proj_lora1", [attention.to_out[0]], down="down", up="up"),
        **_fused(f"{name}.proj_lora2", [attention.to_add_out], down="down", up="up"),
    }


def flux_with_alphas(pipe):
    tensors = tensors_of(pipe, ["transformer"], seed=6, rank=4)
    paths = {key.partition(".lora_")[0] for key in tensors}
    return tensors | {
        f"{path}.alpha": torch.tensor(1.0 + index % 3) for index, path in enumerate(sorted(paths))
    }


def comfy_qwen(pipe):
    names = {f"diffusion_model.{path}": f"transformer.{path}" for path in _linear(pipe)}
    return _with_alphas(names, pipe, lambda index: 1 + index % 3)


def kohya_qwen(pipe):
    names = {
        f"lora_unet_{path.replace('.', '_')}": f"transformer.{path}"
        for path in _linear(pipe)
        if "attn" in path
    }
    return _with_alphas(names, pipe, lambda index: 1 + index % 3)


def _linear(pipe):
    return [path for path in modules_of(pipe, "transformer") if "transformer_blocks" in path]


def own_names(pipe):
    names = [name for name in ("unet", "transformer") if hasattr(pipe, name)]
    return tensors_of(pipe, names, seed=8)


FORMATS = [
    ("Stable Diffusion", own_names),
    ("Stable Diffusion", kohya_sd),
    ("Stable Diffusion", old_diffusers),
    ("SDXL", kohya_sdxl),
    ("SD3", own_names),
    ("Flux", own_names),
    ("Flux", flux_with_alphas),
    ("Flux", kohya_flux),
    ("Flux", kohya_flux_with_text),
    ("Flux", bfl_flux),
    ("Flux", xlabs_flux),
    ("Qwen-Image", own_names),
    ("Qwen-Image", comfy_qwen),
    ("Qwen-Image", kohya_qwen),
]


def of_diffusers(name, source):
    """Return scaling * B @ A of every module, as diffusers loads it."""
    pipe = PIPELINES[name]()
    pipe.load_lora_weights(source, adapter_name="a")
    deltas = {}
    for component, base in pipe.components.items():
        if not isinstance(base, torch.nn.Module):
            continue
        for path, layer in base.named_modules():
            if isinstance(layer, LoraLayer):
                a, b = layer.lora_A["a"].weight, layer.lora_B["a"].weight
                delta = layer.scaling["a"] * b.flatten(1) @ a.flatten(1)
                deltas[f"{component}.{path}"] = delta.detach()
    return deltas


def of_ours(model, source):
    """Return scaling * B @ A of every module, from the stacks of a wrapped pipeline."""
    model.load_adapter("a", source)
    deltas = {}
    for component in model._components.values():
        pool = component.pool
        if "a" not in pool.slots:
            continue
        slot = pool.slots.slot("a")
        for path in pool.adapted_by(slot):
            weights = pool.active.weights[path]
            rank = int(weights.ranks[slot, 0])
            a, b = weights.lora_a[slot, 0, :rank], weights.lora_b[slot, :, :rank]
            deltas[f"{component.name}.{path}"] = float(weights.scalings[slot, 0]) * b @ a
    return deltas


@pytest.mark.parametrize(
    ("name", "make"), FORMATS, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_file_gives_the_deltas_of_diffusers(name, make, tmp_path):
    model = MultiLoRAPipeline(PIPELINES[name](), backend="torch_ref")
    file = tmp_path / "lora.safetensors"
    save_file(make(model.pipe), file)
    theirs, ours = of_diffusers(name, str(file)), of_ours(model, file)
    assert ours.keys() == theirs.keys()
    for path, delta in theirs.items():
        torch.testing.assert_close(ours[path], delta, rtol=1e-5, atol=1e-6)


def test_metadata_gives_ranks_and_scalings(tmp_path):
    pipe = PIPELINES["SDXL"]()
    torch.manual_seed(9)
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["to_q", "conv1", "proj_in"],
        rank_pattern={"proj_in": 2},
        alpha_pattern={"proj_in": 5},
        init_lora_weights=False,
    )
    pipe.unet.add_adapter(config)
    type(pipe).save_lora_weights(
        tmp_path,
        unet_lora_layers=get_peft_model_state_dict(pipe.unet),
        unet_lora_adapter_metadata={
            **config.to_dict(),
            "target_modules": ["to_q", "conv1", "proj_in"],
        },
    )
    model = MultiLoRAPipeline(PIPELINES["SDXL"](), backend="torch_ref")
    theirs, ours = of_diffusers("SDXL", tmp_path), of_ours(model, tmp_path)
    assert ours.keys() == theirs.keys() and len(ours) > 5
    for path, delta in theirs.items():
        torch.testing.assert_close(ours[path], delta, rtol=1e-5, atol=1e-6)


def test_a_folder_of_peft_is_the_denoisers(tmp_path):
    pipe = PIPELINES["Flux"]()
    torch.manual_seed(9)
    tensors = {
        f"base_model.model.transformer_blocks.0.attn.to_q.{key}": value
        for key, value in (
            ("lora_A.weight", torch.randn(3, 32)),
            ("lora_B.weight", torch.randn(32, 3)),
        )
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["to_q"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model = MultiLoRAPipeline(pipe, backend="torch_ref")
    with pytest.warns(RuntimeWarning, match="to_q"):
        (delta,) = of_ours(model, tmp_path).values()
    a, b = tensors.values()
    torch.testing.assert_close(delta, 2.0 * b @ a)


def test_each_alpha_of_a_file_counts():
    # Where kohya's alphas differ, diffusers finds no module for most of them and applies the
    # commonest one to all modules of a component. So the expected values are computed here.
    model = MultiLoRAPipeline(PIPELINES["SDXL"](), backend="torch_ref")
    tensors = _with_alphas(SDXL_SGM, model.pipe, lambda index: 1.0 + index)
    deltas = of_ours(model, tensors)
    for index, (name, path) in enumerate(SDXL_SGM.items()):
        a, b = (tensors[f"{name}.lora_{end}.weight"].flatten(1) for end in ("down", "up"))
        torch.testing.assert_close(deltas[path], (1.0 + index) / 4 * b @ a, rtol=1e-5, atol=1e-6)
