"""Every text of an embedder or reranker gets the result of PEFT with its adapter alone."""

import copy
import pickle
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers
from helpers.tiny_encoders import (
    ADAPTERS,
    BLEND,
    KINDS,
    TASKS,
    TEXTS,
    TOLERANCE,
    adapters_of,
    by_peft,
    compared,
    dense,
    embedder,
    made,
    rows_of,
    save,
)
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.sentence_transformers import MultiLoRAEncoder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("encoders"))


@pytest.fixture
def make(saved):
    """Return a function that makes an encoder with adapters; all are detached at the end."""
    open_ = []

    def wrapped(name, **options):
        encoder = MultiLoRAEncoder(made(name, saved), backend="torch_ref", max_rank=4, **options)
        open_.append(encoder)
        for adapter in adapters_of(name):
            encoder.load_adapter(adapter, f"{saved[name]}-{adapter}")
        return encoder

    yield wrapped
    for encoder in open_:
        encoder.detach()


@pytest.fixture(scope="module")
def alone(saved):
    """Return a function that runs an encoder with one adapter, by PEFT."""
    encoders = {}

    def run(name, adapter, call):
        if (name, adapter) not in encoders:
            encoders[name, adapter] = by_peft(name, saved, adapter)
        return call(encoders[name, adapter])

    return run


def check(found, name, call, alone):
    found = dense(found)
    for row, adapter in enumerate(rows_of(name)):
        wanted = dense(alone(name, adapter, call))
        bound = TOLERANCE * max(1.0, abs(wanted).max())
        assert abs(found[row] - wanted[row]).max() <= bound, (row, adapter)
        for other in {*adapters_of(name), None} - {adapter}:
            assert abs(found[row] - dense(alone(name, other, call))[row]).max() > 4 * bound


@pytest.mark.parametrize("name", KINDS)
def test_the_sweep_compares_every_kind(name, saved):
    worst, effect = compared(name, saved)
    assert worst <= TOLERANCE < effect / 4


@pytest.mark.parametrize("batch_size", [2, 32])
@pytest.mark.parametrize("name", ["bert", "qwen3", "norms", "tasks", "jina", "masked"])
def test_every_text_is_embedded_with_its_own_adapter(make, alone, name, batch_size):
    options = {"batch_size": batch_size}
    found = make(name).encode(TEXTS, adapters=rows_of(name), **options)
    check(found, name, lambda encoder: encoder.encode(TEXTS, **options), alone)


def test_names_of_tasks_come_from_folders_or_from_add_adapter(saved, alone, tmp_path):
    for task in TASKS:
        shutil.copytree(f"{saved['jina']}-{task}", tmp_path / task)
    encoder = MultiLoRAEncoder(made("jina", saved), backend="torch_ref", max_rank=4)
    encoder.lora.keep_adapters(folder=tmp_path)
    found = encoder.encode(TEXTS, adapters=rows_of("jina"))
    check(found, "jina", lambda each: each.encode(TEXTS), alone)
    encoder.detach()
    model = made("jina", saved)[0].model
    held = peft.PeftModel.from_pretrained(model, tmp_path / "text-matching", "text-matching")
    # PEFT's own names have no dots
    held.load_adapter(tmp_path / "retrieval.query", "retrieval_query")
    encoder = MultiLoRAEncoder(made("jina", saved), backend="torch_ref", max_rank=4)
    encoder.lora.add_adapter("text-matching", held, adapter_name="text-matching")
    encoder.lora.add_adapter("retrieval.query", held, adapter_name="retrieval_query")
    rows = ["text-matching", "retrieval.query"]
    again = encoder.encode([TEXTS[0], TEXTS[2]], adapters=rows)
    assert np.allclose(again, found[[0, 2]], atol=TOLERANCE)
    encoder.detach()


def test_queries_take_their_prompt_and_documents_theirs(make, alone):
    encoder = make("bert")
    found = encoder.encode_query(TEXTS, adapters=ADAPTERS)
    check(found, "bert", lambda e: e.encode_query(TEXTS), alone)
    plain = encoder.encode_document(tuple(TEXTS), adapters=ADAPTERS, convert_to_tensor=True)
    assert abs(np.asarray(plain) - found).max() > 0.01
    check(plain, "bert", lambda e: e.encode_document(TEXTS), alone)


def test_pairs_are_scored_with_their_own_adapter_and_head(make, alone):
    encoder, pairs = make("classifier"), [["the red cat", text] for text in TEXTS]
    check(
        encoder.predict(pairs, adapters=ADAPTERS), "classifier", lambda e: e.predict(pairs), alone
    )
    ranked = encoder.rank("the red cat", TEXTS, adapters=ADAPTERS, return_documents=True)
    scores = {row["corpus_id"]: row["score"] for row in ranked}
    check([scores[i] for i in range(9)], "classifier", lambda e: e.predict(pairs), alone)
    assert all(
        type(row["text"]) is str and row["text"] == TEXTS[row["corpus_id"]] for row in ranked
    )
    one = encoder.predict(tuple(pairs[0]), adapters="law")
    assert one == pytest.approx(scores[0], abs=TOLERANCE)


def test_one_text_one_adapter_for_all_and_a_blend(make):
    encoder = make("bert")
    all_ = encoder.encode(TEXTS, adapters="law")
    assert np.allclose(encoder.encode(TEXTS[3], adapters="law"), all_[3], atol=TOLERANCE)
    assert np.allclose(encoder.encode(np.array(TEXTS), adapters=["law"] * 9), all_, atol=TOLERANCE)
    blended = encoder.encode(TEXTS, adapters=[BLEND, *ADAPTERS[1:]])
    assert abs(blended[0] - all_[0]).max() > 0.01
    inputs = encoder.encoder.preprocess([TEXTS[0]])
    ids = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    hidden = encoder.lora(adapters=[BLEND], **ids).last_hidden_state[0]
    assert np.allclose(blended[0], hidden.mean(0), atol=TOLERANCE)
    assert len(encoder.encode([], adapters=[])) == 0


