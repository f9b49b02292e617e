"""`TrainingModule`, alone and in Transformers' `Trainer`."""

import copy

import peft
import pytest
import safetensors.torch
import torch
import transformers
from helpers.adapters.training import PLAIN, WIDE, Pair, batch, causal_loss, tiny, wrapped
from helpers.distributed import trainer_of

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.hf import TrainingModule

ROWS = ["a", None, "b", "a"]


def test_parameters_and_keys_are_those_of_the_adapters_alone():
    module = trainer_of(tiny())
    expected = {
        f"{name}.{key}": parameter
        for name in "ab"
        for key, parameter in module.model.adapter_parameters(name).items()
    }
    found = dict(module.named_parameters())
    assert list(found) == list(expected)
    assert all(found[key] is parameter for key, parameter in expected.items())
    assert all(module.get_parameter(key) is parameter for key, parameter in expected.items())


def test_a_state_is_saved_as_copies_and_loaded_in_place(tmp_path):
    module, other = trainer_of(tiny()), trainer_of(tiny())
    safetensors.torch.save_file(module.state_dict(), tmp_path / "state.safetensors")
    state = safetensors.torch.load_file(tmp_path / "state.safetensors")
    assert state.keys() == dict(module.named_parameters()).keys()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    ids, _ = batch(4)
    logits = [each(adapters=ROWS, input_ids=ids).logits for each in (module, other)]
    assert torch.equal(*logits)
    assert all(value is dict(module.named_parameters())[key]
               for key, value in module.state_dict(keep_vars=True).items())  # fmt: skip


def test_adapters_may_have_names_of_any_kind():
    model = wrapped(tiny())
    names = ["train", "v1.2", "a/b", "self.names"]
    for name in names:
        model.new_adapter(name, peft.LoraConfig(**PLAIN))
    module = TrainingModule(model, names)
    assert {key.partition(".base_model")[0] for key in module.state_dict()} == {*names}
    module.load_state_dict(module.state_dict())
    ids, labels = batch(4)
    module(adapters=names, input_ids=ids, labels=labels).loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_the_loss_is_the_sum_of_the_means_and_counts_replace_the_numbers_of_labels():
    module = trainer_of(tiny(dtype=torch.float64))
    ids, labels = batch(4)
    out = module(adapters=ROWS, input_ids=ids, labels=labels)
    losses = module.model.adapter_losses(out.logits, labels, adapters=ROWS)
    assert list(out)[0] == "loss" and torch.equal(out.loss, sum(losses.values()))
    counts = module.counts_of(labels, ROWS)
    assert counts.tolist() == [(labels[rows, 1:] != -100).sum() for rows in ([0, 3], [2])]
    same = module(adapters=ROWS, input_ids=ids, labels=labels, counts=counts).loss
    assert torch.allclose(same, out.loss, rtol=1e-12)
    scaled = module(
        adapters=ROWS, input_ids=ids, labels=labels, counts=counts * torch.tensor([2, 0.5])
    ).loss
    assert torch.allclose(scaled, losses["a"] / 2 + losses["b"] * 2, rtol=1e-12)
    nothing = module.counts_of(torch.full_like(labels, -100), ROWS)
    labels[:] = -100
    assert module(adapters=ROWS, input_ids=ids, labels=labels, counts=nothing).loss == 0
    with pytest.raises(InvalidInputError, match=r"counts is \[3\]"):
        module(adapters=ROWS, input_ids=ids, labels=labels, counts=torch.ones(3))
    with pytest.raises(InvalidInputError, match="counts lacks b"):
        module.model.adapter_losses(out.logits, labels, ROWS, {"a": 1})


def test_rows_of_adapters_that_are_only_loaded_have_no_loss(tmp_path):
    module = trainer_of(tiny())
    module.model.save_adapter("a", tmp_path)
    module.model.load_adapter("frozen", tmp_path)
    ids, labels = batch(2)
    loss = module(adapters=["frozen", "b"], input_ids=ids, labels=labels).loss
    own = module(adapters=["b"], input_ids=ids[1:], labels=labels[1:]).loss
    assert torch.allclose(loss, own)
    with torch.no_grad():
        assert module(adapters=["frozen", None], input_ids=ids, labels=labels).loss == 0


