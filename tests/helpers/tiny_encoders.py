"""Tiny encoders of sentence-transformers with adapters, compared with PEFT."""

import warnings
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from lora_backends.sentence_transformers import MultiLoRAEncoder

WORDS = "the a cat dog sat ran on mat fast slow big small red blue sky sea tree".split()
TEXTS = [" ".join(WORDS[i % 5 : i % 5 + 1 + (7 * i) % 11]) for i in range(9)]
ADAPTERS = ["law", None, "news", "law", "news", None, "news", "law", "law"]
TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
"""jina-embeddings-v3's adapters: each of the linear layers and the token embedding."""
BLEND = {"law": 0.5, "news": -1.5}
SIZES = {
    "vocab_size": 5 + len(WORDS), "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
}  # fmt: skip
TOLERANCE = 2e-5  # of the largest value, float32
BASES = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "qwen3": lambda: transformers.Qwen3Model(
        transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8, pad_token_id=0)
    ),
    "norms": lambda: BASES["qwen3"](),
    "tasks": lambda: transformers.XLMRobertaModel(
        transformers.XLMRobertaConfig(**SIZES, type_vocab_size=1, pad_token_id=0)
    ),
    "jina": lambda: transformers.JinaEmbeddingsV3Model(
        transformers.JinaEmbeddingsV3Config(**SIZES, pad_token_id=0)
    ),
    "masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "classifier": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, num_labels=1)
    ),
}
KINDS = {
    "bert": "SentenceTransformer: Bert",
    "qwen3": "SentenceTransformer: Qwen3-Embedding",
    "norms": "SentenceTransformer: saved norms",
    "tasks": "SentenceTransformer: XLMRoberta, five tasks",
    "jina": "SentenceTransformer: jina-embeddings-v3",
    "masked": "SparseEncoder: Bert",
    "classifier": "CrossEncoder: Bert, saved head",
}
"""Names of the kinds in the support table, by base."""

if not hasattr(transformers, "JinaEmbeddingsV3Model"):  # before Transformers had it
    del BASES["jina"], KINDS["jina"]

TARGETS = {
    "qwen3": ["q_proj", "o_proj", "up_proj"],
    "norms": ["q_proj"],
    "tasks": ["query", "key", "value", "dense", "word_embeddings"],
    "jina": ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "dense", "word_embeddings"],
}
SAVED = {  # modules of an adapter's own
    "classifier": {"modules_to_save": ["classifier"], "task_type": "SEQ_CLS"},
    "norms": {"modules_to_save": ["norm"]},
}
OTHERS = ["query", "value", "output.dense"]


def adapters_of(name):
    """Return the adapters of a kind."""
    return TASKS if name in ("tasks", "jina") else ["law", "news"]


def rows_of(name):
    """Return an adapter, or None, for each of `TEXTS`."""
    of_tasks = [TASKS[4], None, *TASKS[:4], None, TASKS[0], TASKS[4]]
    return of_tasks if adapters_of(name) is TASKS else ADAPTERS


def peft_of(base, name, i):
    targets = TARGETS.get(name, OTHERS)
    config = peft.LoraConfig(r=2 + 2 * (i % 2), target_modules=targets, **SAVED.get(name, {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(i)
    for path, parameter in model.named_parameters():
        if "lora_" in path or "modules_to_save" in path:
            parameter.data.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def save(root):
    """Save each base model with its tokenizer and adapters; return the folders by name."""
    found, vocabulary = {}, root / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = transformers.BertTokenizerFast(vocab_file=str(vocabulary))
    for name, make in BASES.items():
        torch.manual_seed(3)
        make().save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        for i, adapter in enumerate(adapters_of(name)):
            torch.manual_seed(3)
            peft_of(make(), name, i).save_pretrained(root / f"{name}-{adapter}")
        found[name] = root / name
    return found


def embedder(folder):
    mode = "lasttoken" if "qwen3" in Path(folder).name else "mean"  # as Qwen3-Embedding pools
    return SentenceTransformer(
        modules=[Transformer(str(folder)), Pooling(16, pooling_mode=mode)], device="cpu",
        prompts={"query": "the red cat"},
    )  # fmt: skip


def made(name, saved):
    folder = str(saved[name])
    if name == "classifier":
        return CrossEncoder(folder, device="cpu")
    return SparseEncoder(folder, device="cpu") if name == "masked" else embedder(folder)


def by_peft(name, saved, adapter):
    """Return an encoder with one adapter, loaded by PEFT; None: without."""
    encoder = made(name, saved)
    if adapter is not None:
        tuned = peft.PeftModel.from_pretrained(encoder[0].model, f"{saved[name]}-{adapter}")
        if name == "classifier":
            encoder[0].model = tuned.base_model.model
    return encoder


def dense(values):
    values = [v.to_dense() if getattr(v, "is_sparse", False) else v for v in values]
    return np.stack([np.asarray(v) for v in values])


def results(encoder, name, **options):
    """Return an embedding, or a score, of each of `TEXTS`."""
    if name == "classifier":
        return dense(encoder.predict([["the red cat", text] for text in TEXTS], **options))
    return dense(encoder.encode(TEXTS, **options))


def compared(name, saved):
    """Compare one batch, with an adapter per text, with PEFT, adapter by adapter.

    Returns:
        The largest difference of a result from PEFT's with the text's own adapter, and the least
        from PEFT's with another adapter or none. Both are relative to the largest value with the
        own adapter where that is over 1.
    """
    encoder = MultiLoRAEncoder(made(name, saved), backend="torch_ref", max_rank=4)
    for adapter in adapters_of(name):
        encoder.load_adapter(adapter, f"{saved[name]}-{adapter}")
    found = results(encoder, name, adapters=rows_of(name))
    encoder.detach()
    every = [*adapters_of(name), None]
    alone = {each: results(by_peft(name, saved, each), name) for each in every}
    differences, effects = [], []
    for row, adapter in enumerate(rows_of(name)):
        scale = max(1.0, float(abs(alone[adapter][row]).max()))
        for each, wanted in alone.items():
            apart = float(abs(found[row] - wanted[row]).max()) / scale
            (differences if each == adapter else effects).append(apart)
    # unlike `max` and `min` these keep a NaN
    return float(np.max(differences)), float(np.min(effects))
