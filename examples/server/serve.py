"""An OpenAI-style server whose requests share batches, each with its adapter.

python examples/server/serve.py MODEL --adapters examples/adapters

The "model" of a request is an adapter's name, or "base". The first request for an adapter loads it
from the folder; changed files are loaded when no request uses the adapter. If the environment
variable SERVE_API_KEY is set, all requests under /v1 need that key.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import hmac
import json
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import uvicorn
from anyio import CapacityLimiter, to_thread
from asked import Asked, asked, refused
from metrics import Metrics
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig

from lora_backends.errors import LoRABackendError
from lora_backends.hf import MultiLoRAModel

BASE = "base"
LOOK_S = 1.0  # seconds between looks at whether the model's thread runs


class Server:
    """The endpoints.

    Args:
        model: with a store of adapters (`keep_adapters`).
        tokenizer: of the model.
        requests: of `begin`, started.
        key: the API key that requests under /v1 need; None: no key.
        most_bytes: of a body.
        most_characters: of a prompt.
        most_requests: requests that may wait or run at a time.
    """

    def __init__(
        self,
        model: MultiLoRAModel,
        tokenizer: Any,
        requests: Any,
        key: str | None = None,
        most_bytes: int = 2**20,
        most_characters: int = 200_000,
        most_requests: int = 512,
    ) -> None:
        self.model, self.tokenizer, self.requests, self.key = model, tokenizer, requests, key
        self.most_bytes, self.most_characters = most_bytes, most_characters
        self.samples = bool(model.base.generation_config.do_sample)
        ends = requests.generation_config.eos_token_id
        self.ends = {*ends} if isinstance(ends, list) else {ends}
        self.unloaded: set[str] = set()
        self.metrics = Metrics(model, requests)
        # A thread per request, because `add_request` waits for a slot; one for the tokenizer, which
        # is not thread-safe.
        self.most_requests, self.running = most_requests, 0
        self.adding, self.tokenizing = CapacityLimiter(most_requests), CapacityLimiter(1)
        post = {"methods": ["POST"]}
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.tell_metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/completions", self.completions, **post),
            Route("/v1/chat/completions", self.chat, **post),
            Route("/v1/load_lora_adapter", self.load, **post),  # as vLLM names them
            Route("/v1/unload_lora_adapter", self.unload, **post),
        ]
        errors = (HTTPException, LoRABackendError, ValueError, ClientDisconnect)
        handlers: dict[Any, Any] = dict.fromkeys(errors, told)
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    async def health(self, request: Request) -> Response:
        """Return whether the model's thread runs."""
        alive = self.requests.is_running()
        return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    async def tell_metrics(self, request: Request) -> Response:
        """Return metrics of adapters, waits and tokens to Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """List what the "model" of a request may be."""
        self._check_key(request)
        names = [BASE, *await run_in_threadpool(self._names)]
        return JSONResponse({"object": "list", "data": [card(name) for name in names]})

    async def one_model(self, request: Request) -> Response:
        """Tell that one "model" is there."""
        self._check_key(request)
        await self._check_model(request.path_params["name"])
        return JSONResponse(card(request.path_params["name"]))

    async def load(self, request: Request) -> Response:
        """Load {"lora_name": ..., "lora_path": a folder in --adapters} into a slot."""
        name, path = await self._words(request, "lora_name", "lora_path")
        root = self.model.store.folder
        folder = None if root is None or "\0" in path else root / path
        if folder is None or not await run_in_threadpool(is_inside, folder, root):
            raise refused(400, '"lora_path" is not a folder inside of --adapters')
        await run_in_threadpool(self.model.load_adapter, name, folder, replace_existing=True)
        self.unloaded.discard(name)
        return JSONResponse({"status": "loaded"})

    async def unload(self, request: Request) -> Response:
        """Unload {"lora_name": ...}; requests for it are refused until it is loaded again."""
        (name,) = await self._words(request, "lora_name")
        await self._check_model(name)
        if name in self.model.adapters:
            await run_in_threadpool(self.model.unload_adapter, name)
        self.unloaded.add(name)
        return JSONResponse({"status": "unloaded"})

    async def completions(self, request: Request) -> Response:
        """Continue a prompt, at once or as a stream of events."""
        return await self._answered(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """Answer the messages of a chat, at once or as a stream of events."""
        return await self._answered(request, chat=True)

    async def _answered(self, request: Request, chat: bool) -> Response:
        want = asked(await self._body(request), chat, self.samples)
        if self.running >= self.most_requests:
            raise refused(429, f"{self.running} requests wait or run: try again later")
        work = Answer(self, want, chat)
        self.running += 1
        try:
            await while_connected(request, work.begin())
            if want.stream:
                self.running += 1  # until the stream has ended
                return Events(work)
            return JSONResponse(await while_connected(request, work.whole()))
        except BaseException:
            work.leave()
            raise
        finally:
            self.running -= 1

    async def _words(self, request: Request, *words: str) -> list[str]:
        body = await self._body(request)
        values = [body.get(word) if isinstance(body, dict) else None for word in words]
        if not all(isinstance(value, str) and value for value in values) or BASE in values[:1]:
            raise refused(400, f"needed: {', '.join(words)} (texts; no adapter is named {BASE!r})")
        if others := [word for word in body if word not in words and body[word] is not None]:
            raise refused(400, f"{others[0][:50]!r} is not honoured by this server: leave it out")
        "".join(values).encode()  # half a character, which is a ValueError, fits in no metric
        return [str(value) for value in values]

    async def _body(self, request: Request) -> Any:
        """Return the JSON of a body; stop reading at the size limit."""
        self._check_key(request)
        if not self.requests.is_running():
            raise refused(503, "the model's thread has ended: start the server again")
        found = bytearray()
        async for chunk in request.stream():
            found += chunk
            if len(found) > self.most_bytes:
                raise refused(413, f"the body has more than {self.most_bytes} bytes")
        try:
            return json.loads(bytes(found))
        except (ValueError, RecursionError) as error:
            raise refused(400, f"the body is not JSON: {str(error)[:200]}") from error

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self.key is not None and not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise refused(401, "the API key is missing or wrong")

    def _names(self) -> list[str]:
        """Return the adapters that requests may name."""
        store = self.model.store
        names = (name for name in store.names() if name not in self.unloaded)
        folders = store.folders()  # `names` has looked for new ones
        return [n for n in names if n not in folders or is_inside(folders[n], store.folder)]

    async def _check_model(self, name: str) -> None:
        if name != BASE and name not in await run_in_threadpool(self._names):
            raise refused(404, f"no model {name[:100]!r}: GET /v1/models lists them")

    async def tokens(self, want: Asked) -> list[int]:
        """Return the token ids of a prompt, made outside of the event loop."""
        await self._check_model(want.model)
        if isinstance(want.prompt, list):
            return want.prompt
        texts = [want.prompt] if isinstance(want.prompt, str) else [str(m) for m in want.prompt]
        if sum(map(len, texts)) > self.most_characters:
            raise refused(400, f"the prompt has more than {self.most_characters} characters")
        return await to_thread.run_sync(self._tokens, want.prompt, limiter=self.tokenizing)

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if self.tokenizer.chat_template is None:
            raise refused(400, "the tokenizer has no chat template: use /v1/completions")
        try:
            text = self.tokenizer.apply_chat_template(
                list(prompt), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template refuses roles, or their order, in its own way
            raise refused(400, f"the chat template refuses the messages: {error}") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class Answer:
    """One request and its answer."""

    def __init__(self, server: Server, want: Asked, chat: bool) -> None:
        self.server, self.want, self.chat = server, want, chat
        self.name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created, self.prompt_tokens, self.tokens = int(time.time()), 0, 0
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.gone, self.ended = threading.Event(), False

    async def begin(self) -> None:
        """Add the request, once its adapter has a slot."""
        server, want = self.server, self.want
        ids = await server.tokens(want)
        self.prompt_tokens, start = len(ids), time.monotonic()
        # before the request is added, so that no token is missed
        server.requests.register_result_handler(self.name, self.outputs.put_nowait)

        def add() -> None:
            adapter = None if want.model == BASE else want.model
            streams = want.stream or bool(want.stops)
            server.requests.add_request(
                ids, self.name, want.most, adapter=adapter, streaming=streams, **want.words
            )
            if self.gone.is_set():
                server.requests.cancel_request(self.name)

        await to_thread.run_sync(add, limiter=server.adding)
        server.metrics.waits.observe(time.monotonic() - start)
        server.metrics.prompt_tokens.labels(want.model).inc(len(ids))

    def leave(self) -> None:
        """Cancel a request whose client has gone."""
        if not self.ended:
            self.ended = True
            self.gone.set()
            self.server.requests.cancel_request(self.name)

    async def parts(self) -> AsyncIterator[tuple[str, str | None]]:
        """Yield new text, and with the last piece the reason for the end."""
        server, told, reason = self.server, 0, None
        held = max((len(stop) - 1 for stop in self.want.stops), default=0)
        try:
            while reason is None:
                output = await self._next()
                tokens = output.generated_tokens
                server.metrics.tokens.labels(self.want.model).inc(len(tokens) - self.tokens)
                self.tokens, self.ended = len(tokens), output.is_finished()
                text = server.tokenizer.decode(tokens, skip_special_tokens=True)
                places = [at for stop in self.want.stops if (at := text.find(stop)) >= 0]
                if places:
                    text, reason = text[: min(places)], "stop"
                elif self.ended:
                    reason = "stop" if tokens and tokens[-1] in server.ends else "length"
                elif text.endswith("\N{REPLACEMENT CHARACTER}"):
                    continue  # the rest of a character is still to come
                else:
                    text = text[: max(len(text) - held, told)]  # the rest may begin a stop text
                yield text[told:], reason
                told = max(told, len(text))
        finally:
            self.leave()

    async def _next(self) -> Any:
        while True:
            try:
                output = await asyncio.wait_for(self.outputs.get(), LOOK_S)
            except TimeoutError:
                if self.server.requests.is_running():
                    continue
                raise refused(503, "the model's thread has ended") from None
            if output.error is not None:
                self.ended = True
                raise refused(503, f"the request failed: {output.error}")
            return output

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        parts = [part async for part in self.parts()]
        text, reason = "".join(text for text, _ in parts), parts[-1][1]
        content = (
            {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        )
        choice = {"index": 0, **content, "finish_reason": reason, "logprobs": None}
        return self._told("chat.completion", [choice]) | {"usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield the answer as server-sent events."""
        try:
            async for text, reason in self.parts():
                delta = {"delta": {"role": "assistant", "content": text}}
                content = delta if self.chat else {"text": text}
                choice = {"index": 0, **content, "finish_reason": reason, "logprobs": None}
                yield event(self._told("chat.completion.chunk", [choice]))
            if self.want.usage:
                yield event(self._told("chat.completion.chunk", []) | {"usage": self._usage()})
            yield "data: [DONE]\n\n"
        except HTTPException as error:
            yield event({"error": {"message": error.detail, "code": error.status_code}})

    def _told(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        kind = kind if self.chat else "text_completion"
        told = {"id": self.name, "object": kind, "created": self.created}
        return {**told, "model": self.want.model, "choices": choices}

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.tokens
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens}
        return {**counts, "total_tokens": total}


