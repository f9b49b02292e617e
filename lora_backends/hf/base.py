"""What can be wrapped: a Transformers model itself, and nothing around it."""

from __future__ import annotations

from torch import nn

from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown


def check_base(base: object) -> None:
    """Refuse a base model whose modules do not have the names that adapters were trained for.

    Raises:
        InvalidInputError: it is no torch module.
        UnsupportedInputError: a model inside another module: that of torch.compile, of PEFT or
            of a parallel wrapper.
    """
    name = type(base).__name__
    if not isinstance(base, nn.Module):
        raise InvalidInputError(
            f"base is no model\n  given: {shown(base)}\n  allowed: a Transformers model\n"
            f"  to do: pass what AutoModelForCausalLM.from_pretrained(...) returns"
        )
    children = dict(base.named_children())
    around, to_do = "", ""
    if "_orig_mod" in children:  # the only mark that torch.compile leaves on its module
        around = "was compiled"
        to_do = "wrap the model first, and compile model.base: see prepare() and using()"
    elif type(base).__module__.partition(".")[0] == "peft":
        around, to_do = "holds adapters of PEFT already", "pass base.unload(), or the model itself"
    elif isinstance(base, nn.DataParallel | nn.parallel.DistributedDataParallel):
        around, to_do = "is wrapped for parallel training", "pass base.module"
    if around:
        raise UnsupportedInputError(
            f"the base model {around}\n  given: {name}\n  allowed: a Transformers model itself\n"
            f"  to do: {to_do}"
        )
