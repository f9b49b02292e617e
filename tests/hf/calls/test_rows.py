"""Each row gets its own adapter whatever axis it is on, or the module is refused by name."""

import functools

import peft
import pytest
import torch
from helpers.sweeps import sweep
from helpers.sweeps.architectures import KNOWN, TOKENS_PER_IMAGE, build, in_peft, inputs_of

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.torch_ref import TorchRefBackend

BOUND = 2e-5
WITH_IMAGES = {*TOKENS_PER_IMAGE} - {"vipllava"}


def by_row(alone, adapters):
    """Return each row's logits of its own adapter."""
    return torch.stack([alone[name][row] for row, name in enumerate(adapters)])


class Pair:
    """A wrapped model, and PEFT on each of its two adapters."""

    def __init__(self, name, targets="all-linear", fuse=False):
        if name not in KNOWN:
            pytest.skip(f"this Transformers has no {name}")
        self.name, base = name, build(name)
        self.plain = build(name)
        made = {adapter: in_peft(base, targets, seed) for seed, adapter in enumerate("ab")}
        self.peft = {None: self.plain, **{adapter: model for adapter, (model, _) in made.items()}}
        self.model = MultiLoRAModel(base, "torch_ref", max_rank=3, fuse=fuse)
        for adapter, (_, checkpoint) in made.items():
            self.model.add_adapter(adapter, checkpoint)

    @torch.no_grad()
    def alone(self, **inputs):
        """Return the logits of every row, from PEFT, by the adapter that all rows use."""
        return {name: self.peft[name](**inputs).logits for name in (None, "a", "b")}

    def expected(self, adapters, **inputs):
        """Return the logits of every row, from PEFT with its adapter alone."""
        return by_row(self.alone(**inputs), adapters)

    def check(self, *compositions, **inputs):
        alone = self.alone(**inputs)
        for adapters in compositions:
            logits = self.model(adapters=adapters, **inputs).logits
            expected = by_row(alone, adapters)
            torch.testing.assert_close(logits, expected, rtol=0, atol=BOUND)
            changed = (expected - alone[None]).abs().max()
            assert changed > 100 * BOUND, "the adapters do nothing"

    def refuses(self, adapters, message, **inputs):
        with pytest.raises(UnsupportedInputError, match=message):
            self.model(adapters=adapters, **inputs)


@pytest.mark.parametrize(
    ("fuse", "batches"), [(False, ([2, 0], [1, 1], [0, 0])), (True, ([0, 2], [1, 3]))]
)
@pytest.mark.parametrize("name", sorted(WITH_IMAGES))
def test_an_image_belongs_to_the_row_with_its_placeholders(name, fuse, batches):
    pair = Pair(name, fuse=fuse)
    for images in batches:
        inputs = inputs_of(name, 2, 4, seed=sum(images), images=images)
        pair.check(["a", "b"], [None, "b"], ["a", None], ["b", "b"], **inputs)


def test_images_without_a_row_are_refused():
    pair = Pair("llava")
    inputs = inputs_of("llava", 2, 4, seed=1, images=[1, 1])
    with torch.no_grad():
        embeds = pair.plain.get_input_embeddings()(inputs["input_ids"])
    inputs = {"inputs_embeds": embeds, "pixel_values": inputs["pixel_values"]}
    pair.refuses(["a", "b"], "module model.vision_tower.*placeholder tokens", **inputs)
    pair.check(["a", "a"], **inputs)


def test_images_of_an_unknown_architecture_are_refused():
    pair = Pair("vipllava")
    inputs = inputs_of("vipllava", 2, 3, seed=1, images=[1, 1])
    pair.refuses(["a", "b"], "module model.vision_tower.*no pass of plain text", **inputs)
    pair.check(["a", "a"], **inputs)
    pair.check(["a", None], **inputs_of("vipllava", 2, 3, seed=1))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_patches_that_placeholders_do_not_account_for_are_refused(name):
    """A video brings patches of its own to the modules that see those of images."""
    pair = Pair(name, ["qkv", "q_proj"])
    inputs = inputs_of(name, 2, 3, seed=1, images=[1, 1])
    ids, kinds = inputs["input_ids"].clone(), inputs["mm_token_type_ids"].clone()
    kinds[ids == 60], ids[ids == 60] = 2, 61
    video = {
        "input_ids": ids,
        "attention_mask": inputs["attention_mask"],
        "mm_token_type_ids": kinds,
        "pixel_values_videos": inputs["pixel_values"],
        "video_grid_thw": inputs["image_grid_thw"],
    }
    pair.refuses(["a", "b"], "module model.visual.blocks.0.attn.qkv", **video)
    pair.check(["a", "a"], **video)


