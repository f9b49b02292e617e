"""Unsupported pipelines, files and calls are refused by name, and change nothing."""

import re

import pytest
import torch
from helpers.diffusion.diffusion_loras import tensors_of
from helpers.diffusion.tiny_pipelines import PIPELINES, run
from safetensors.torch import save_file

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.diffusers import MultiLoRAPipeline

TO_Q = "transformer.transformer_blocks.0.attn.to_q"


def pair(name=TO_Q, rank=2, **more):
    tensors = {
        f"{name}.lora_A.weight": torch.randn(rank, 32),
        f"{name}.lora_B.weight": torch.randn(32, rank),
    }
    return tensors | {f"{name}.{end}": value for end, value in more.items()}


@pytest.fixture(scope="module")
def flux():
    pipe = PIPELINES["Flux"]()
    model = MultiLoRAPipeline(pipe, backend="torch_ref", max_adapters=3, max_rank=8)
    model.load_adapter("anime", tensors_of(pipe, ["transformer"], seed=1))
    model.load_adapter("ink", tensors_of(pipe, ["transformer"], seed=2))
    return model


@pytest.fixture(scope="module")
def sdxl():
    pipe = PIPELINES["SDXL"]()
    model = MultiLoRAPipeline(pipe, backend="torch_ref")
    model.load_adapter("anime", tensors_of(pipe, ["unet"], seed=1))
    return model


class _Own(type(PIPELINES["Flux"]())):
    pass


def _of_another_class(pipe):
    pipe.__class__ = _Own


def _with_peft(pipe):
    pipe.load_lora_weights(pair(), adapter_name="a")


def _compiled(pipe):
    pipe.transformer.transformer_blocks[0].compile()


def _cached(pipe):
    from diffusers import FirstBlockCacheConfig

    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))


def _offloaded(pipe):
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(pipe.text_encoder, ModelHook())


def _training(pipe):
    pipe.transformer.train()


def _replaced(pipe):
    pipe.transformer = PIPELINES["Flux"]().transformer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_with_peft, "holds adapters of PEFT already"),
        (_compiled, "is compiled at transformer_blocks.0"),
        (_cached, "has hooks of diffusers"),
        (_offloaded, "text_encoder is offloaded"),
        (lambda pipe: pipe.transformer.fuse_qkv_projections(), "fused projections at"),
    ],
)
def test_a_changed_pipeline_is_refused_when_it_is_wrapped_and_later(change, words):
    pipe = PIPELINES["Flux"]()
    model = MultiLoRAPipeline(pipe, backend="torch_ref")
    change(pipe)
    with pytest.raises((UnsupportedInputError, InvalidInputError), match=f"{words}|was replaced"):
        run(pipe, ["a"], call=model, adapters=[None])
    model.detach()
    with pytest.raises(UnsupportedInputError, match=words):
        MultiLoRAPipeline(pipe, backend="torch_ref")


@pytest.mark.parametrize(
    ("change", "words"),
    [(_training, "is in training mode"), (_replaced, "has another transformer")],
)
def test_a_pipeline_that_changed_since_is_refused(change, words):
    pipe = PIPELINES["Flux"]()
    model = MultiLoRAPipeline(pipe, backend="torch_ref")
    change(pipe)
    with pytest.raises((InvalidInputError, UnsupportedInputError), match=words):
        run(pipe, ["a"], call=model, adapters=[None])


def test_a_pipeline_that_is_not_known_is_refused():
    pipe = PIPELINES["Flux"]()
    _of_another_class(pipe)
    with pytest.raises(UnsupportedInputError, match=r"test_refusals\._Own[\s\S]*FluxPipeline"):
        MultiLoRAPipeline(pipe)
    with pytest.raises(InvalidInputError, match="no pipeline"):
        MultiLoRAPipeline(pipe.transformer)
    unet = PIPELINES["SDXL"]()
    unet.unet.register_to_config(encoder_hid_dim_type="ip_image_proj")
    with pytest.raises(UnsupportedInputError, match="encoder_hid_dim_type"):
        MultiLoRAPipeline(unet)


