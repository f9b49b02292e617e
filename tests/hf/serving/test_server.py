"""The server of the examples, over HTTP and by the `openai` client."""

import asyncio
import copy
import http.client
import importlib
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from helpers.adapters.deltas import random_checkpoint
from helpers.continuous import settings

from lora_backends.hf import MultiLoRAModel

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
prometheus = pytest.importorskip("prometheus_client.parser")
openai = pytest.importorskip("openai")

FOLDER = Path(__file__).parents[3] / "examples" / "server"
NAMES = "abcdef"


class Words:
    """A tokenizer whose text is its ids."""

    chat_template = "of words"

    def __init__(self):
        self.slow_s = 0.0

    def __call__(self, text, add_special_tokens=True):
        time.sleep(self.slow_s * ("39" in text))
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        if messages[0]["role"] not in ("system", "user"):
            raise KeyError("a role that the template does not know")
        return " ".join(message["content"] for message in messages)


class Served:
    """A server in a thread, with a key, and a model with fewer slots than adapters."""

    def __init__(self, base, folder):
        base.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=39, pad_token_id=0
        )
        sys.path.insert(0, str(FOLDER))
        try:
            module = importlib.import_module("serve")
        finally:
            sys.path.remove(str(FOLDER))
        # A model of its own: before Transformers 5.19 no other call can run beside requests.
        self.reference = MultiLoRAModel(
            copy.deepcopy(base), "torch_ref", max_adapters=len(NAMES), max_rank=4
        )
        self.model = MultiLoRAModel(base, "torch_ref", max_adapters=4, max_rank=4)
        self.model.keep_adapters(folder=folder)
        for seed, name in enumerate(NAMES):
            checkpoint = random_checkpoint(base, ["q_proj", "down_proj"], seed=seed)
            for model in (self.model, self.reference):
                model.add_adapter(name, checkpoint)
        self.requests = module.begin(self.model, settings(num_blocks=60, max_batch_tokens=64))
        self.requests.start()
        self.words = Words()
        self.server = module.Server(
            self.model, self.words, self.requests, "secret", most_bytes=4000, most_characters=2000
        )
        config = uvicorn.Config(self.server.app, port=0, log_level="error", ws="none")
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run)
        self.thread.start()
        while not self.uvicorn.started and self.thread.is_alive():
            time.sleep(0.01)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]

    def close(self):
        self.uvicorn.should_exit = True
        self.thread.join()
        self.requests.stop(hard_stop=True)

    def ask(self, path, body=None, key="secret"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = body if body is None or isinstance(body, bytes) else json.dumps(body)
        headers = {"Authorization": f"Bearer {key}"}
        connection.request("GET" if body is None else "POST", path, body, headers)
        return connection.getresponse()

    def answer(self, **body):
        response = self.ask("/v1/completions", {"model": "a", "prompt": "4 5", **body})
        return response.status, json.loads(response.read())

    def metrics(self):
        text = self.ask("/metrics").read().decode()
        found = [
            s for family in prometheus.text_string_to_metric_families(text) for s in family.samples
        ]
        return {(s.name, s.labels.get("adapter")): s.value for s in found}

    def alone(self, prompt, adapter, new=16):
        ids = torch.tensor([[int(word) for word in prompt.split()]])
        adapters = [None if adapter == "base" else adapter]
        tokens = self.reference.generate(adapters=adapters, input_ids=ids, max_new_tokens=new)
        return " ".join(map(str, tokens[0, ids.shape[1] :].tolist()))

    def client(self, kind=openai.OpenAI):
        return kind(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="secret", max_retries=0, timeout=60
        )


@pytest.fixture(scope="module")
def served(make_base, tmp_path_factory):
    outside, folder = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("adapters")
    (outside / "adapter_config.json").write_text("{}")
    (folder / "link").symlink_to(outside)
    served = Served(make_base("llama"), folder)
    yield served
    served.close()


def test_200_clients_at_once_are_all_answered_with_their_adapters(served):
    names = ["base", *NAMES]
    expected = {name: served.alone("1 2 3", name, 3) for name in names}

    async def ask():
        async with served.client(openai.AsyncOpenAI) as client:
            calls = [
                client.completions.create(model=names[i % 7], prompt="1 2 3", max_tokens=3)
                for i in range(200)
            ]
            return await asyncio.gather(*calls)

    answers = [answer.choices[0].text for answer in asyncio.run(ask())]
    assert answers == [expected[names[i % 7]] for i in range(200)]
    metrics = served.metrics()
    assert metrics["lora_up", None] == 1 and metrics["lora_evictions_total", None] > 0
    assert sum(name == "lora_resident" for name, _ in metrics) == 4
    assert metrics["lora_wait_seconds_count", None] >= 200
    assert metrics["lora_generated_tokens_total", "a"] >= 3 * 200 // 7


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_and_a_completion_by_the_openai_client(served, stream):
    client = served.client()
    expected = served.alone("4 5", "a", 6)
    words = {"model": "a", "max_tokens": 6, "stream": stream}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "4 5"}], **words)
    text = client.completions.create(prompt="4 5", **words)
    if stream:
        parts = [part.choices[0] for part in chat]
        assert len(parts) > 1 and parts[-1].finish_reason in ("stop", "length")
        assert "".join(part.delta.content for part in parts) == expected
        assert "".join(part.choices[0].text for part in text) == expected
    else:
        assert chat.choices[0].message.content == text.choices[0].text == expected
        assert chat.usage.completion_tokens == len(expected.split())
    assert "b" in [each.id for each in client.models.list()]
    assert client.models.retrieve("b").id == "b"