def test_adapters_without_a_module_do_not_need_its_rows():
    """Only "a" and None are used, and neither touches the vision tower that "c" adapts."""
    pair = Pair("vipllava", ["lm_head", "gate_proj"])
    _, everywhere = in_peft(build("vipllava"), "all-linear", 5)
    pair.model.add_adapter("c", everywhere)
    inputs = inputs_of("vipllava", 2, 3, seed=1, images=[1, 1])
    tokens = inputs["input_ids"].shape[1]
    pair.check(["a", None], **inputs)
    pair.refuses(["c", "a"], "module model.vision_tower", **inputs)
    with pair.model.prepare(["a", None], tokens=tokens) as step:
        logits = pair.model(adapters=step, **inputs).logits
        expected = pair.expected(["a", None], **inputs)
        torch.testing.assert_close(logits, expected, rtol=0, atol=BOUND)
        with pytest.raises(UnsupportedInputError, match="module model.vision_tower"):
            step.update(["c", "a"])
        assert step.adapters == ["a", None]


@pytest.mark.parametrize("name", ["xlnet", "longformer"])
def test_rows_need_not_be_on_the_first_axis(name):
    pair = Pair(name)
    for length in (3, 4):  # as many tokens as rows, and not
        inputs = inputs_of(name, 3, length, seed=length)
        pair.check(["a", None, "b"], [None, "b", "a"], ["b", "a", "a"], **inputs)


