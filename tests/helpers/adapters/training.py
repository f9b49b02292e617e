"""Adapters that PEFT trains alone, each on its own rows, beside a `MultiLoRAModel`."""

import copy
import warnings

import peft
import torch
import transformers

from lora_backends.hf import MultiLoRAModel

VOCAB = 40
PLAIN = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
WIDE = {"r": 8, "lora_alpha": 5, "target_modules": "all-linear", "use_rslora": True}
PATTERNS = {
    "r": 3,
    "target_modules": ["q_proj", "k_proj", "o_proj", "up_proj", "gate_proj"],
    "rank_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 1},
    "alpha_pattern": {"k_proj": 3},
}


def tiny(kind="llama", dtype=torch.float32):
    """Return the same random model at each call."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    elif kind == "qwen":
        config = transformers.Qwen2Config(**sizes, tie_word_embeddings=True)
        model = transformers.Qwen2ForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    return model.to(dtype).eval()


def wrapped(base, backend="torch_ref", **options):
    return MultiLoRAModel(base, backend, **{"max_adapters": 4, "max_rank": 9, **options})


def by_peft(base, config, seed=0, folder=None):
    """Return a PEFT model in training, with the start that it draws after a seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if folder is not None:
            return peft.PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
        torch.manual_seed(seed)
        return peft.get_peft_model(base, peft.LoraConfig(**config)).eval()


def parameters_of(peft_model):
    """Return the parameters of a PEFT model by the names that it saves."""
    return {
        name.replace(".default", ""): parameter
        for name, parameter in peft_model.named_parameters()
        if "lora_" in name
    }


@torch.no_grad()
def shake(*parameters, seed=3, std=0.3):
    """Give parameters of the same names the same random values."""
    generator = torch.Generator().manual_seed(seed)
    for name, first in parameters[0].items():
        values = std * torch.randn(first.shape, generator=generator)
        for each in parameters:
            each[name].copy_(values)


class Pair:
    """One adapter of a `MultiLoRAModel`, and PEFT's of the same start."""

    def __init__(self, model, name, base, config, seed=0, std=0.3, **options):
        torch.manual_seed(seed)
        model.new_adapter(name, peft.LoraConfig(**config), **options)
        self.name, self.ours = name, model.adapter_parameters(name)
        self.peft = by_peft(base, config, seed)
        self.theirs = parameters_of(self.peft)
        assert self.ours.keys() == self.theirs.keys()
        if std:
            shake(self.ours, self.theirs, seed=seed + 3, std=std)

    def backward(self, rows, ids, labels, mask=None):
        """Let PEFT compute the loss of this adapter's own rows and its gradients."""
        at = [i for i, name in enumerate(rows) if name == self.name]
        if not at:
            return None
        mask = None if mask is None else mask[at]
        out = self.peft(input_ids=ids[at], attention_mask=mask)
        loss = causal_loss(out.logits, labels[at])
        loss.backward()
        return loss.detach()

    def check(self, bound, what="grad"):
        for name, ours in self.ours.items():
            a, b = ours, self.theirs[name]
            if what == "grad":
                assert (a.grad is None) == (b.grad is None), name
                if a.grad is None:
                    continue
                a, b = a.grad, b.grad
            room = bound * max(1e-3, b.abs().max().item())
            assert (a - b).abs().max().item() <= room, name


def causal_loss(logits, labels):
    """Return the loss of Transformers' causal language models, in the logits' dtype."""
    flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(*flat, ignore_index=-100)


def batch(rows, length=9, seed=1):
    """Return ids and labels, of which some have no loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % 4] = -100
    return ids, labels


def train_step(model, rows, ids, labels, **inputs):
    """Run a forward and a backward of all adapters; return their losses."""
    logits = model(adapters=rows, input_ids=ids, **inputs).logits
    losses = model.adapter_losses(logits, labels, adapters=rows)
    sum(losses.values()).backward()
    return losses


def copied(parameters):
    return {name: copy.deepcopy(parameter.detach()) for name, parameter in parameters.items()}
