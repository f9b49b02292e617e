"""The OpenAI server of vLLM, in processes of its own: requests name adapters."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers.servers.vllm_engines import live_version

from lora_backends.errors import BackendUnavailableError, InvalidInputError
from lora_backends.integrations.vllm import live

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
ANSWERS = {  # what PEFT answers in float32, as the README shows it
    "base": "A cat is a domesticated feline creature with a coat of fur",
    "pirate": "Arr, a cat be a brave and lovable creature,",
    "json": '{"answer": "A cat is a mammal that can run',
}
START = 300  # seconds that a server may take to be ready


class Server:
    def __init__(self, folder, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        options = {
            "--model": folder,
            "--served-model-name": "base",
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": "float32",
            "--max-model-len": 128,
            "--max-num-seqs": 8,
            "--max-loras": 2,
            "--max-lora-rank": 8,
            "--lora-modules": f"pirate={ADAPTERS / 'pirate'}",
        }
        command += ["--enable-lora", *(str(each) for pair in options.items() for each in pair)]
        env = {
            **os.environ,
            "LORA_BACKENDS_VLLM": "auto",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for live adapters
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self):
        end = time.monotonic() + START
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                return self.get("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        pytest.fail(f"the server is not ready:\n{self.log.read_text()[-4000:]}")

    def get(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith("{") else text

    def chat(self, model):
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "What is a cat?"}],
            "max_tokens": 12,
            "temperature": 0,
        }
        return self.get("/v1/chat/completions", body)["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    started = Server(smollm2, tmp_path_factory.mktemp("server") / "log.txt")
    try:
        started.wait()
        yield started
    finally:
        started.process.terminate()
        try:
            started.process.wait(30)
        except subprocess.TimeoutExpired:
            started.process.kill()


def test_requests_name_their_adapter_and_one_is_loaded_while_it_serves(server):
    assert server.chat("base") == ANSWERS["base"]
    assert server.chat("pirate") == ANSWERS["pirate"]
    with pytest.raises(urllib.error.HTTPError):
        server.chat("json")
    with pytest.raises(urllib.error.HTTPError):  # which fails alone
        none = {"lora_name": "none", "lora_path": str(ADAPTERS / "none")}
        server.get("/v1/load_lora_adapter", none)
    server.get("/v1/load_lora_adapter", {"lora_name": "json", "lora_path": str(ADAPTERS / "json")})
    for model in ("json", "pirate", "base"):
        assert server.chat(model) == ANSWERS[model]


def test_the_name_of_a_model_may_give_adapters_strengths(server):
    assert server.chat("pirate*1") == ANSWERS["pirate"]
    assert server.chat("pirate*0") == ANSWERS["base"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.chat("pirat*0.5")
    assert refused.value.code == 400
    with pytest.raises(urllib.error.HTTPError):  # clients may not name folders of the server
        server.chat(f"{ADAPTERS / 'pirate'}*1")
    assert "no adapter 'pirat' for the blend; did you mean 'pirate'?" in server.log.read_text()


def test_an_adapter_is_updated_through_http(server):
    url = f"http://127.0.0.1:{server.port}"
    live.update(url, "alice", *live_version(ADAPTERS / "pirate"), version=1)
    server.get("/v1/load_lora_adapter", {"lora_name": "alice", "lora_path": "live:alice"})
    assert server.chat("alice") == ANSWERS["pirate"]
    tensors, config = live_version(ADAPTERS / "json")
    live.update(url, "alice", tensors, config, version=2)
    assert server.chat("alice") == ANSWERS["json"]
    assert live.versions(url) == {"alice": [1, 2]}
    with pytest.raises(InvalidInputError, match="has a version 2"):
        live.update(url, "alice", tensors, config, version=2)
    live.rollback(url, "alice", version=1)
    assert server.chat("alice") == ANSWERS["pirate"]
    with pytest.raises(urllib.error.HTTPError):  # which fails alone
        server.get("/v1/load_lora_adapter", {"lora_name": "bob", "lora_path": "live:bob"})
    with pytest.raises(BackendUnavailableError, match="VLLM_SERVER_DEV_MODE"):
        live.versions(f"{url}/nothing")
    assert server.chat("base") == ANSWERS["base"]


def test_the_log_says_what_runs(server):
    log = server.log.read_text()
    assert "takes over LoRA of vLLM" in log
    assert "runs on backend 'numba_cpu' on cpu" in log
