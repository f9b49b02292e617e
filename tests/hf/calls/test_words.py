"""Words of PEFT and of Transformers that a wrapped model understands."""

import os
import shutil
import warnings

import pytest
import torch
import transformers
from helpers.sweeps import sweep_variants
from helpers.sweeps.sweep import BOUND, adapt, in_peft
from helpers.sweeps.sweep_variants import Q_V, build, inputs
from tokenizers import Tokenizer, models, pre_tokenizers

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.hf import MultiLoRAModel

NEW = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def llama(tmp_path):
    """A model with two adapters, and what PEFT makes of them."""
    base = build("llama")
    model = MultiLoRAModel(build("llama"), "torch_ref", max_rank=3)
    expected = {None: base}
    for seed, name in enumerate(("a", "b")):
        adapt(base, str(tmp_path / name), seed, **Q_V)
        model.load_adapter(name, tmp_path / name)
        expected[name] = in_peft(base, str(tmp_path / name))
    return model, expected


def tokenizer():
    words = ["<pad>", "<unk>", *"why is the sky blue so far".split()]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )


def test_adapter_names_and_base_are_words_for_adapters_and_none(llama):
    model, _ = llama
    given = inputs("llama")
    ours = model(adapters=["a", None, "b", None], **given).logits
    theirs = model(adapter_names=["a", "__base__", "b", "__base__"], **given).logits
    assert torch.equal(ours, theirs)
    tokens = model.generate(adapter_names=["a", "__base__", "b", "a"], **given, **NEW)
    assert torch.equal(tokens, model.generate(adapters=["a", None, "b", "a"], **given, **NEW))


def test_adapters_are_given_once(llama):
    model, _ = llama
    with pytest.raises(InvalidInputError, match=r"no adapters are given[\s\S]*as_adapter"):
        model(**inputs("llama"))
    with pytest.raises(InvalidInputError, match="both given"):
        model.generate(adapters=["a"] * 4, adapter_names=["a"] * 4, **inputs("llama"))


def test_prepared_adapters_and_names_are_not_given_together(llama):
    model, _ = llama
    step = model.prepare([None] * 4, tokens=inputs("llama")["input_ids"].shape[1])
    with pytest.raises(InvalidInputError, match="are both given"):
        model(adapters=step, adapter_names=["a"] * 4, **inputs("llama"))


def test_the_first_input_may_be_given_by_position(llama):
    model, _ = llama
    ids = inputs("llama")["input_ids"]
    assert torch.equal(
        model(ids, adapters=["a"] * 4).logits, model(input_ids=ids, adapters=["a"] * 4).logits
    )
    with pytest.raises(InvalidInputError, match="2 arguments by position"):
        model(ids, ids, adapters=["a"] * 4)


def test_an_input_by_position_is_the_first_of_the_model_whatever_its_name():
    class Renamed(transformers.LlamaForCausalLM):
        def forward(self, tokens=None, input_ids=None):
            return super().forward(tokens if input_ids is None else input_ids)

    base = build("llama")
    base.__class__ = Renamed
    model = MultiLoRAModel(base, "torch_ref")
    ids = inputs("llama")["input_ids"]
    with pytest.raises(InvalidInputError, match=r"no tokens to run on\n  given: tokens"):
        model(ids, adapters=[None] * 4)
    model(adapters=[None] * 4, input_ids=ids)


def test_an_input_is_not_given_both_by_position_and_by_name(llama):
    model, _ = llama
    ids = inputs("llama")["input_ids"]
    with pytest.raises(InvalidInputError, match="input_ids is given twice"):
        model(ids, adapters=["a"] * 4, input_ids=ids.flip(0))


def test_attributes_are_those_of_the_base_model(llama):
    model, _ = llama
    assert model.config is model.base.config
    assert model.generation_config is model.base.generation_config
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.main_input_name == "input_ids" and model.can_generate()
    model.base.train()
    assert model.training and not model.eval().training
    assert model.to("cpu") is model
    with pytest.raises(InvalidInputError, match="move the base model, then wrap it"):
        model.to("meta")
    assert (
        model.to(torch.float32)
        is model.to("cpu", torch.float32)
        is model.to(torch.ones(1))
        is model
    )
    assert model.to(dtype=torch.float32) is model
    for given in ({"device": torch.bfloat16}, {"dtype": torch.bfloat16}):
        with pytest.raises(InvalidInputError, match="convert the base model, then wrap it"):
            model.to(**given)
    with pytest.raises(InvalidInputError, match="no such device"):
        model.to("gpu")