def test_without_the_wrapper_the_encoder_is_as_it_was(make, saved):
    encoder = make("bert")
    before = embedder(saved["bert"]).encode(TEXTS)
    assert np.array_equal(encoder.encoder.encode(TEXTS), before)
    encoder.encode(TEXTS, adapters=ADAPTERS)
    assert np.array_equal(encoder.encoder.encode(TEXTS), before)
    plain = encoder.detach()
    assert np.array_equal(plain.encode(TEXTS), before)
    assert "preprocess" not in vars(plain) and "forward" not in vars(plain[0].model)


def test_a_generator_and_arrays_are_read_as_lists(make):
    encoder = make("bert")
    wanted = encoder.encode(TEXTS, adapters=ADAPTERS)
    assert np.array_equal(encoder.encode(iter(TEXTS), adapters=np.array(ADAPTERS)), wanted)


def test_a_copy_would_run_the_weights_of_the_original(make):
    encoder = make("bert")
    for held in (encoder, encoder.encoder, encoder.encoder[0].model):
        with pytest.raises(UnsupportedInputError, match="cannot be copied"):
            copy.deepcopy(held)
    with pytest.raises(UnsupportedInputError, match="cannot be copied"):
        pickle.dumps(encoder)
    plain = copy.deepcopy(encoder.detach())
    for parameter in plain.parameters():
        parameter.data.zero_()
    assert not plain.encode(TEXTS).any()


def test_detach_leaves_what_others_replaced(make, saved):
    plain = made("bert", saved)
    inner = plain[0].model
    of_others, forward = [], inner.forward
    inner.forward = lambda *args, **inputs: (of_others.append(1), forward(*args, **inputs))[1]
    replaced = inner.forward
    first = MultiLoRAEncoder(plain, backend="torch_ref", max_rank=4)
    first.detach()
    assert inner.forward is replaced
    second = MultiLoRAEncoder(plain, backend="torch_ref", max_rank=4)
    second.load_adapter("law", f"{saved['bert']}-law")
    first.detach()
    found = second.encode(TEXTS, adapters="law")
    assert np.array_equal(found, make("bert").encode(TEXTS, adapters="law")) and of_others
    second.detach()
    with pytest.raises(InvalidInputError, match="was detached"):
        second.encode(TEXTS, adapters=None)


def test_what_is_refused(make, saved):
    encoder = make("bert")
    for adapters, words in ((["law"], "has 1 entries"), ([None] * 8, "has 8 entries"), (3, "is 3")):
        with pytest.raises(InvalidInputError, match=f"adapters {words} for 9 texts"):
            encoder.encode(TEXTS, adapters=adapters)
    with pytest.raises(InvalidInputError, match=r"adapters\[1\] is \['law', None\]"):
        encoder.encode(TEXTS[:2], adapters=["law", ["law", None]])
    with pytest.raises(InvalidInputError, match="lawn"):
        encoder.encode(TEXTS, adapters="lawn")
    with pytest.raises(UnsupportedInputError, match="adapters go with texts"):
        encoder.encode([np.zeros((3, 4, 4))], adapters="law")
    with pytest.raises(UnsupportedInputError, match="pool"):
        encoder.encode(TEXTS, adapters="law", device=["cpu", "cpu"])
    with pytest.raises(UnsupportedInputError, match="no predict"):
        encoder.predict([TEXTS[:2]], adapters="law")
    with pytest.raises(InvalidInputError, match="no model of sentence-transformers"):
        MultiLoRAEncoder(torch.nn.Linear(2, 2))
    assert np.isfinite(encoder.encode(TEXTS, adapters=ADAPTERS)).all()


def test_a_parameter_that_the_model_also_reads_itself_is_refused(make, monkeypatch):
    kind = transformers.BertForSequenceClassification
    forward = kind.forward

    def shifted(self, *args, **inputs):
        output = forward(self, *args, **inputs)
        output.logits = output.logits + self.classifier.weight.sum()
        return output

    monkeypatch.setattr(kind, "forward", shifted)
    with pytest.raises(UnsupportedInputError, match="reads a parameter in another way"):
        make("classifier")


def test_an_encoder_with_two_models_is_refused(saved):
    from sentence_transformers.sentence_transformer.modules import Router

    parts = [[Transformer(str(saved["bert"]))] for _ in range(2)]
    router = Router.for_query_document(query_modules=parts[0], document_modules=parts[1])
    model = SentenceTransformer(modules=[router, Pooling(16)], device="cpu")
    with pytest.raises(UnsupportedInputError, match="one Transformers model"):
        MultiLoRAEncoder(model)
    assert "preprocess" not in vars(model)


def test_a_pass_that_no_batch_was_read_for_is_refused(make, monkeypatch):
    encoder = make("bert")
    features = encoder.encoder.preprocess(TEXTS[:2])
    monkeypatch.setattr(type(encoder.encoder), "encode", lambda self, inputs: self(features))
    with pytest.raises(UnsupportedInputError, match="no batch with adapters"):
        encoder.encode(TEXTS[:2], adapters="law")
    monkeypatch.setattr(type(encoder.encoder), "encode", lambda self, inputs: inputs)
    with pytest.raises(UnsupportedInputError, match="0 of 2 texts"):
        encoder.encode(TEXTS[:2], adapters="law")