def test_batches_that_train_nothing_or_another_adapter_are_refused():
    module = trainer_of(tiny(), names="a")
    ids, labels = batch(2)
    for rows in ([None, None], ["a", "b"], ["b", None]):
        with pytest.raises(InvalidInputError, match="does not train the adapters of this module"):
            module(adapters=rows, input_ids=ids, labels=labels)
        module(adapters=rows, input_ids=ids)
    for rows in ([["a"] * 9, "a"], [{"a": 1.0}, "a"]):
        with torch.no_grad(), pytest.raises(UnsupportedInputError):
            module(adapters=rows, input_ids=ids, labels=labels)


def test_names_that_are_wrong_are_refused():
    model = trainer_of(tiny()).model
    for names in ("ab", [], ["a", "a"]):
        with pytest.raises(InvalidInputError, match="allowed: a list of names"):
            TrainingModule(model, names)
    with pytest.raises(InvalidInputError, match="not loaded"):
        TrainingModule(model, ["a", "c"])


def test_a_module_whose_parameters_are_not_those_of_the_model_is_refused():
    ids, _ = batch(1)
    module = trainer_of(tiny())
    module.model.unload_adapter("b")
    module.model.new_adapter("b", peft.LoraConfig(**PLAIN))
    with pytest.raises(InvalidInputError, match="'b' was unloaded"):
        module(adapters=["a"], input_ids=ids)
    module = trainer_of(tiny())
    module.load_state_dict(module.state_dict(), assign=True)
    with pytest.raises(InvalidInputError, match="were replaced"):
        module(adapters=["a"], input_ids=ids)
    module = trainer_of(tiny())
    assert module.to("cpu") is module and module.float() is module
    before = [parameter.data_ptr() for parameter in module.parameters()]
    for change in (module.double, lambda: module.to("meta")):
        with pytest.raises(InvalidInputError, match="cannot be moved"):
            change()
    assert before == [parameter.data_ptr() for parameter in module.parameters()]
    with pytest.raises(UnsupportedInputError, match="cannot be copied"):
        copy.deepcopy(module)
    replica = module._replicate_for_data_parallel()
    with pytest.raises(UnsupportedInputError, match="DistributedDataParallel"):
        replica(adapters=["a"], input_ids=ids)


def test_modes_and_checkpointing_are_the_base_models():
    module = trainer_of(tiny())
    assert not module.training
    assert module.train() is module and module.model.base.training
    module.activation_checkpointing_enable({"use_reentrant": False})
    assert module.model.base.is_gradient_checkpointing
    assert module.eval() is module and not module.model.base.training


def collate(examples):
    """Stack the tensors of examples, and keep the adapters as a list."""
    tensors = {key: torch.stack([e[key] for e in examples]) for key in ("input_ids", "labels")}
    return tensors | {"adapters": [e["adapters"] for e in examples]}


def arguments(folder, **options):
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=4, learning_rate=0.1, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0, remove_unused_columns=False, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, **options,
    )  # fmt: skip


@pytest.mark.parametrize("checkpoints", [False, True])
def test_trainer_trains_each_adapter_as_peft_alone_does(tmp_path, checkpoints):
    pytest.importorskip("accelerate")
    model = wrapped(tiny())
    pairs = [Pair(model, n, tiny(), c) for n, c in (("a", PLAIN), ("b", WIDE))]
    module = TrainingModule(model, ["a", "b"])
    rows = ["a", "b", None, "b"] * 4
    ids, labels = batch(16)
    examples = [
        {"adapters": name, "input_ids": i, "labels": at}
        for name, i, at in zip(rows, ids, labels, strict=True)
    ]
    options = {"activation_checkpointing": True} if checkpoints else {}
    trainer = transformers.Trainer(
        module,
        arguments(tmp_path, **options, train_sampling_strategy="sequential"),
        collate,
        examples,
        eval_dataset=examples[:4],
    )
    trainer.train()
    optimizers = [torch.optim.SGD(pair.theirs.values(), lr=0.1) for pair in pairs]
    for at in range(0, 16, 4):
        for pair, optimizer in zip(pairs, optimizers, strict=True):
            pair.peft.train()
            optimizer.zero_grad()
            pair.backward(rows[at : at + 4], ids[at : at + 4], labels[at : at + 4])
            optimizer.step()
    for pair in pairs:
        pair.check(1e-4, "values")
    expected = 0
    for pair in pairs:
        own = [row for row in range(4) if rows[row] == pair.name]
        expected += causal_loss(pair.peft.eval()(input_ids=ids[own]).logits, labels[own]).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-3)
    trainer.save_model(tmp_path / "state")
    state = safetensors.torch.load_file(tmp_path / "state" / "model.safetensors")
    assert all(torch.equal(state[key], p) for key, p in module.named_parameters())