class Events(StreamingResponse):
    """The answer as server-sent events."""

    def __init__(self, work: Answer) -> None:
        super().__init__(work.events(), media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the request ends with them, also if the client left before the first."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.leave()
            self._work.server.running -= 1


async def while_connected(request: Request, work: Awaitable[Any]) -> Any:
    """Return the result of `work`, which is cancelled when the client goes away."""

    async def leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def is_inside(folder: Path, root: Path | None) -> bool:
    """Return whether a folder and its files lie in `root` once links are resolved."""
    if root is None:
        return True
    files = list(folder.iterdir()) if folder.is_dir() else []
    return all(path.resolve().is_relative_to(root.resolve()) for path in (folder, *files))


def card(name: str) -> dict[str, Any]:
    """Return a "model" as OpenAI lists it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "user"}


def event(value: Any) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


async def told(request: Request, error: Exception) -> Response:
    """Answer with an error in OpenAI's form."""
    known = isinstance(error, HTTPException)
    status, message = (error.status_code, error.detail) if known else (400, str(error))
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def begin(model: MultiLoRAModel, config: ContinuousBatchingConfig) -> Any:
    """Return a manager of requests that may sample, each with its own parameters."""
    generation = copy.deepcopy(model.base.generation_config)
    generation.do_sample = True
    config.per_request_processors = True
    return model.continuous_batching(generation, config)


def main() -> None:
    """Load a model and serve it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder, or a name in the local cache")
    parser.add_argument("--gguf-file", help="of the folder")
    parser.add_argument("--adapters", help="a folder with a folder for each adapter")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-rank", type=int, default=64)
    parser.add_argument("--max-batch", type=int, default=16, help="requests that run at a time")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    file = {"gguf_file": arguments.gguf_file} if arguments.gguf_file else {}
    base = AutoModelForCausalLM.from_pretrained(arguments.model, **file).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **file)
    model = MultiLoRAModel(base, max_adapters=arguments.slots, max_rank=arguments.max_rank)
    model.keep_adapters(folder=arguments.adapters)
    config = ContinuousBatchingConfig(max_requests_per_batch=arguments.max_batch)
    with begin(model, config) as requests:
        server = Server(model, tokenizer, requests, os.environ.get("SERVE_API_KEY"))
        uvicorn.run(server.app, host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
