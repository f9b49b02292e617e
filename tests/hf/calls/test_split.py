"""`split=True` gives each row the result of its own adapter, or refuses: no length tells rows."""

import copy

import pytest
import torch
import transformers
from helpers.sweeps import sweep
from helpers.sweeps.architectures import KNOWN, build, in_peft, inputs_of

from lora_backends import InvalidInputError, LoRABackendError, UnsupportedInputError
from lora_backends.hf import MultiLoRAModel

BOUND = 2e-5
ROWS = ["a", "b", None]


class Mixed:
    """A wrapped model with adapters "a" and "b", and what PEFT gives for each row of a batch."""

    def __init__(self, base, targets="all-linear", fuse=False):
        made = {name: in_peft(base, targets, seed) for seed, name in enumerate("ab")}
        self.peft = {
            None: copy.deepcopy(base),
            **{name: model for name, (model, _) in made.items()},
        }
        self.model = MultiLoRAModel(base, "torch_ref", max_rank=3, fuse=fuse)
        for name, (_, checkpoint) in made.items():
            self.model.add_adapter(name, checkpoint)

    @torch.no_grad()
    def alone(self, given):
        return {name: model(**copy.deepcopy(given)) for name, model in self.peft.items()}

    def differences(self, rows, given, **options):
        """Return the worst differences of the outputs with rows, and that adapters matter."""
        output = self.model(adapters=rows, **copy.deepcopy(given), **options)
        alone = self.alone({**given, **{k: v for k, v in options.items() if k != "split"}})
        worst = {}
        for name in ("logits", "last_hidden_state"):
            if alone[None].get(name) is not None:
                expected = torch.stack([alone[entry][name][i] for i, entry in enumerate(rows)])
                worst[name] = (output[name] - expected).abs().max().item()
                assert (expected - alone[None][name]).abs().max() > 100 * BOUND, "no effect"
        assert worst
        return worst

    def check(self, given, rows=ROWS, **options):
        worst = self.differences(rows, given, **options)
        assert max(worst.values()) < BOUND, worst

    def check_or_refuse(self, given, rows=ROWS, **options):
        """Return the refusal, or None where each row is that of its adapter."""
        try:
            self.check(given, rows, **options)
        except LoRABackendError as error:
            return str(error)
        return None


def known(name):
    if name not in KNOWN:
        pytest.skip(f"this Transformers has no {name}")
    return build(name)


SPLIT = {"split": True, "use_cache": False}


