"""Training on two processes, whose gradients the tests compare with those of one process."""

import datetime

import peft
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers.adapters.training import PATTERNS, PLAIN, WIDE, batch, shake, tiny, wrapped
from lora_backends.hf import TrainingModule

PROCESSES = 2
ROWS = ["a", None, "b", "a", "b", "b", None, "a"]
APART = ["a", None, "a", None, "b", "b", None, "b"]  # an adapter is absent in each half
WITHOUT = ["a", None, "a", "a", None, "a", None, "a"]  # one is absent everywhere
UPPER = {**PLAIN, "layers_to_transform": [1]}  # its backward needs no weights of layer 0
TIMEOUT = datetime.timedelta(seconds=300)  # of a process whose other one has failed


def trainer_of(base, names="ab", configs=(WIDE, PATTERNS), **options):
    """Return a `TrainingModule` of adapters with the same random values at each call."""
    model = wrapped(base, **options)
    for at, (name, config) in enumerate(zip("ab", configs, strict=True)):
        model.new_adapter(name, peft.LoraConfig(**config))
        shake(model.adapter_parameters(name), seed=at, std=0.1)
    return TrainingModule(model, list(names))


def exact():
    return tiny(dtype=torch.float64)


def sharded(base):
    """Shard a model as its users do: each layer, then the rest."""
    # on the CPU, also where a GPU would be taken by default
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(base, mesh=mesh)


def part_of(rows, rank=None):
    """Return rows, ids and labels of one process, or of all; the second half has fewer labels."""
    ids, labels = batch(len(rows))
    half = len(rows) // PROCESSES
    labels[half:, :4] = -100
    at = slice(None) if rank is None else slice(rank * half, rank * half + half)
    return rows[at], ids[at], labels[at]


def gradients(module):
    """Return the gradients by the parameters' names, without those that are None."""
    return {
        key.removeprefix("module."): parameter.grad
        for key, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def alone(rows, **options):
    """Return the gradients of one process with the whole batch."""
    module = trainer_of(exact(), **options)
    rows, ids, labels = part_of(rows)
    module(adapters=rows, input_ids=ids, labels=labels).loss.backward()
    return gradients(module)


def together(rank, module, rows):
    """Return the gradients of a step of all processes, each with its own rows."""
    wrapper = DistributedDataParallel(module, find_unused_parameters=True)
    rows, ids, labels = part_of(rows, rank)
    counts = module.counts_of(labels, rows)
    dist.all_reduce(counts)
    loss = wrapper(adapters=rows, input_ids=ids, labels=labels, counts=counts / PROCESSES).loss
    loss.backward()
    return gradients(wrapper)


def in_two_batches(rank):
    """Accumulate the gradients of two batches on each process."""
    module = trainer_of(exact())
    wrapper = DistributedDataParallel(module, find_unused_parameters=True)
    rows, ids, labels = part_of(ROWS, rank)
    parts = [(rows[at : at + 2], ids[at : at + 2], labels[at : at + 2]) for at in (0, 2)]
    counts = sum(module.counts_of(labels, rows) for rows, _, labels in parts)
    dist.all_reduce(counts)
    for rows, ids, labels in parts:
        words = {"input_ids": ids, "labels": labels, "counts": counts / PROCESSES}
        wrapper(adapters=rows, **words).loss.backward()
    return gradients(wrapper)


def checkpointed(rank):
    base = sharded(exact())
    base.gradient_checkpointing_enable({"use_reentrant": False})
    return together(rank, trainer_of(base).train(), ROWS)


def fused_then_sharded(rank):
    base = exact()
    module = trainer_of(base, fuse=True)
    sharded(base)
    return together(rank, module, ROWS)


def other_layers(rank):
    """The processes' adapters touch other layers, and the sharded layers have to run in step."""
    module = trainer_of(sharded(exact()), configs=(WIDE, UPPER))
    return together(rank, module, APART)


def an_adapter_each(rank):
    """Each process trains adapters of its own over one sharded base; nothing is reduced."""
    module = trainer_of(sharded(exact()), names="ab"[rank])
    rows, ids, labels = part_of(APART, rank)
    module(adapters=rows, input_ids=ids, labels=labels).loss.backward()
    return gradients(module)


SCENES = {
    "DDP": lambda rank: together(rank, trainer_of(exact()), ROWS),
    "DDP, an adapter on one process": lambda rank: together(rank, trainer_of(exact()), APART),
    "DDP, an adapter on none": lambda rank: together(rank, trainer_of(exact()), WITHOUT),
    "DDP, two batches": in_two_batches,
    "sharded": lambda rank: together(rank, trainer_of(sharded(exact())), ROWS),
    "sharded, checkpointed": checkpointed,
    "fused, then sharded": fused_then_sharded,
    "sharded, other layers": other_layers,
    "an adapter each": an_adapter_each,
}


def work(rank, folder):
    """Be one of the processes: save the gradients of every scene."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=TIMEOUT)
    torch.save({name: scene(rank) for name, scene in SCENES.items()}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