def test_a_pipeline_generates_with_one_adapter(llama):
    model, expected = llama
    texts = ["why is the sky blue", "so far"]

    def answers(model):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer())
        return pipe(texts, batch_size=2, **NEW)

    assert answers(model.as_adapter("a")) == answers(expected["a"])
    assert answers(model.as_adapter(None)) == answers(expected[None])
    assert answers(model.as_adapter("a")) != answers(model.as_adapter("b"))


def test_a_pipeline_classifies_with_one_adapter(tmp_path):
    base, config = build("bert"), sweep_variants.VARIANTS["SEQ_CLS: BERT"][1]
    adapt(base, str(tmp_path / "a"), 1, std=1.0, **config)
    model = MultiLoRAModel(build("bert"), "torch_ref", max_rank=3)
    model.load_adapter("a", tmp_path / "a")

    def answers(model):
        pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer())
        return pipe(["why is the sky blue", "so far"], batch_size=2, top_k=None)

    found, expected = answers(model.as_adapter("a")), answers(in_peft(base, str(tmp_path / "a")))
    for row, alone in zip(found, expected, strict=True):
        assert [label["label"] for label in row] == [label["label"] for label in alone]
        assert [label["score"] for label in row] == pytest.approx([x["score"] for x in alone])


def trainer(model, folder, rows):
    settings = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[])
    return transformers.Trainer(model=model, args=settings, train_dataset=rows)


def test_a_trainer_predicts_and_evaluates_with_one_adapter(tmp_path):
    base = build("bert")
    adapt(base, str(tmp_path / "a"), 1, std=1.0, **sweep_variants.VARIANTS["SEQ_CLS: BERT"][1])
    model = MultiLoRAModel(build("bert"), "torch_ref", max_rank=3)
    model.load_adapter("a", tmp_path / "a")
    ids = inputs("bert")["input_ids"]
    rows = [{"input_ids": row, "labels": torch.tensor(1), "unused": 1} for row in ids]
    runs = trainer(model.as_adapter("a"), tmp_path, rows)
    with torch.no_grad():
        alone = in_peft(base, str(tmp_path / "a"))(ids, labels=torch.ones(len(ids)).long())
    found = torch.tensor(runs.predict(rows).predictions)
    torch.testing.assert_close(found, alone.logits, rtol=0, atol=BOUND)
    assert runs.evaluate(rows)["eval_loss"] == pytest.approx(alone.loss.item())
    with pytest.raises(
        InvalidInputError, match=r"'a' of this model cannot be trained[\s\S]*TrainingModule"
    ):
        runs.train()
    with pytest.raises(InvalidInputError, match="cannot be trained"):
        model.as_adapter("a").train()


@pytest.mark.parametrize("assistant", ["a model", "the prompt"])
def test_assisted_generation_gives_the_tokens_of_the_adapter(assistant, llama):
    model, expected = llama
    ids = inputs("llama")["input_ids"][:1]
    draft = build("llama")
    settings = {"assistant_model": draft} if assistant == "a model" else {}
    settings = settings or {"prompt_lookup_num_tokens": 2}
    tokens = model.generate(ids, adapters=["a"], **settings, **NEW)
    assert torch.equal(tokens, expected["a"].generate(input_ids=ids, **NEW))


def test_rows_are_divided_by_adapter_where_that_is_asked_for(tmp_path):
    base = build("deberta")
    folders = {name: str(tmp_path / name) for name in "ab"}
    model = MultiLoRAModel(build("deberta"), "torch_ref", max_rank=3)
    for seed, (name, folder) in enumerate(folders.items()):
        adapt(base, folder, seed)
        model.load_adapter(name, folder)
    rows, given = ["a", None, "b", "a"], inputs("deberta")
    with pytest.raises(UnsupportedInputError, match="or pass split=True in this call"):
        model(adapters=rows, **given)
    output = model(adapters=rows, split=True, output_hidden_states=True, **given)
    for row, name in enumerate(rows):
        with torch.no_grad():
            alone = in_peft(base, folders.get(name))(output_hidden_states=True, **given)
        pairs = zip(
            (output.logits, *output.hidden_states),
            (alone.logits, *alone.hidden_states),
            strict=True,
        )
        for ours, theirs in pairs:
            torch.testing.assert_close(ours[row], theirs[row], rtol=0, atol=2e-5)
    plain = model(adapters=rows, split=True, return_dict=False, **given)
    assert type(plain) is tuple and torch.equal(plain[0], output.logits)