def test_sampling_words_and_stops_are_honoured(served):
    expected = served.alone("4 5", "a")
    words = expected.split()
    assert served.answer()[1]["choices"][0]["text"] == expected
    for temperature in (0, 1e-320):
        assert served.answer(temperature=temperature)[1]["choices"][0]["text"] == expected
    assert served.answer(top_p=1e-6)[1]["choices"][0]["text"] == expected
    texts = {served.answer(temperature=2)[1]["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1
    stop = f" {words[3]}"
    choice = served.answer(stop=[stop])[1]["choices"][0]
    assert choice["text"] == expected[: expected.find(stop)]
    assert choice["finish_reason"] == "stop"


DEEP = b"[" * 3000
WRONG = [
    ({"n": 2}, "'n' is not honoured"),
    ({"seed": 3}, "'seed' is not honoured"),
    ({"logprobs": 1}, "'logprobs' is not honoured"),
    ({"presence_penalty": 0.5}, "'presence_penalty'"),
    ({"frobnicate": 1}, "'frobnicate'"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": "high"}, "top_p"),
    ({"stop": 3}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include": True}}, "include_usage"),
    ({"prompt": ["4", "5"]}, "several prompts"),
    ({"prompt": [77]}, "less than 40"),
    ({"prompt": [{}]}, "input_ids"),
    ({"prompt": []}, "input_ids"),
    ({"prompt": "\ud800"}, "surrogates"),
    ({"prompt": "1" * 2100}, "more than 2000 characters"),
    ({"max_tokens": 0}, "max_new_tokens is 0"),
    ({"max_tokens": 10_000}, "needs"),
    ({"max_tokens": [1]}, "max_new_tokens"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_word_gets_a_400_that_names_it(served, words, message):
    status, told = served.answer(**words)
    assert status == 400 and message in told["error"]["message"]
    assert not served.requests.output_router.result_handlers


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"null", b"{", b"\xff", DEEP, b'{"model": 1}'])
def test_an_odd_body_gets_a_400(served, body):
    for path in ("completions", "chat/completions", "load_lora_adapter", "unload_lora_adapter"):
        assert served.ask(f"/v1/{path}", body).status == 400


def test_limits_keys_and_unknown_models(served):
    assert served.ask("/v1/completions", b"x" * 5000).status == 413
    assert served.ask("/v1/completions", {}, key="other").status == 401
    assert served.ask("/v1/models", key="").status == 401
    assert served.ask("/health", key="").status == 200
    for name in ("nobody", "link", "../outside", "\0", "\ud800"):
        assert served.answer(model=name)[0] == 404
    assert served.ask("/v1/models/nobody").status == 404


TEXT, IMAGE = {"type": "text", "text": "4"}, {"type": "image_url", "image_url": {"url": "x"}}
MESSAGES = [
    ({"role": "judge", "content": "4"}, "a role that the template does not know"),
    ({"role": "user", "content": [TEXT, IMAGE]}, "a text as"),
    ({"role": "user", "content": [{**IMAGE, "text": "4"}]}, "a text as"),
    ({"role": "user", "content": "4", "tool_calls": [{"id": "x"}]}, "'tool_calls' of a message"),
    ({"role": "user", "content": "4", "name": "bob"}, "'name' of a message"),
]


@pytest.mark.parametrize(("said", "message"), MESSAGES)
def test_a_message_is_honoured_or_refused(served, said, message):
    body = {"model": "a", "messages": [said], "max_tokens": 1}
    response = served.ask("/v1/chat/completions", body)
    assert response.status == 400 and message in json.loads(response.read())["error"]["message"]
    answer = {"role": "user", "content": [TEXT], "tool_calls": None, "annotations": []}
    assert served.ask("/v1/chat/completions", {**body, "messages": [answer]}).status == 200


def test_a_prompt_that_is_slow_to_tokenize_holds_no_other_client(served):
    served.words.slow_s = 2.0
    slow = threading.Thread(target=served.answer, kwargs={"prompt": "39", "max_tokens": 1})
    slow.start()
    time.sleep(0.2)
    start = time.monotonic()
    assert served.answer(prompt=[4, 5], max_tokens=1)[0] == 200
    assert slow.is_alive() and time.monotonic() - start < 1.8
    slow.join()
    served.words.slow_s = 0.0


def test_an_adapter_is_unloaded_and_loaded(served, save_adapter):
    import shutil

    root = served.model.store.folder
    shutil.copytree(save_adapter(r=2, target_modules=["q_proj"]), root / "mine")
    assert served.answer(model="mine")[0] == 200
    assert served.ask("/v1/unload_lora_adapter", {"lora_name": "mine"}).status == 200
    assert served.answer(model="mine")[0] == 404
    for path in ("link", "../x", "/etc", "nothing"):
        body = {"lora_name": "mine", "lora_path": path}
        assert served.ask("/v1/load_lora_adapter", body).status == 400
    body = {"lora_name": "mine", "lora_path": "mine"}
    for wrong in ({"load_inplace": True}, {"lora_name": "\ud800"}):
        assert served.ask("/v1/load_lora_adapter", {**body, **wrong}).status == 400
    with ThreadPoolExecutor(4) as clients:
        loads = list(clients.map(lambda _: served.ask("/v1/load_lora_adapter", body), range(4)))
    assert [response.status for response in loads] == [200] * 4
    assert served.answer(model="mine")[0] == 200
    assert ("lora_resident", "mine") in served.metrics()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(served, stream):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = {"model": "c", "prompt": "1", "max_tokens": 240, "stream": stream, "temperature": 1}
    headers = {"Authorization": "Bearer secret"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    deadline = time.monotonic() + 30
    while not served.requests._held and time.monotonic() < deadline:
        time.sleep(0.001)
    cancelled = []
    cancel = served.requests.cancel_request
    served.requests.cancel_request = lambda name: (cancelled.append(name), cancel(name))
    if stream:
        connection.getresponse().read(20)
    connection.close()
    while (served.requests._held or served.server.running) and time.monotonic() < deadline:
        time.sleep(0.01)
    del served.requests.cancel_request
    assert len(cancelled) == 1 and not served.requests._held
    assert served.server.running == 0


def test_a_stream_whose_client_leaves_before_its_start_ends_its_request(served):
    body = {"model": "c", "prompt": "1", "max_tokens": 240, "stream": True, "temperature": 1}
    message = {"type": "http.request", "body": json.dumps(body).encode()}
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(b"authorization", b"Bearer secret")]

    async def ask():
        comes = [message, asyncio.Event(), {"type": "http.disconnect"}]

        async def receive():
            found = comes.pop(0) if len(comes) > 1 else comes[0]
            return await found.wait() if isinstance(found, asyncio.Event) else found

        async def send(_):
            await asyncio.sleep(0)

        await served.server.app(scope, receive, send)

    loop = served.uvicorn.servers[0].get_loop()
    asyncio.run_coroutine_threadsafe(ask(), loop).result(60)
    assert served.server.running == 0
    deadline = time.monotonic() + 30
    while served.requests._held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not served.requests._held


def test_a_dead_thread_is_told(make_base, tmp_path):
    served = Served(make_base("llama"), tmp_path)
    try:

        def fail(*_):
            raise RuntimeError("a pass fails")

        handle = served.model.base.model.layers[0].register_forward_pre_hook(fail)
        status, told = served.answer()
        assert status == 503 and "a pass fails" in told["error"]["message"]
        handle.remove()
        assert served.answer()[0] == 200  # only that request has ended
        served.requests.batch_processor.scheduler.schedule_batch = fail
        assert served.answer()[0] == 503
        served.requests._generation_thread.join()
        assert served.answer()[0] == 503
        assert served.ask("/health").status == 503
    finally:
        served.close()