FLUX_KOHYA = {
    "lora_unet_double_blocks_0_img_attn_proj.lora_down.weight": torch.ones(2, 32),
    "lora_unet_double_blocks_0_img_attn_proj.lora_up.weight": torch.ones(32, 2),
}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            pair() | {"transformer.norm_out.norm.weight": torch.ones(2)},
            "not understood[\\s\\S]*norm_out.norm.weight",
        ),
        (pair() | pair("vae.decoder.conv_in"), "no component[\\s\\S]*vae.decoder"),
        (pair() | {f"{TO_Q}.dora_scale": torch.ones(32)}, "drops a part[\\s\\S]*dora_scale"),
        (pair("transformer.transformer_blocks.7.attn.to_q"), "has no module"),
        (pair(rank=9), "does not fit[\\s\\S]*max_rank"),
        ({key: t[:, :1] for key, t in pair().items()}, "does not fit"),
        ({key: t * torch.nan for key, t in pair().items()}, "NaN or infinity"),
        (dict(list(pair().items())[:1]), "lacks lora_B.weight"),
        (pair() | {"transformer.other.alpha": torch.tensor(1.0)}, "other.alpha"),
        (
            pair(alpha=torch.tensor(1.0)) | pair(TO_Q.replace("to_q", "to_k")),
            "others have none[\\s\\S]*to_k",
        ),
        (pair(alpha=torch.ones(2)), "an alpha is no number"),
        ({f"{TO_Q}.lokr_w1": torch.ones(2, 2)}, "lokr_w1"),
        # ComfyUI's name for the T5 encoder, which diffusers drops
        (
            FLUX_KOHYA | {"text_encoders.t5xxl.transformer.a.lora_down.weight": torch.ones(2, 2)},
            "drops a part[\\s\\S]*t5xxl",
        ),
        # diffusers' converter loses the prefix of layers outside of the blocks
        (
            FLUX_KOHYA
            | {
                "lora_unet_img_in.lora_down.weight": torch.ones(2, 4),
                "lora_unet_img_in.lora_up.weight": torch.ones(32, 2),
            },
            "no component[\\s\\S]*x_embedder",
        ),
        ({}, "no tensors"),
        ({"a": 1}, "something else than tensors"),
    ],
)
def test_a_file_that_is_not_loaded_whole_is_refused(flux, tensors, words):
    with pytest.raises(InvalidInputError, match=words):
        flux.load_adapter("new", tensors)
    assert flux.adapters == ["anime", "ink"]


def test_zeros_that_diffusers_drops_are_allowed():
    model = MultiLoRAPipeline(PIPELINES["Flux"](), backend="torch_ref")
    zeros = {"lora_unet_double_blocks_0_img_attn_proj.diff_b": torch.zeros(32)}
    assert model.load_adapter("a", FLUX_KOHYA | zeros) == ["transformer"]


def test_kohya_files_of_two_formats_are_refused(sdxl):
    tensors = {
        f"lora_unet_{block}_attentions_0_proj_in.{end}.weight": torch.ones(size)
        for block in ("input_blocks_3_1", "down_blocks_1")
        for end, size in (("lora_down", (2, 64)), ("lora_up", (64, 2)))
    }
    with pytest.raises(InvalidInputError, match="drops a part[\\s\\S]*input_blocks"):
        sdxl.load_adapter("new", tensors)


def test_folders_and_names_are_checked(flux, tmp_path):
    for name in ("a", "b"):
        save_file(pair(), tmp_path / f"{name}.safetensors")
    with pytest.raises(InvalidInputError, match="holds 2 files"):
        flux.load_adapter("new", tmp_path)
    with pytest.raises(InvalidInputError, match="does not exist"):
        flux.load_adapter("new", tmp_path / "no")
    with pytest.raises(InvalidInputError, match="loaded already"):
        flux.load_adapter("ink", tmp_path / "a.safetensors")
    flux.load_adapter("third", tmp_path / "a.safetensors")
    with pytest.raises(InvalidInputError, match="all slots are taken"):
        flux.load_adapter("fourth", tmp_path / "a.safetensors")
    flux.unload_adapter("third")
    with pytest.raises(InvalidInputError, match="no adapter named 'third'"):
        flux.unload_adapter("third")


@pytest.mark.parametrize(
    ("adapters", "changes", "words"),
    [
        (["anime"], {}, "1 entries for 2 prompts"),
        ("anime", {}, "a list"),
        (["anime", "inc"], {}, "did you mean 'ink'"),
        (["anime", ["ink", None]], {}, r"adapters\[1\]"),
        (["anime", {"ink": float("nan")}], {}, "finite numbers"),
        (["anime", None], {"joint_attention_kwargs": {"scale": 0.5}}, "joint_attention_kwargs"),
        (["anime", None], {"num_images_per_prompt": 0}, "num_images_per_prompt"),
        (["anime", None], {"num_images_per_prompt": -1}, "num_images_per_prompt"),
    ],
)
def test_a_call_with_wrong_arguments_is_refused(flux, adapters, changes, words):
    with pytest.raises((InvalidInputError, UnsupportedInputError), match=words):
        run(flux.pipe, ["a", "b"], call=flux, adapters=adapters, **changes)


