"""A few hundred random calls and command lines in every run; `tests.fuzz` runs more."""

import pytest

pytest.importorskip("peft", reason="the modules beside are made with PEFT's functions")

from fuzz.calls import run as calls
from fuzz.commands import run as commands
from fuzz.running import new_result, run_cases

from lora_backends.dispatch.gradients import differentiate


def outcomes(opened, cases, **given):
    result = new_result(seed=0)
    with opened(0, **given) as run:
        run_cases(run, cases, result, lambda _: None)
    assert result["faults"] == []
    return result["outcomes"]


def test_a_command_line_or_a_configuration_gives_a_result_or_a_message_of_one_screen():
    found = outcomes(commands.opened, 120)
    assert found["config made"] > 5 and found["config refused: InvalidInputError"] > 20
    for command in ("bench", "explain"):
        assert found[f"{command}: done"] > 1 and found[f"{command}: refused"] > 3


def test_a_call_is_right_or_refused_with_a_typed_error_before_anything_is_written():
    found = outcomes(calls.opened, 300, shares=("torch_ref",))
    assert found["torch_ref: right"] > 50 and found["torch_ref: experts: right"] > 5
    assert found["torch_ref: InvalidInputError"] > 50
    assert found["torch_ref: gradients: right"] > 10
    assert found["torch_ref: experts: gradients: right"] > 1
    assert found["torch_ref: batch: InvalidInputError"] > 3


class Wrong:
    """torch_ref with one fault."""

    def __init__(self, backend, fault):
        self._backend, self._fault = backend, fault

    def __getattr__(self, name):
        found = getattr(self._backend, name)
        return (
            (lambda *given, **more: self._fault(found, *given, **more)) if "run" in name else found
        )


def _off(run, *given, **more):
    return run(*given, **more).mul_(1.01)


def _untyped(run, *given, **more):
    try:
        return run(*given, **more)
    except ValueError as error:
        raise KeyError(str(error)) from error


def _writes_first(run, x, weights, plan, base_output=None, **more):
    if isinstance(base_output, calls.torch.Tensor) and base_output.is_floating_point():
        base_output.detach().zero_()
    return run(x, weights, plan, base_output, **more)


@pytest.mark.parametrize("fault", [_off, _untyped, _writes_first])
def test_a_wrong_backend_is_found(fault, monkeypatch):
    make = calls.get_backend
    monkeypatch.setattr(calls, "get_backend", lambda *given: Wrong(make(*given), fault))
    with pytest.raises(AssertionError):
        outcomes(calls.opened, 60, shares=("torch_ref",))


def test_a_wrong_gradient_is_found(monkeypatch):
    def off(*given, run=differentiate.run_backward):
        return [None if gradient is None else 1.01 * gradient for gradient in run(*given)]

    monkeypatch.setattr(differentiate, "run_backward", off)
    with pytest.raises(AssertionError, match="the gradient of"):
        outcomes(calls.opened, 60, shares=("torch_ref",))