@pytest.mark.parametrize("images", [[2, 1, 0], [1, 1, 1], [0, 0, 3], [0, 1, 2]])
@pytest.mark.parametrize("name", ["llava", "vipllava", "gemma3", "idefics3", "qwen2_vl"])
def test_as_many_images_as_rows_need_not_be_one_for_each(name, images):
    mixed = Mixed(known(name))
    given = inputs_of(name, 3, 4, seed=sum(images), images=images)
    mixed.check(given, **SPLIT)
    output = mixed.model(adapters=ROWS, **given, **SPLIT)
    alone = mixed.alone({**given, "use_cache": False})
    features = output.get("image_hidden_states")
    if isinstance(features, torch.Tensor):
        counts = given["input_ids"].eq(60).sum(1).tolist()
        expected = torch.cat(
            [
                alone[entry].image_hidden_states.flatten(0, -2).split(counts)[row]
                for row, entry in enumerate(ROWS)
            ]
        )
        torch.testing.assert_close(features.flatten(0, -2), expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize("images", [None, [2, 1, 0]])
def test_positions_of_three_sections_are_no_rows(images):
    mixed = Mixed(known("qwen2_vl"))
    given = inputs_of("qwen2_vl", 3, 6, 1, images)
    length = given["input_ids"].shape[1]
    generator = torch.Generator().manual_seed(1)
    given["position_ids"] = torch.randint(0, 20, (3, 3, length), generator=generator)
    mixed.check(given)
    mixed.check(given, **SPLIT)


def text(rows, length, vocabulary=58):
    generator = torch.Generator().manual_seed(rows + length)
    return torch.randint(1, vocabulary, (rows, length), generator=generator)


def bias_of(mask):
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


def causal(length):
    return bias_of(torch.ones(length, length).tril().bool())


SHARED_INPUTS = {
    "positions of one row": lambda ids: {"position_ids": torch.arange(ids.shape[1])[None] + 2},
    "a mask of one row": lambda ids: {"attention_mask": causal(ids.shape[1])[None, None]},
    "a mask of each row": lambda ids: {
        "attention_mask": causal(ids.shape[1])[None, None].repeat(len(ids), 1, 1, 1)
    },
    "masks of tokens": lambda ids: {
        "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
    },
    "last logits": lambda ids: {"logits_to_keep": 2},
    "logits of positions": lambda ids: {"logits_to_keep": torch.tensor([0, 2, 1])},
}


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("rows", [2, 3, 16])  # as many as heads, as tokens and as hidden units
@pytest.mark.parametrize("kind", SHARED_INPUTS)
def test_inputs_that_rows_share_are_not_divided(kind, rows, split):
    mixed = Mixed(known("llama"))
    entries = [("a", "b", None)[row % 3] for row in range(rows)]
    ids = text(rows, 3)
    given = {"input_ids": ids, **SHARED_INPUTS[kind](ids)}
    mixed.check(given, entries, **(SPLIT if split else {}))


@pytest.mark.parametrize("name", ["Whisper", "T5", "Bart"])
def test_encoder_decoders_are_split(name):
    if name not in sweep.CASES:
        pytest.skip(f"the sweep has no {name}")
    rows = ["a", None, "b", "a"]
    Mixed(sweep.build(name)).check(sweep.inputs(name), rows, **SPLIT)


def test_groups_of_codebooks_are_not_torn_apart():
    torch.manual_seed(0)
    config = transformers.MusicgenDecoderConfig(
        vocab_size=32, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2,
        num_codebooks=2, pad_token_id=31,
    )  # fmt: skip
    mixed = Mixed(transformers.MusicgenForCausalLM(config).eval(), ["q_proj", "v_proj"])
    given = {"input_ids": text(4, 3, 30)}  # of two samples
    alone = mixed.alone({**given, "use_cache": False})
    rows = ["a", "b", "a", "b"]
    output = mixed.model(adapters=rows, **given, **SPLIT).logits
    expected = torch.stack([alone[entry].logits[i] for i, entry in enumerate(rows)])
    torch.testing.assert_close(output, expected, rtol=0, atol=BOUND)


def test_outputs_with_another_first_axis_are_refused():
    mixed = Mixed(known("xlnet"))
    given, rows = {"input_ids": text(4, 2)}, ["a", "b", "a", "b"]  # mems [tokens, rows, hidden]
    with pytest.raises(UnsupportedInputError, match="cannot join the outputs mems"):
        mixed.model(adapters=rows, split=True, use_mems=True, **given)
    mixed.check(given, rows, split=True, use_mems=False)


def test_scores_of_every_pair_of_rows_are_refused():
    mixed = Mixed(known("clip"))
    with pytest.raises(UnsupportedInputError, match="cannot join the outputs logits_per_image"):
        mixed.model(adapters=ROWS, split=True, **inputs_of("clip", 3, 4, 1))


@pytest.mark.parametrize("kind", ["cache", "states", "list"])
def test_what_a_pass_may_change_is_not_shared_by_passes(kind):
    mixed = Mixed(known("rwkv" if kind == "states" else "llama"))
    given = {"input_ids": text(3, 1)}
    name = "state" if kind == "states" else "past_key_values"
    cache = mixed.model(adapters=ROWS, use_cache=True, input_ids=text(3, 4))[name]
    if kind == "list":
        name, cache = "unknown", [torch.zeros(3)]
    with pytest.raises(UnsupportedInputError, match=f"a pass may change {name}"):
        mixed.model(adapters=ROWS, **{name: cache}, **given, **SPLIT)


def test_inputs_are_as_they_were_before_each_pass():
    class Writing(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, **others):
            out = super().forward(input_ids=input_ids, **others)
            input_ids.fill_(1)
            return out

    base = known("llama")
    base.__class__ = Writing
    mixed, ids = Mixed(base), text(3, 4)
    mixed.check({"input_ids": ids}, **SPLIT)


def test_one_adapter_in_all_rows_is_one_pass():
    mixed = Mixed(known("llama"))
    given = {"input_ids": text(3, 4), "labels": text(3, 4)}
    output = mixed.model(adapters=["a"] * 3, split=True, **given)
    expected = mixed.alone(given)["a"]
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=BOUND)
    torch.testing.assert_close(output.loss, expected.loss)
    assert output.past_key_values.get_seq_length() == 4
    with pytest.raises(UnsupportedInputError, match="outputs loss[\\s\\S]*leave labels out"):
        mixed.model(adapters=ROWS, **given, **SPLIT)