def test_what_has_no_rows_is_not_joined(llama):
    model, _ = llama
    given = inputs("llama")
    with pytest.raises(UnsupportedInputError, match="cannot join the outputs (cache|past_key_val)"):
        model(adapters=["a", "b"] * 2, split=True, use_cache=True, **given)
    with pytest.raises(InvalidInputError, match="and not together"):
        model(adapters=["a", "b"] * 2, split=True, logits_as_list=True, **given)
    for wrong in ([], "a"):
        with pytest.raises(InvalidInputError, match="adapters is"):
            model(adapters=wrong, split=True, **given)
    step = model.prepare(["a", "b"] * 2, tokens=given["input_ids"].shape[1])
    for word in ("split", "logits_as_list"):
        with pytest.raises(InvalidInputError, match="go with adapters by name"):
            model(adapters=step, **{word: True}, **given)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache of a machine without a network, with one adapter in it."""
    constants = pytest.importorskip("huggingface_hub.constants")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--an-adapter"
    adapt(build("llama"), str(tmp_path / "saved"), 1, **Q_V)
    shutil.copytree(tmp_path / "saved", repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return tmp_path


def test_the_id_of_a_hub_is_found_in_the_local_cache(cache):
    model = MultiLoRAModel(build("llama"), "torch_ref", max_rank=3)
    model.load_adapter("hub", "someone/an-adapter")
    model.load_adapter("folder", cache / "saved")
    given = inputs("llama")
    one, other = (model(adapters=[name] * 4, **given).logits for name in ("hub", "folder"))
    assert torch.equal(one, other)


@pytest.mark.parametrize("revision", ["v2", "f" * 40, "refs/pr/3"])
def test_an_id_may_have_a_revision_and_a_folder(revision, cache):
    repository = cache / "hub" / "models--someone--an-adapter"
    adapt(build("llama"), str(repository / "snapshots" / ("f" * 40) / "more" / "second"), 2, **Q_V)
    for ref in ("v2", "refs/pr/3"):
        (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text("f" * 40)
    model = MultiLoRAModel(build("llama"), "torch_ref", max_rank=3)
    model.load_adapter("hub", f"someone/an-adapter@{revision}/more/second")
    model.load_adapter("folder", repository / "snapshots" / ("f" * 40) / "more" / "second")
    model.load_adapter("other", "someone/an-adapter@main")
    given = inputs("llama")
    names = ("hub", "folder", "other")
    one, same, other = (model(adapters=[name] * 4, **given).logits for name in names)
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("place", ["@v3", "@main/nowhere", "@main/../main", "/more"])
def test_what_an_id_does_not_have_is_refused(place, cache):
    model = MultiLoRAModel(build("llama"), "torch_ref", max_rank=3)
    with pytest.raises(InvalidInputError):
        model.load_adapter("hub", f"someone/an-adapter{place}")


def test_a_folder_goes_before_the_id_of_a_hub(cache):
    (cache / "someone" / "an-adapter").mkdir(parents=True)
    model = MultiLoRAModel(build("llama"), "torch_ref", max_rank=3)
    with pytest.raises(InvalidInputError, match="there is no adapter_config.json"):
        model.load_adapter("hub", "someone/an-adapter")


def test_an_id_that_is_nowhere_is_refused(cache):
    model = MultiLoRAModel(build("llama"), "torch_ref", max_rank=3)
    with warnings.catch_warnings(), pytest.raises(InvalidInputError) as caught:
        warnings.simplefilter("ignore")
        model.load_adapter("hub", "someone/another")
    assert "neither a folder nor an adapter on the Hugging Face hub" in str(caught.value)
    assert "hf download someone/another" in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_jit_trace_of_a_call_with_adapters_is_refused(llama):
    model, _ = llama
    ids = inputs("llama")["input_ids"]
    step = model.prepare(["a", "b"] * (len(ids) // 2), tokens=ids.shape[1])
    with model.using(step), pytest.raises(UnsupportedInputError, match="torch.jit.trace"):
        torch.jit.trace(lambda ids: model.base(ids).logits, ids)
