"""The server of the examples: requests over HTTP, each with its adapter."""

import http.client
import importlib.util
import json
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from helpers.deltas import random_checkpoint
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lora_backends.hf import MultiLoRAModel

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

SCRIPT = Path(__file__).parents[3] / "examples" / "server" / "serve.py"


class Words:
    """A tokenizer whose text is its ids."""

    eos_token_id = 39

    def __call__(self, text):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def served(make_base):
    """Return a model, its requests, and a function that posts to the server."""
    spec = importlib.util.spec_from_file_location("serve", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    base = make_base("llama")
    base.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=39, pad_token_id=0
    )
    model = MultiLoRAModel(base, "torch_ref", max_adapters=2, max_rank=4)
    model.keep_adapters()
    for seed, name in enumerate("abc"):  # one more than there are slots
        model.add_adapter(name, random_checkpoint(base, ["q_proj", "down_proj"], seed=seed))
    config = ContinuousBatchingConfig(page_size=8, num_blocks=24, max_batch_tokens=16)
    with model.continuous_batching(continuous_batching_config=config) as requests:
        app = module.Server(model, Words(), requests).app
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]

            def post(body):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("POST", "/v1/completions", json.dumps(body))
                return connection.getresponse()

            yield model, requests, post
        finally:
            server.should_exit = True
            thread.join()


def alone(model, prompt, adapter, new):
    ids = torch.tensor([[int(word) for word in prompt.split()]])
    tokens = model.generate(adapters=[adapter], input_ids=ids, max_new_tokens=new)
    return " ".join(map(str, tokens[0, ids.shape[1] :].tolist()))


def test_requests_over_http_are_answered_with_their_adapters(served):
    model, _, post = served
    prompts = {"base": "1 2 3", "a": "4 5", "b": "6", "c": "4 5"}
    answers = {}

    def ask(name):
        body = {"model": name, "prompt": prompts[name], "max_tokens": 5}
        answers[name] = json.loads(post(body).read())["choices"][0]

    for name in ("base", "a", "c", "b"):  # "b" and "c" lie in the slots: "a" takes one back
        ask(name)
    for name, prompt in prompts.items():
        expected = alone(model, prompt, None if name == "base" else name, 5)
        assert answers[name]["text"] == expected
        assert answers[name]["finish_reason"] in ("length", "stop")


def test_a_stream_tells_each_token_and_joins_to_the_answer(served):
    model, _, post = served
    body = {"model": "a", "prompt": [4, 5], "max_tokens": 4, "stream": True}
    lines = [line for line in post(body).read().decode().split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    assert "".join(part["text"] for part in parts) == alone(model, "4 5", "a", 4)
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["finish_reason"] is not None and len(parts) > 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": "nobody", "prompt": "1"}, "no adapter named 'nobody'"),
        ({"model": "a"}, "are needed"),
        ({"model": "a", "prompt": [77]}, "less than 40"),
        ({"model": "a", "prompt": "1", "max_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_a_wrong_request_gets_an_error_that_says_why(served, body, message):
    response = served[2](body)
    assert response.status == 400
    assert message in json.loads(response.read())["error"]["message"]
    assert served[1].output_router.result_handlers == {}


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}], ids=["left out", "null"])
def test_an_answer_has_16_tokens_where_the_request_gives_no_limit(served, limit):
    body = {"model": "b", "prompt": "6", **limit}
    answer = json.loads(served[2](body).read())["choices"][0]
    assert answer["text"] == alone(served[0], "6", "b", 16)


def test_a_client_that_goes_away_ends_its_request(served):
    model, requests, post = served
    response = post({"model": "a", "prompt": "1", "max_tokens": 150, "stream": True})
    response.read(20)
    response.close()
    deadline = time.monotonic() + 30
    while requests._held and time.monotonic() < deadline:
        time.sleep(0.02)
        post({"model": "base", "prompt": "1", "max_tokens": 1}).read()
    assert not requests._held