CURES = [
    ("deberta", "all-linear", {}, {"split": True}),
    ("deberta", "all-linear", {"labels": True}, None),
    ("deberta", "all-linear", {"return_dict": False}, {"split": True}),
    ("vipllava", "all-linear", {}, SPLIT),
    ("vipllava", "all-linear", {"labels": True}, None),
    ("clip", "all-linear", {}, None),
]


@pytest.mark.parametrize(("name", "targets", "extra", "cure"), CURES)
def test_split_is_offered_only_where_it_runs(name, targets, extra, cure):
    mixed = Mixed(known(name), targets)
    given = inputs_of(name, 3, 4, 2, [2, 1, 0] if name == "vipllava" else None) | extra
    if "labels" in given:
        given["labels"] = given["input_ids"]
    with pytest.raises(UnsupportedInputError, match="split the batch by adapter") as refused:
        mixed.model(adapters=ROWS, **given)
    text = str(refused.value)
    assert ("split=True" in text) is (cure is not None)
    assert ("use_cache=False" in text) is (cure is SPLIT)
    if cure is not None:
        mixed.model(adapters=ROWS, **given, **cure)


@pytest.mark.parametrize("call", ["tokens", "generate", "prepared", "lists"])
def test_split_is_not_offered_where_it_cannot_be_asked_for(call):
    if call == "generate":
        mixed = Mixed(known("vipllava"))
        given = inputs_of("vipllava", 3, 4, 2, [2, 1, 0])
    else:
        mixed, given = Mixed(known("deberta")), {"input_ids": text(3, 4)}
    calls = {
        "tokens": lambda: mixed.model(adapters=["a", "b", [None, None, "a", "a"]], **given),
        "lists": lambda: mixed.model(adapters=ROWS, logits_as_list=True, **given),
        "generate": lambda: mixed.model.generate(adapters=ROWS, max_new_tokens=2, **given),
        "prepared": lambda: mixed.model(adapters=mixed.model.prepare(ROWS, tokens=4), **given),
    }
    cure = "give all rows of a call one entry" if call == "tokens" else "split the batch by adapter"
    with pytest.raises(UnsupportedInputError, match=cure) as refused:
        calls[call]()
    assert "split=True" not in str(refused.value)


def test_lists_of_logits_have_a_tensor_for_each_row():
    mixed = Mixed(known("llama"))
    given = {"input_ids": text(3, 4)}
    listed = mixed.model(adapters=ROWS, logits_as_list=True, **given).logits
    expected = mixed.model(adapters=ROWS, **given).logits
    assert len(listed) == 3 and all(torch.equal(own, expected[i]) for i, own in enumerate(listed))

    class Turned(transformers.LlamaForCausalLM):
        def forward(self, *args, **others):
            out = super().forward(*args, **others)
            out["logits"] = out["logits"].movedim(1, 0)
            return out

    base = known("llama")
    base.__class__ = Turned
    with pytest.raises(UnsupportedInputError, match="no row of the batch"):
        Mixed(base).model(adapters=ROWS, logits_as_list=True, **given)


def chameleon():
    """A model whose embedding sees text, and the codes of images besides."""
    codes = {f"IMGIMG{letter}Z": 4 + i for i, letter in enumerate("ABCDEFGH")}
    vq = {
        "embed_dim": 4, "num_embeddings": 8, "latent_channels": 4, "base_channels": 32,
        "resolution": 8, "num_res_blocks": 1, "channel_multiplier": [1, 1], "double_latent": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.ChameleonConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, vocabulary_map={"<image>": 60, **codes},
        image_token_id=60, vq_config=vq,
    )  # fmt: skip
    return transformers.ChameleonForConditionalGeneration(config).eval()