def transformer_inputs(rows, timesteps):
    return {
        "hidden_states": torch.randn(rows, 8, 4),
        "encoder_hidden_states": torch.randn(rows, 5, 32),
        "pooled_projections": torch.randn(rows, 32),
        "timestep": torch.rand(timesteps),
        "guidance": torch.rand(timesteps),
        "img_ids": torch.zeros(8, 3),
        "txt_ids": torch.zeros(5, 3),
    }


@torch.no_grad()
def test_rows_that_are_not_those_of_the_images_are_refused(flux):
    transformer = flux.pipe.transformer
    with flux._running(["anime", None], images=1):
        transformer(**transformer_inputs(2, 2))
        with pytest.raises(UnsupportedInputError, match="module time_text_embed.*linear_1"):
            # One timestep for both images: its layers see one row, which belongs to both.
            transformer(**transformer_inputs(2, 1))
    for rows in (1, 3, 4):
        with flux._running(["anime", None], images=1):
            with pytest.raises(UnsupportedInputError, match=f"a pass of {rows} rows"):
                transformer(**transformer_inputs(rows, rows))
    with flux._running(["anime", None], images=1):
        with pytest.raises(UnsupportedInputError, match="controlnet_block_samples"):
            samples = [torch.zeros(2, 8, 32)]
            transformer(**transformer_inputs(2, 2), controlnet_block_samples=samples)
    with flux._running(["anime"], images=1):  # with one adapter, any number of rows is right
        transformer(**transformer_inputs(3, 3))


def test_a_strength_of_dora_is_refused(flux):
    # In set_adapters the norm of DoRA depends on the strength; the slot's output_scales do not.
    flux.load_adapter("dora", pair(lora_magnitude_vector=torch.ones(32)))
    with flux._running([{"dora": 1.0}], images=1):
        pass
    with pytest.raises(UnsupportedInputError, match="norm depends on the strength"):
        with flux._running([{"dora": 0.5}], images=1):
            pass
    flux.unload_adapter("dora")


@torch.no_grad()
def test_a_module_outside_of_its_models_pass_is_refused(flux):
    block = flux.pipe.transformer.x_embedder
    base = block(torch.ones(2, 8, 4))
    with flux._running(["anime", None], images=1):
        with pytest.raises(UnsupportedInputError, match="outside of the model's forward pass"):
            block(torch.ones(2, 8, 4))
        # after an error in a pass, the next pass starts anew
        with pytest.raises(UnsupportedInputError, match="a pass of 3 rows"):
            flux.pipe.transformer(**transformer_inputs(3, 3))
        flux.pipe.transformer(**transformer_inputs(2, 2))
    assert torch.equal(block(torch.ones(2, 8, 4)), base)


def test_a_running_pipeline_keeps_its_adapters(flux):
    with flux._running(["anime", None], images=1):
        with pytest.raises(InvalidInputError, match="in use"):
            flux.unload_adapter("anime")
        with pytest.raises(InvalidInputError, match="cannot be detached"):
            flux.detach()
    assert flux.adapters == ["anime", "ink"]


@torch.no_grad()
def test_ip_adapters_are_refused_where_images_differ(sdxl):
    unet = sdxl.pipe.unet
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor(5),
        "encoder_hidden_states": torch.randn(2, 5, 64),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(2, 32),
            "time_ids": torch.randn(2, 6),
            "image_embeds": [torch.randn(2, 1, 32)],
        },
    }
    with sdxl._running(["anime", None], images=1):
        with pytest.raises(
            UnsupportedInputError, match=re.escape("added_cond_kwargs.image_embeds")
        ):
            unet(**inputs)
        inputs["added_cond_kwargs"].pop("image_embeds")
        unet(**inputs)


def test_a_convolution_that_returns_no_tensor_is_refused():
    pipe = PIPELINES["SDXL"]()
    model = MultiLoRAPipeline(pipe, backend="torch_ref", max_rank=4)
    conv = pipe.unet.conv_in
    model.load_adapter("a", {
        "unet.conv_in.lora_A.weight": torch.randn(2, conv.in_channels, *conv.kernel_size),
        "unet.conv_in.lora_B.weight": torch.randn(conv.out_channels, 2, 1, 1),
    })  # fmt: skip
    conv.register_forward_hook(lambda module, args, y: (y,), prepend=True)
    with pytest.raises(
        UnsupportedInputError, match=r"conv_in \(Conv2d\): it returned a tuple of T"
    ):
        run(model.pipe, ["a fox"], call=model, adapters=["a"])
