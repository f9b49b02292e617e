"""The backend inside SGLang's own modules, without an engine."""

from types import SimpleNamespace

import pytest
import torch

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.integrations import plans as of_plans
from lora_backends.integrations.sglang import backend as of_plugin

SLOTS, RANK, WIDTH = 3, 4, 16
SLICES = (8, 6, 10)
RANKS, SCALINGS = [4, 0, 2], [2.0, 0.0, 0.5]
IDS = {"a": 0, None: 1, "c": 2}  # the slot of each adapter


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_SGLANG", "torch_ref")
    made = of_plugin.BackendForSGLang(SLOTS, torch.device("cpu"), server_args=None)
    made.adopt(SimpleNamespace(uid_to_buffer_id=IDS))
    return made


def batch(ids, lengths, logprob_starts=None):
    """Return a `ForwardBatch` of a prefill, as far as LoRA reads it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(ids),
        lora_ids=ids,
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        extend_seq_lens_cpu=lengths,
        return_logprob=logprob_starts is not None,
        extend_logprob_start_lens_cpu=logprob_starts,
    )


def decode(ids):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=len(ids), lora_ids=ids)


def announce(backend, forward_batch, **graphs):
    indices = [IDS[id_] for id_ in forward_batch.lora_ids]
    backend.prepare_lora_batch(forward_batch, indices, RANKS, SCALINGS, **graphs)


def stacks(num_slices=3, out=24):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(SLOTS, num_slices * RANK, WIDTH, generator=generator)
    return a, torch.randn(SLOTS, out, RANK, generator=generator)


def delta(x, a, b, slots, slices):
    """Return the LoRA of each row by plain products over its adapter's ranks."""
    rows = []
    for row, slot in zip(x, slots, strict=True):
        r = RANKS[slot]
        parts = [
            SCALINGS[slot] * b_s[:, :r] @ (a_s[:r] @ row)
            for a_s, b_s in zip(a[slot].split(RANK), b[slot].split(slices), strict=True)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def offsets(slices):
    return torch.tensor([0, *slices]).cumsum(0)


def test_fused_layers_add_the_lora_of_each_request(backend):
    announce(backend, batch(["c", None, "a"], [2, 1, 3]))
    slots = [2, 2, 1, 0, 0, 0]
    a, b = stacks()
    x, y = torch.randn(6, WIDTH), torch.randn(6, sum(SLICES) + 5)  # columns without LoRA
    wanted = y.clone()
    wanted[:, : sum(SLICES)] += delta(x, a, b, slots, SLICES)
    ends = offsets(SLICES)
    out = backend.run_qkv_lora(x, a, b, ends, ends, 10, base_output=y, n_slices=3)
    assert out is y
    torch.testing.assert_close(y, wanted)
    a, b = stacks(2, 12)
    y = torch.zeros(6, 12)
    backend.run_gate_up_lora(x, a, b, offsets((6, 6)), base_output=y)
    torch.testing.assert_close(y, delta(x, a, b, slots, (6, 6)))


def test_single_layers_defer_the_first_half(backend):
    announce(backend, batch(["a", "c"], [2, 2]))
    a, b = stacks(1, 7)
    x, y = torch.randn(4, WIDTH), torch.zeros(4, 7)
    h = backend.run_lora_a_sgemm(x, a)
    backend.run_lora_b_sgemm(h, b, base_output=y)
    torch.testing.assert_close(y, delta(x, a, b, [0, 0, 2, 2], (7,)))


def test_processes_that_sum_h_get_the_same_as_those_that_sum_once(backend):
    # two halves of the columns of A, as two processes hold them
    announce(backend, batch(["a", None, "c"], [1, 1, 1]))
    a, b = stacks(1, 7)
    x = torch.randn(3, WIDTH)
    wanted = delta(x, a, b, [0, 1, 2], (7,))
    halves = [(x[:, part].contiguous(), a[:, :, part].contiguous()) for part in _halves()]
    once = torch.zeros(3, 7)
    for x_half, a_half in halves:
        layer = SimpleNamespace(
            apply_lora=lambda y, x, a=a_half: backend.run_lora_b_sgemm(
                backend.run_lora_a_sgemm(x, a), b, base_output=y
            )
        )
        once += backend.forward_with_base(
            layer, x_half, lambda: torch.zeros(3, 7), a_half, b, None, None, all_reduce=torch.clone
        )
    torch.testing.assert_close(once, wanted)
    backend._defers = False
    h = sum(backend.run_lora_a_sgemm(*half) for half in halves)
    assert h.shape == (1, 3, RANK) and h.dtype == torch.float32
    y = backend.run_lora_b_sgemm(h, b, base_output=torch.zeros(3, 7))
    torch.testing.assert_close(y, wanted)


def _halves():
    return slice(0, WIDTH // 2), slice(WIDTH // 2, None)


def test_embeddings_read_ids_beyond_the_vocabulary_as_sglang_does(backend):
    announce(backend, batch(["a", "c"], [2, 2]))
    a, b = stacks(1, 7)
    ids, y = torch.tensor([3, WIDTH + 100, 0, WIDTH - 1]), torch.zeros(4, 7)
    h = backend.run_lora_a_embedding(ids, a, vocab_size=WIDTH)
    backend.run_lora_b_sgemm(h, b, base_output=y)
    one_hot = torch.eye(WIDTH)[torch.tensor([3, 0, 0, WIDTH - 1])]
    torch.testing.assert_close(y, delta(one_hot, a, b, [0, 0, 2, 2], (7,)))
    with pytest.raises(UnsupportedInputError, match="added tokens"):
        backend.run_lora_a_embedding(ids, a, WIDTH, torch.zeros(1))


def test_heads_run_on_the_rows_that_are_sampled_pass_by_pass(backend, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_LOGPROB_CHUNK", "1")
    monkeypatch.setenv("SGLANG_LOGPROB_CHUNK_SIZE", "2")
    announce(backend, batch(["a", None, "c"], [3, 2, 4], [1, 2, 1]))
    slots = [0, 0, 1, 2, 2, 2]
    assert backend.lm_head_batch_info.expected_tokens == len(slots)
    a, b = stacks(1, 7)
    x = torch.randn(len(slots), WIDTH)
    wanted = delta(x, a, b, slots, (7,))

    def head(x, info):
        h = backend.run_lora_a_sgemm(x, a, pruned_batch_info=info)
        y = torch.zeros(x.shape[0], 7)
        return backend.run_lora_b_sgemm(h, b, base_output=y, pruned_batch_info=info)

    torch.testing.assert_close(head(x, backend.lm_head_batch_info), wanted)
    passes = backend.lm_head_pass_batch_infos
    assert [each.expected_tokens for each in passes] == [2, 2, 2]
    found = [head(part, info) for part, info in zip(x.split(2), passes, strict=True)]
    torch.testing.assert_close(torch.cat(found), wanted)
    with pytest.raises(InvalidInputError, match="3 rows(.|\n)*2 rows"):
        head(x[:3], passes[0])


@pytest.mark.parametrize("rows", [2, 4])
def test_other_rows_than_the_batch_has_are_refused(backend, rows):
    announce(backend, decode(["a", "c", None]))
    a, b = stacks(1, 7)
    with pytest.raises(InvalidInputError, match=f"{rows} rows(.|\n)*3 rows"):
        backend.run_lora_b_sgemm(
            backend.run_lora_a_sgemm(torch.ones(rows, WIDTH), a), b, base_output=torch.ones(rows, 7)
        )


def test_an_adapter_in_another_slot_than_announced_is_refused(backend):
    with pytest.raises(InvalidInputError, match="given: gone"):
        backend.prepare_lora_batch(decode(["gone"]), [0], RANKS, SCALINGS)


def test_a_batch_before_the_pool_was_seen_is_refused(backend):
    backend._pool = None
    with pytest.raises(UnsupportedInputError, match="memory pool"):
        announce(backend, decode(["a"]))


def test_rows_of_a_graph_may_be_padded_and_follow_each_batch(backend):
    a, b = stacks(1, 7)
    x = torch.randn(8, WIDTH)
    for ids in (["a", "c", None], ["c"], [None, None], ["a"] * 8):
        announce(backend, decode(ids), use_decode_cuda_graph=True)
        y = torch.zeros(8, 7)
        backend.run_lora_b_sgemm(backend.run_lora_a_sgemm(x, a), b, base_output=y)
        slots = [*(IDS[id_] for id_ in ids), *[1] * (8 - len(ids))]
        torch.testing.assert_close(y, delta(x, a, b, slots, (7,)))


class Recorder:
    """A backend for a GPU that records its calls and the batches of its plans."""

    name, cuda_graphs, device = "recorder", True, torch.device("cuda")

    def __init__(self):
        self.runs = []

    def prepare_batch(self, batch, out=None, capacity=None):
        plan = out or SimpleNamespace(capacity=capacity, refills=[])
        plan.refills.append(batch.token_slots.tolist())
        return plan

    def run_linear(self, x, weights, plan, y):
        self.runs.append((x.shape[0], plan.refills[-1]))


@pytest.fixture
def on_gpu(backend, monkeypatch):
    """Return the backend with recorders in the place of plans on a GPU."""
    state = SimpleNamespace(now=False, shapes=False)
    monkeypatch.setattr(of_plans, "is_capturing", lambda device: state.now)
    monkeypatch.setattr(of_plugin, "_is_capturing_shapes", lambda: state.shapes)
    recorder = Recorder()
    for name in ("_decoded", "_prefilled", "_head"):
        setattr(backend, name, of_plans.Plans(recorder, SLOTS, 64, grows=True))
    a, b = stacks(1, 7)

    def run(rows):
        h = backend.run_lora_a_sgemm(torch.ones(rows, WIDTH), a)
        backend.run_lora_b_sgemm(h, b, base_output=torch.ones(rows, 7))

    return SimpleNamespace(backend=backend, recorder=recorder, state=state, run=run)


def test_graphs_keep_the_kernels_although_they_are_captured_without_adapters(on_gpu):
    state, recorder = on_gpu.state, on_gpu.recorder
    state.shapes = True
    announce(on_gpu.backend, decode([None] * 8), use_decode_cuda_graph=True)
    on_gpu.run(8)  # warms up
    state.now = True
    on_gpu.run(8)
    state.now = state.shapes = False
    assert [slots for _, slots in recorder.runs] == [[row % SLOTS for row in range(8)]] * 2
    captured = on_gpu.backend._decoded.of(8)
    announce(on_gpu.backend, decode(["c", None]), use_decode_cuda_graph=True)
    assert captured.refills[-1] == [2, -1], "a replay runs no Python"
    announce(on_gpu.backend, decode([None] * 3), use_decode_cuda_graph=True)
    assert captured.refills[-1] == [-1] * 3, "no adapter, also where all rows are base rows"


def test_a_batch_that_is_served_while_graphs_are_captured_keeps_its_adapters(on_gpu):
    on_gpu.state.shapes = True
    announce(on_gpu.backend, decode(["c", None]), use_decode_cuda_graph=True)
    on_gpu.run(2)
    assert on_gpu.recorder.runs == [(2, [2, -1])]


def test_sglang_tells_when_it_captures(backend, monkeypatch):
    from sglang.srt.model_executor.runner_utils import capture_mode

    assert not of_plugin._is_capturing_shapes()
    with capture_mode.model_capture_mode():
        assert of_plugin._is_capturing_shapes()
    monkeypatch.setattr(capture_mode, "is_in_breakable_cuda_graph", lambda: True)
    assert capture_mode.get_is_capture_mode() and not of_plugin._is_capturing_shapes()


def test_a_prefill_leaves_the_plans_of_decode_graphs_alone(on_gpu):
    state, backend = on_gpu.state, on_gpu.backend
    announce(backend, decode(["a"] * 8), use_decode_cuda_graph=True)
    on_gpu.run(8)
    state.now = True
    on_gpu.run(8)
    state.now = False
    captured = backend._decoded.of(8)
    seen = len(captured.refills)
    announce(backend, batch(["c"], [5]), use_prefill_cuda_graph=True)
    on_gpu.run(16)  # padded
    assert on_gpu.recorder.runs[-1] == (16, [2] * 5)
    assert len(captured.refills) == seen


def test_base_rows_alone_run_nothing_outside_of_graphs(on_gpu):
    announce(on_gpu.backend, decode([None] * 8))
    on_gpu.run(8)
    assert on_gpu.recorder.runs == []


def test_ranks_and_scalings_change_in_place(backend):
    a, b = stacks(1, 7)
    layer = backend._layer(a, b)
    ranks, scalings = layer.ranks, layer.scalings
    announce(backend, decode(["a", "c"]))
    assert ranks.tolist() == [[4], [0], [2]] and scalings.tolist() == [[2], [0], [0.5]]
    backend.prepare_lora_batch(decode(["a"]), [0], [1, 0, 0], [3.0, 0, 0])
    assert ranks.tolist() == [[1], [0], [2]] and scalings.tolist() == [[3], [0], [0.5]]
    assert backend._layer(a, b) is layer


def test_pools_that_take_the_place_of_another_bring_their_own_layers(backend):
    a, b = stacks(1, 7)
    layer = backend._layer(a, b)
    backend.adopt(SimpleNamespace(uid_to_buffer_id=IDS))
    assert backend._layer(a, b) is not layer