def inputs_of_chameleon(images):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(20, 58, (3, 50), generator=generator)
    for row, count in enumerate(images):
        ids[row, 1 : 1 + 16 * count] = 60
    return {"input_ids": ids, "pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("targets", [["embed_tokens"], ["embed_tokens", "q_proj"]])
@pytest.mark.parametrize("images", [[2, 1, 0], [0, 0, 3], [1, 1, 1]])
def test_an_embedding_of_text_that_images_reach_too_is_refused(images, targets, fuse):
    mixed, given = Mixed(chameleon(), targets, fuse), inputs_of_chameleon(images)
    told = "pixel_values may reach it, too[\\s\\S]*split=True, use_cache=False"
    with pytest.raises(UnsupportedInputError, match=told):
        mixed.model(adapters=ROWS, **given)
    mixed.check(given, **SPLIT)
    mixed.check({"input_ids": given["input_ids"].clamp(max=57)})
    mixed.check(given, ["a"] * 3)
    step = mixed.model.prepare(["a"] * 3, tokens=50)
    mixed.model(adapters=step, **given)
    with pytest.raises(UnsupportedInputError, match="pixel_values may reach it, too"):
        step.update(ROWS)


def test_an_embedding_of_its_own_that_images_reach_too_is_refused(tmp_path):
    base, given = chameleon(), inputs_of_chameleon([2, 1, 0])
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3)
    own = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    for seed, name in enumerate("ab"):
        sweep.adapt(base, tmp_path / name, seed, **own)
        model.load_adapter(name, tmp_path / name)
    with pytest.raises(UnsupportedInputError, match="pixel_values may reach it, too"):
        model(adapters=ROWS, **given)
    plain = {"input_ids": given["input_ids"].clamp(max=57)}
    for inputs, options in ((plain, {}), (given, SPLIT)):
        output = model(adapters=ROWS, **inputs, **options).logits
        for row, name in enumerate(ROWS):
            with torch.no_grad():
                alone = sweep.in_peft(base, name and tmp_path / name)(**inputs).logits
            torch.testing.assert_close(output[row], alone[row], rtol=0, atol=BOUND)


@pytest.mark.parametrize("targets", [["embed_tokens"], ["q_proj", "up_proj"]])
@pytest.mark.parametrize("beams", [1, 2])
def test_generated_tokens_are_pefts_where_images_reach_no_adapter(targets, beams):
    mixed, given = Mixed(chameleon(), targets), inputs_of_chameleon([2, 1, 0])
    given |= {"max_new_tokens": 4, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    if targets == ["embed_tokens"]:
        with pytest.raises(UnsupportedInputError, match="pixel_values may reach it"):
            mixed.model.generate(adapters=ROWS, **given)
        return
    tokens = mixed.model.generate(adapters=ROWS, **given)
    for row, name in enumerate(ROWS):
        assert torch.equal(tokens[row], mixed.peft[name].generate(**given)[row])


def test_modules_that_text_alone_reaches_take_images_beside_it():
    mixed, given = Mixed(chameleon(), ["q_proj", "up_proj"]), inputs_of_chameleon([2, 1, 0])
    mixed.check(given)
    step = mixed.model.prepare(ROWS, tokens=50)
    torch.testing.assert_close(
        mixed.model(adapters=step, **given).logits, mixed.model(adapters=ROWS, **given).logits
    )


def test_images_without_token_ids_are_refused():
    mixed, given = Mixed(chameleon(), ["embed_tokens"]), inputs_of_chameleon([2, 1, 0])
    with torch.no_grad():
        given["inputs_embeds"] = mixed.peft[None].get_input_embeddings()(given.pop("input_ids"))
    with pytest.raises(UnsupportedInputError, match="pixel_values may reach it without token ids"):
        mixed.model(adapters=ROWS, **given)


def test_entries_for_each_token_count_tokens_and_not_rows():
    mixed, ids = Mixed(known("llama")), text(3, 3)
    rows = [[None, "a", "a"], ["b", "b", None], "a"]
    output = mixed.model(adapters=rows, input_ids=ids).logits
    for row, entries in enumerate(rows):
        alone = mixed.model(adapters=[entries], input_ids=ids[row : row + 1]).logits
        torch.testing.assert_close(output[row], alone[0], rtol=0, atol=BOUND)
    with pytest.raises(InvalidInputError, match="adapters has 2 entries"):
        mixed.model(adapters=["a", "b"], split=True, input_ids=ids)
