"""Experts by the hooks of SGLang's runners, against plain products."""

from types import SimpleNamespace

import pytest
import torch

from lora_backends.integrations.sglang import experts, wrapping
from lora_backends.integrations.sglang.backend import BackendForSGLang

SLOTS, EXPERTS, RANK, HIDDEN, INNER, TOP_K = 3, 4, 4, 12, 10, 2
RANKS = [4, 0, 2]
IDS = {"a": 0, None: 1, "c": 2}
SLOTS_OF_ROWS = [2, 0, 1, 0, 2]
BATCH = ["c", "a", None, "a", "c"]


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_SGLANG", "torch_ref")
    wrapping.wrap()
    made = BackendForSGLang(SLOTS, torch.device("cpu"))
    made.adopt(SimpleNamespace(uid_to_buffer_id=IDS))
    return made


def announce(backend, ids=BATCH):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=len(ids), lora_ids=ids)
    backend.prepare_lora_batch(batch, [IDS[id_] for id_ in ids], RANKS, [9.0, 0, 7.0])


def make_layer(backend, shared=False, slices=2, interleaved=False):
    """Return a `FusedMoEWithLoRA` with the stacks that SGLang's pool gives it."""
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    generator = torch.Generator().manual_seed(2)

    def stack(experts, *shape):
        values = torch.randn(SLOTS, experts, *shape, generator=generator)
        for slot, rank in enumerate(RANKS):  # SGLang's rows beyond a rank are zero
            axis = 0 if shape[0] == RANK * slices and shape[1] == HIDDEN else None
            if axis == 0 or shape[0] == RANK:
                values[slot].view(experts, -1, RANK, shape[1])[:, :, rank:] = 0
            else:
                values[slot, :, :, rank:] = 0
        return values

    layer = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.lora_backend = backend
    layer._uses_interleaved_gate_up = interleaved
    layer.set_lora_info(
        stack(1 if shared else EXPERTS, slices * RANK, HIDDEN),
        stack(EXPERTS, slices * INNER, RANK),
        stack(EXPERTS, RANK, INNER),
        stack(1 if shared else EXPERTS, HIDDEN, RANK),
    )
    return layer


def of_expert(stack, slot, expert):
    return stack[slot, expert if stack.shape[1] > 1 else 0]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("slices", "interleaved"), [(2, False), (1, False), (2, True)])
def test_hooks_add_the_lora_of_each_pair(backend, shared, slices, interleaved):
    from sglang.srt.lora.lora_moe_runners import build_lora_hooks

    announce(backend)
    layer = make_layer(backend, shared, slices, interleaved)
    rows = len(BATCH)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, HIDDEN, generator=generator)
    ids = torch.tensor([[0, 3], [1, 2], [2, 0], [3, -1], [1, 0]], dtype=torch.int32)
    weights = torch.rand(rows, TOP_K, generator=generator)
    first = torch.randn(rows, TOP_K, slices * INNER, generator=generator)
    inner = torch.randn(rows * TOP_K, INNER, generator=generator)
    second = torch.randn(rows, TOP_K, HIDDEN, generator=generator)
    wanted = first.clone(), second.clone()
    for row, slot in enumerate(SLOTS_OF_ROWS):
        for j, expert in enumerate(ids[row].tolist()):
            if slot == 1 or expert < 0:
                continue
            a = of_expert(layer.gate_up_lora_a_weights, slot, expert).split(RANK)
            b = of_expert(layer.gate_up_lora_b_weights, slot, expert)
            for s in range(slices):
                columns = (
                    slice(s, None, slices) if interleaved else slice(s * INNER, (s + 1) * INNER)
                )
                wanted[0][row, j, columns] += b[columns] @ (a[s] @ x[row])
            a = of_expert(layer.down_lora_a_weights, slot, expert)
            b = of_expert(layer.down_lora_b_weights, slot, expert)
            wanted[1][row, j] += weights[row, j] * (b @ (a @ inner[row * TOP_K + j]))
    hooks = build_lora_hooks(x, layer._get_lora_info(), ids)
    hooks.after_gate_up(x, first, weights, ids)
    hooks.after_down(inner, second, weights, ids)
    torch.testing.assert_close(first, wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, wanted[1], rtol=1e-4, atol=1e-4)


def test_base_rows_alone_add_nothing(backend):
    from sglang.srt.lora.lora_moe_runners import build_lora_hooks

    announce(backend, [None, None])
    hooks = build_lora_hooks(None, make_layer(backend)._get_lora_info(), None)
    assert hooks.after_gate_up is None and hooks.after_down is None


def test_layers_are_adopted_once_and_again_with_another_pool(backend):
    announce(backend)
    layer = make_layer(backend)
    info = layer._get_lora_info()
    assert layer._get_lora_info() is info
    layer.set_lora_info(*(stack.clone() for stack in _stacks(layer)))
    assert layer._get_lora_info() is not info


def _stacks(layer):
    return (
        layer.gate_up_lora_a_weights,
        layer.gate_up_lora_b_weights,
        layer.down_lora_a_weights,
        layer.down_lora_b_weights,
    )


@pytest.mark.parametrize(
    ("runner", "is_known"), [("triton", True), ("marlin", True), ("flashinfer_trtllm", False)]
)
def test_runners_without_hooks_are_refused(runner, is_known):
    kinds = SimpleNamespace(
        is_triton=lambda: runner == "triton", is_marlin=lambda: runner == "marlin", value=runner
    )
    module = SimpleNamespace(_lora_runner_backend=kinds, _lora_runner=None)
    reason = experts.not_supported_reason(module)
    assert reason == "" if is_known else runner in reason
    module.moe_runner_config = SimpleNamespace(apply_router_weight_on_input=True)
    assert "router" in experts.not_supported_reason(module)
    module.moe_runner_config = SimpleNamespace(no_combine=True)
    assert "not summed" in experts.not_supported_reason(module)
    module._uses_interleaved_gate_up = True  # SGLang's guess from the activation
    module.moe_runner_config = SimpleNamespace(gate_up_interleaved=True)
    assert experts.not_supported_reason(module) == reason
    module.moe_runner_config = SimpleNamespace(gate_up_interleaved=False)
    assert "interleave" in experts.not_supported_reason(module)
