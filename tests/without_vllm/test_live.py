"""Live adapters as far as they go without vLLM: messages, versions, and what is refused."""

import base64
import json

import pytest
import torch

from lora_backends.errors import InvalidInputError, LoRABackendError, UnsupportedInputError
from lora_backends.integrations.vllm import live
from lora_backends.integrations.vllm.live import messages
from lora_backends.integrations.vllm.live.held import Hold, Version, Versions


class User:
    """A request of vLLM."""

    def __init__(self, request_id="", is_finished=False):
        self.request_id, self.finished = request_id, is_finished

    def is_finished(self):
        return self.finished


@pytest.fixture
def state():
    found = Versions()
    for number in (6, 7):
        found.put("alice", Version(number, found.new_id(), None, 10), keep=1)
    return found


def numbers(versions):
    return [version.number for version in versions]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_back_as_they_were_sent(dtype):
    wide = torch.randn(4, 6).to(dtype)
    sent = {"a": wide, "b": wide.T, "c": wide[:2].requires_grad_(), "empty": wide[:0]}
    data = messages.packed(sent)
    for received in (messages.unpacked(data), messages.unpacked(base64.b64encode(data).decode())):
        assert received.keys() == sent.keys()
        assert all(torch.equal(received[key], sent[key]) for key in sent)
    wide.zero_()
    assert messages.unpacked(data)["a"].any()


@pytest.mark.parametrize("data", [b"", b"12345678", "no base64!", None])
def test_other_messages_are_refused(data):
    with pytest.raises(InvalidInputError, match="safetensors"):
        messages.unpacked(data)


@pytest.mark.parametrize(
    "tensors", [{}, None, {"a": [1.0]}, {1: torch.ones(1)}, {"a": torch.ones(1, device="meta")}]
)
def test_what_are_no_tensors_by_name_is_refused(tensors):
    with pytest.raises(InvalidInputError, match="a dict of tensors"):
        messages.packed(tensors)


def test_an_adapter_beyond_a_message_of_vllm_is_refused():
    huge = torch.ones(1).expand(2**30)
    with pytest.raises(UnsupportedInputError, match=f"given: {2**32} bytes"):
        messages.packed({"a": huge})


@pytest.mark.parametrize("config", [None, "r: 4", {"r": object()}])
def test_what_is_no_configuration_is_refused(config):
    with pytest.raises(InvalidInputError, match="configuration"):
        messages.config_text(config)


def test_an_error_keeps_its_type_on_the_way():
    for error in (InvalidInputError("a"), UnsupportedInputError("b"), LoRABackendError("c")):
        with pytest.raises(type(error), match=str(error)) as raised:
            messages.checked(json.loads(json.dumps(messages.failure(error))))
        assert type(raised.value) is type(error)
    with pytest.raises(InvalidInputError, match="ValueError: of vLLM"):
        messages.checked(messages.failure(ValueError("of vLLM")))
    with pytest.raises(LoRABackendError, match="MemoryError"):
        messages.checked(messages.failure(MemoryError()))
    with pytest.raises(LoRABackendError, match="None"):
        messages.checked(None)


def test_requests_take_the_current_version_or_the_one_they_name(state):
    assert state.asked_for("alice", "/a/folder").number == 7
    assert state.asked_for("any", "live:alice").number == 7
    assert state.asked_for("any", "live:alice@6").number == 6
    assert state.asked_for("bob", "/a/folder") is None
    state.put("alice", state.find("alice", 6))
    assert state.asked_for("alice", "").number == 6
    for path, match in (("live:alic", "did you mean 'alice'"), ("live:alice@5", "no version 5")):
        with pytest.raises(InvalidInputError, match=match):
            state.asked_for("alice", path)


def test_a_name_may_look_like_a_version(state):
    state.put("alice@6", Version(1, state.new_id(), None, 1), keep=1)
    assert state.asked_for("", "live:alice@6").number == 1


def test_a_version_leaves_when_nothing_uses_it_and_it_is_not_kept(state):
    old = state.find("alice", 6)
    running, ended, hold = User(), User(is_finished=True), Hold()
    for user in (running, ended, hold):
        old.users.add(user)
    assert state.take_unused() == []
    running.finished = True
    assert state.take_unused() == []  # a request is being made of it
    del hold, user
    assert state.take_unused() == [old]
    assert state.take_unused() == []
    assert numbers(state.held()["alice"]) == [7]
    old.users.add(User())  # which nothing holds
    assert not old.is_used


def test_a_removed_adapter_leaves_after_its_last_request(state):
    user = User()
    state.find("alice").users.add(user)
    state.remove("alice")
    assert not state.held()
    with pytest.raises(InvalidInputError, match="no live adapter 'alice'"):
        state.remove("alice")
    assert numbers(state.take_unused()) == [6]
    user.finished = True
    assert numbers(state.take_unused()) == [7]


def test_ids_and_numbers_are_not_used_twice(state):
    assert len({state.new_id() for _ in range(5)}) == 5
    state.check_new("alice", 8)
    with pytest.raises(InvalidInputError, match=r"has a version 6(.|\n)*than 6, 7"):
        state.check_new("alice", 6)


def test_samples_of_one_request_take_one_version(state):
    first = User("0_parent-1a2b3c4d")
    state.find("alice", 6).users.add(first)
    assert state.asked_for("alice", "", "1_parent-1a2b3c4d").number == 6
    assert state.asked_for("alice", "", "1_parent-00000000").number == 7
    assert state.asked_for("alice", "", "parent-1a2b3c4d").number == 7


def test_an_engine_is_asked_for():
    with pytest.raises(InvalidInputError, match=r"given: int(.|\n)*AsyncLLM"):
        live.versions(3)


def experts_layer(tp_size=1):
    from types import SimpleNamespace

    return SimpleNamespace(  # 4 experts, hidden 8, 6 inner columns of this process, rank up to 3
        tp_size=tp_size,
        w13_lora_a_stacked=(torch.zeros(2, 4, 3, 8),) * 2,
        w13_lora_b_stacked=(torch.zeros(2, 4, 6, 3),) * 2,
        w2_lora_a_stacked=(torch.zeros(2, 4, 3, 6),),
        w2_lora_b_stacked=(torch.zeros(2, 4, 8, 3),),
    )


def experts_weights(count=4, inner=6, hidden=8):
    from types import SimpleNamespace

    gate = torch.zeros(count, 2, hidden), torch.zeros(count, inner, 2)
    down = torch.zeros(count, 2, inner), torch.zeros(count, hidden, 2)
    a, b = zip(gate, down, gate, strict=True)
    return SimpleNamespace(lora_a=list(a), lora_b=list(b))


def test_experts_fit_their_layer():
    from lora_backends.integrations.vllm.live.reading import _check_experts

    _check_experts(experts_layer(), experts_weights(), "mlp.experts", "memory")
    _check_experts(experts_layer(), experts_weights(count=1), "mlp.experts", "memory")
    _check_experts(experts_layer(2), experts_weights(inner=12), "mlp.experts", "memory")
    for other in (dict(inner=12), dict(inner=5), dict(hidden=7), dict(count=3)):
        with pytest.raises(InvalidInputError, match="'mlp.experts' does not fit the base model"):
            _check_experts(experts_layer(), experts_weights(**other), "mlp.experts", "memory")


def test_modules_are_packed_once():
    from types import SimpleNamespace

    from lora_backends.integrations.vllm.live.reading import pack_once

    calls = []
    for lora in (SimpleNamespace(), SimpleNamespace(lora_backends_packed=True)):
        pack_once(lambda _, lora: calls.append(lora), None, lora)
    assert len(calls) == 1