@pytest.mark.parametrize("name", ["xlnet", "opt"])
def test_prepared_adapters_follow_the_axis_of_the_rows(name):
    pair = Pair(name)
    inputs = inputs_of(name, 3, 3, seed=1)
    with pair.model.prepare(["a", None, "b"], tokens=3) as step:
        for adapters in (["a", None, "b"], [None, "b", "a"]):
            step.update(adapters)
            logits = pair.model(adapters=step, **inputs).logits
            expected = pair.expected(adapters, **inputs)
            torch.testing.assert_close(logits, expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_modules_that_see_cached_tokens_again_keep_the_rows(name):
    pair = Pair(name, ["kv_b_proj", "o_proj"])
    adapters, ids = ["a", None, "b"], inputs_of(name, 3, 6, seed=1)["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = pair.model.generate(ids, adapters=adapters, **settings)
    for row, adapter in enumerate(adapters):
        expected = pair.peft[adapter].generate(input_ids=ids, **settings)[row]
        assert torch.equal(tokens[row], expected)
    step, cache = pair.model.prepare(adapters), None
    expected = pair.expected(adapters, input_ids=tokens)
    for at in range(tokens.shape[1]):
        output = pair.model(
            adapters=step, input_ids=tokens[:, at : at + 1], past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        torch.testing.assert_close(output.logits[:, 0], expected[:, at], rtol=0, atol=BOUND)


def test_plans_of_a_growing_cache_are_not_kept_for_ever():
    pair = Pair("deepseek_v3", ["kv_b_proj"])
    ids = inputs_of("deepseek_v3", 2, 3, seed=1)["input_ids"]
    step, cache = pair.model.prepare(["a", "b"]), None
    for _ in range(40):
        output = pair.model(
            adapters=step, input_ids=ids[:, :1], past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
    assert len(step._plans) <= 16
    step.update(["b", "a"])


@pytest.mark.parametrize(("name", "head"), [("bert", "classifier"), ("roberta", "out_proj")])
def test_modules_with_one_position_per_row_use_its_adapter(name, head):
    pair = Pair(name, ["query", "dense", head])
    for length in (3, 5):
        inputs = inputs_of(name, 3, length, seed=length)
        pair.check(["a", None, "b"], ["b", "b", "a"], **inputs)


def test_rows_that_the_model_itself_mixes_are_refused():
    """RWKV's decode step gives several rows' keys every other row's tokens of before."""
    pair = Pair("rwkv")
    ids = inputs_of("rwkv", 3, 3, seed=1)["input_ids"]
    pair.check(["a", None, "b"], input_ids=ids)
    state = pair.model(adapters=["a", None, "b"], input_ids=ids, use_cache=True).state
    pair.refuses(
        ["a", None, "b"], "module rwkv.blocks.0.attention.key", input_ids=ids[:, :1], state=state
    )


def test_a_module_with_inputs_that_have_no_rows_is_refused():
    pair = Pair("deberta")
    inputs = inputs_of("deberta", 3, 3, seed=1)
    pair.refuses(["a", None, "b"], "module deberta.encoder.layer.0.attention.self", **inputs)
    pair.check(["b"] * 3, **inputs)


def test_a_wrapped_model_keeps_its_kind_of_attention():
    """BigBird changes to full attention for good when it meets a short pass."""
    pair = Pair("big_bird")
    assert pair.model.base.bert.attention_type == "block_sparse"
    pair.check(["a", None], **inputs_of("big_bird", 2, 24, seed=1))
    assert pair.model.base.bert.attention_type == "block_sparse"


def test_wrapping_runs_no_hook_and_draws_no_random_number():
    base, runs = build("llama"), []
    base.register_forward_pre_hook(lambda module, args: runs.append(module))
    base.model.layers[0].register_forward_hook(lambda module, args, output: runs.append(module))
    state = torch.get_rng_state()
    MultiLoRAModel(base, "torch_ref")
    assert not runs
    assert torch.equal(torch.get_rng_state(), state)


def test_modules_with_a_forward_of_their_own_keep_their_rows():
    """Accelerate puts a partial on each module that keeps the old bound method."""
    pair = Pair("opt")
    base = build("opt")
    for module in base.modules():
        module.before = module.forward
        module.forward = functools.partial(lambda module, *a, **k: module.before(*a, **k), module)
    pair.model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    for seed, adapter in enumerate("ab"):
        pair.model.add_adapter(adapter, in_peft(build("opt"), "all-linear", seed)[1])
    pair.check(["a", None, "b"], **inputs_of("opt", 3, 3, seed=1))


def test_a_model_that_does_not_run_on_text_takes_one_adapter_for_all_rows():
    """CLIP multiplies every text with every image, of other rows, too."""
    pair = Pair("clip", ["q_proj", "v_proj"])
    inputs = inputs_of("clip", 2, 5, seed=1)
    with torch.no_grad():
        expected = pair.peft["a"](**inputs).logits_per_text
    output = pair.model(adapters=["a", "a"], **inputs).logits_per_text
    torch.testing.assert_close(output, expected, rtol=0, atol=BOUND)
    pair.refuses(["a", "b"], "does not run on plain text", **inputs)
    with pytest.raises(InvalidInputError, match="no tokens to run on"):
        pair.model(adapters=["a", "a"])


def test_a_model_whose_decode_step_cannot_be_tried_takes_prompts():
    pair = Pair("llama")

    class Failing(type(pair.model.base)):
        def forward(self, input_ids, past_key_values=None, use_cache=None):
            if past_key_values is not None and input_ids.shape[0] > 3:
                raise ZeroDivisionError("a trial step")
            return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)

    base = build("llama")
    base.__class__ = Failing
    pair.model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    for seed, adapter in enumerate("ab"):
        pair.model.add_adapter(adapter, in_peft(build("llama"), "all-linear", seed)[1])
    ids = inputs_of("llama", 2, 4, seed=1)["input_ids"]
    pair.check(["a", "b"], input_ids=ids)
    pair.refuses(["a", "b"], "a step after plain text .*a trial step", input_ids=ids[:, :1])


class Plain(torch.nn.Module):
    """A language model that is none of Transformers': no config, no get_input_embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))


def test_a_module_without_a_configuration_is_wrapped():
    base = Plain().eval()
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    (_, first), (_, second) = (in_peft(Plain(), ["head"], seed) for seed in range(2))
    model.add_adapter("a", first)
    model.add_adapter("b", second)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    peft, _ = in_peft(Plain(), ["head"], 0)
    with torch.no_grad():
        expected = peft(input_ids=ids)
    found = model(adapters=["a", "a"], input_ids=ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
    with pytest.raises(UnsupportedInputError, match="module head .*Plain has no token embedding"):
        model(adapters=["a", "b"], input_ids=ids)


def test_entries_per_token_follow_the_axis_of_the_tokens():
    """XLNet's head sees rows first, its layers see tokens first; here both are as many."""
    pair = Pair("xlnet", ["layer_1", "lm_loss"])
    ids = inputs_of("xlnet", 3, 3, seed=1)["input_ids"]
    rows = [["a", None, "b"], [None, "b", "b"], ["b", "a", "a"]]
    found = pair.model(adapters=rows, input_ids=ids).logits
    for row, entries in enumerate(rows):
        alone = pair.model(adapters=[entries], input_ids=ids[row : row + 1]).logits[0]
        torch.testing.assert_close(found[row], alone, rtol=0, atol=BOUND)


class Changed(Plain):
    """A model that does something to hidden states before its head."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        return self.head(self.change(self.embedding(input_ids)))


def changed_model(change):
    model = MultiLoRAModel(Changed(change).eval(), "torch_ref", max_rank=3)
    for seed, adapter in enumerate("ab"):
        model.add_adapter(adapter, in_peft(Plain(), ["head"], seed)[1])
    return model


def test_rows_that_depend_on_each_other_are_refused():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    model = changed_model(lambda hidden: hidden - hidden.mean(0))
    with pytest.raises(UnsupportedInputError, match="module head .*independent rows"):
        model(adapters=["a", "b"], input_ids=ids)
    changed_model(lambda hidden: hidden - hidden.mean(1, keepdim=True))(
        adapters=["a", "b"], input_ids=ids
    )


def test_entries_per_token_need_tokens_in_order():
    ids, rows = torch.tensor([[1, 2, 3], [4, 5, 6]]), [["a", "b", "b"], "a"]
    model = changed_model(lambda hidden: hidden.flip(1))
    with pytest.raises(UnsupportedInputError, match="module head .*which token"):
        model(adapters=rows, input_ids=ids)
    plain = changed_model(lambda hidden: hidden)
    flipped = model(adapters=["a", "b"], input_ids=ids).flip(1)
    assert torch.equal(flipped, plain(adapters=["a", "b"], input_ids=ids))
    found = plain(adapters=rows, input_ids=ids)
    for name, start, end in (("a", 0, 1), ("b", 1, 3)):
        whole = plain(adapters=[name, "a"], input_ids=ids)
        torch.testing.assert_close(found[0, start:end], whole[0, start:end], rtol=0, atol=BOUND)
    same = plain(adapters=[["a"] * 3, [None] * 3], input_ids=ids)
    assert torch.equal(same, plain(adapters=["a", None], input_ids=ids))


def test_entries_per_token_follow_tokens_that_are_cached():
    """Latent attention computes keys and values of cached tokens anew in every step."""
    pair = Pair("deepseek_v3", ["kv_b_proj", "o_proj"])
    ids = inputs_of("deepseek_v3", 2, 6, seed=1)["input_ids"]
    rows = [[None] * 4 + ["a"] * 2, ["b"] * 3 + ["a"] * 3]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = pair.model.generate(ids, adapters=rows, **settings)
    whole = pair.model.generate(ids, adapters=rows, use_cache=False, **settings)
    assert torch.equal(cached, whole)
    head = pair.model(adapters=[row[:3] for row in rows], input_ids=ids[:, :3], use_cache=True)
    pair.refuses(
        [row[3:] for row in rows],
        "lists have no entries for them",
        input_ids=ids[:, 3:],
        past_key_values=head.past_key_values,
    )


def test_a_cache_of_unknown_length_is_refused_where_adapters_differ_by_token():
    pair = Pair("rwkv", ["output"])
    ids = inputs_of("rwkv", 2, 3, seed=1)["input_ids"]
    with pytest.raises(UnsupportedInputError, match="state does not tell how many tokens"):
        pair.model.generate(ids, adapters=[["a", "b", "a"], None], max_new_tokens=2, pad_token_id=0)


def test_a_cache_of_states_alone_is_refused_where_adapters_differ_by_token():
    base = sweep.build("Mamba")
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    model.add_adapter("a", in_peft(base, ["in_proj"], 0)[1])
    ids = torch.arange(4, 7)[None]
    settings = {"max_new_tokens": 2, "pad_token_id": 0}
    with pytest.raises(
        UnsupportedInputError, match="(cache|cache_params) does not tell how many tok"
    ):
        model.generate(ids, adapters=[[None, "a", "a"]], **settings)
    model.generate(ids, adapters=[[None, "a", "a"]], use_cache=False, **settings)


def test_a_model_without_linear_layers_is_prepared():
    class Embedding(Plain):
        def __init__(self):
            super().__init__()
            del self.embedding, self.head
            self.weight = torch.nn.Parameter(torch.ones(64))

        def forward(self, input_ids):
            return self.weight[input_ids]

    model = MultiLoRAModel(Embedding().eval(), "torch_ref")
    with model.prepare([None, None], tokens=3) as step:
        found = model(adapters=step, input_ids=torch.tensor([[1, 2, 3]] * 2))
    assert torch.equal(found, torch.ones(2, 3))


def test_one_plan_serves_all_modules_of_a_batch_of_one_adapter(monkeypatch):
    pair = Pair("clip", ["q_proj", "v_proj", "fc1"])
    made, prepare = [], TorchRefBackend.prepare_batch
    monkeypatch.setattr(
        TorchRefBackend, "prepare_batch", lambda self, batch: made.append(1) or prepare(self, batch)
    )
    pair.model(adapters=["a", "a"], **inputs_of("clip", 2, 5, seed=1))
    assert len(made) == 1  # 2 rows of 5 tokens, and 2 images of 5 patches


def test_an_input_given_by_name_is_refused():
    class ByName(Plain):
        def forward(self, input_ids):
            return self.head(input=self.embedding(input_ids))

    model = MultiLoRAModel(ByName().eval(), "torch_ref", max_rank=3)
    model.add_adapter("a", in_peft(Plain(), ["head"], 0)[1])
    with pytest.raises(UnsupportedInputError, match="module head is called with arguments by name"):
        model(adapters=["a"], input_ids=torch.tensor([[1, 2]]))


class Odd(torch.nn.Module):
    """A mixin: the module takes or returns a tensor, or what `takes` or `returns` makes of one."""

    takes = returns = None

    def forward(self, input):
        y = super().forward(input if self.takes is None else input[0])
        return y if self.returns is None else self.returns([y, input])


class OddLinear(Odd, torch.nn.Linear):
    pass


class OddEmbedding(Odd, torch.nn.Embedding):
    pass


class OddModel(Plain):
    """A language model whose modules may take or return something else than tensors."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = OddEmbedding(64, 16), OddLinear(16, 16)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        x = input_ids
        for module in (self.embedding, self.linear):
            x = module(x if module.takes is None else module.takes([x]))
            x = x if module.returns is None else x[0]
        return self.head(x)


ODD = [
    ("embedding", {"returns": tuple}, "returned a tuple of Tensor, Tensor"),
    ("embedding", {"takes": list}, "was given a list of Tensor"),
    ("linear", {"returns": tuple}, "returned a tuple of Tensor, Tensor"),
    ("linear", {"takes": list}, "was given a list of Tensor"),
]
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(("path", "odd", "said"), ODD)
def test_a_module_without_one_tensor_takes_no_adapter(path, odd, said):
    base = OddModel().eval()
    vars(base.get_submodule(path)).update(odd)
    expected = base(input_ids=IDS)
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    with pytest.raises(UnsupportedInputError, match=f"{path}: it {said} instead of one"):
        model.add_adapter("a", in_peft(OddModel(), [path], 0)[1])
    model.add_adapter("head", in_peft(OddModel(), ["head"], 0)[1])
    found = model(adapters=["head", None], input_ids=IDS)
    assert found[1].equal(expected[1]) and not found[0].equal(expected[0])


@pytest.mark.parametrize("how", ["inference", "training", "compiled"])
@pytest.mark.parametrize(("path", "odd", "said"), ODD)
def test_a_module_that_the_trial_saw_with_tensors_is_refused_when_it_runs(path, odd, said, how):
    base = OddModel().eval()
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    if how == "training":
        model.new_adapter("a", peft.LoraConfig(r=3, target_modules=[path]))
    else:
        model.add_adapter("a", in_peft(OddModel(), [path], 0)[1])
    vars(base.get_submodule(path)).update(odd)
    if how == "compiled":
        base.compile(backend="eager")
    message = rf"module {path} \(Odd\w+\): it {said} instead of one tensor\n  allowed"
    with pytest.raises(UnsupportedInputError, match=message):
        model(adapters=["a", "a"], input_ids=IDS)
