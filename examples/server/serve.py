"""An OpenAI-style server of completions whose requests share batches, each with its adapter.

python examples/server/serve.py MODEL --adapters examples/adapters

The "model" of a request is an adapter's name, or "base". Adapters of the folder are loaded when a
request asks for them, and files that change are loaded when no request uses them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_backends.errors import InvalidInputError, LoRABackendError
from lora_backends.hf import MultiLoRAModel

BASE = "base"
MOST_TOKENS = 16  # of an answer, unless the request says otherwise


class Server:
    """The endpoints.

    Args:
        model: with its adapters.
        tokenizer: of the model.
        requests: of the model's `continuous_batching`, started.
    """

    def __init__(self, model: MultiLoRAModel, tokenizer: Any, requests: Any) -> None:
        self.model, self.tokenizer, self.requests = model, tokenizer, requests
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        """List what the "model" of a request may be."""
        store = self.model.store
        names = await run_in_threadpool(store.names) if store else self.model.adapters
        listed = [{"id": name, "object": "model"} for name in [BASE, *names]]
        return JSONResponse({"object": "list", "data": listed})

    async def completions(self, request: Request) -> Response:
        """Answer a prompt, at once or as a stream of events."""
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        name = f"cmpl-{uuid.uuid4().hex}"
        try:
            body = await request.json()
            ids, adapter, most = self._checked(body)
            # before the request is added, so that no token is missed
            self.requests.register_result_handler(name, outputs.put_nowait)
            await run_in_threadpool(
                self.requests.add_request,
                ids,
                name,
                most,
                adapter=adapter,
                streaming=bool(body.get("stream")),
            )
        except (LoRABackendError, ValueError) as error:
            self._forget(name)
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        answer = self._answer(name, body["model"], outputs, len(ids))
        if body.get("stream"):
            return StreamingResponse(events(answer), media_type="text/event-stream")
        text, last = "", {}
        async for last in answer:
            text += last["choices"][0]["text"]
        if "error" in last:
            return JSONResponse(last, status_code=500)
        last["choices"][0]["text"] = text
        return JSONResponse(last)

    def _checked(self, body: Any) -> tuple[list[int], str | None, int]:
        """Return the tokens, the adapter and the new tokens that a request asks for."""
        prompt = body.get("prompt") if isinstance(body, dict) else None
        if not isinstance(prompt, (str, list)) or not isinstance(body.get("model"), str):
            raise InvalidInputError(
                f'"prompt" and "model" are needed\n  allowed: a text or a list of token ids; '
                f'"{BASE}" or the name of an adapter'
            )
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        most = body.get("max_tokens")  # null: as if left out, not as many as the cache holds
        most = MOST_TOKENS if most is None else most
        return ids, None if body["model"] == BASE else body["model"], most

    async def _answer(
        self, name: str, model: str, outputs: asyncio.Queue[Any], prompt_tokens: int
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield what is new of an answer, in the form of OpenAI's completions."""
        told, finished, created = "", False, int(time.time())
        try:
            while not finished:
                output = await outputs.get()
                finished = output.is_finished()
                if output.error is not None:
                    yield {"error": {"message": output.error}, "choices": [{"text": ""}]}
                    return
                tokens = output.generated_tokens
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                if text.endswith("\N{REPLACEMENT CHARACTER}") and not finished:
                    continue  # the rest of a character is still to come
                ended = tokens and tokens[-1] == self.tokenizer.eos_token_id
                reason = ("stop" if ended else "length") if finished else None
                choice = {"index": 0, "text": text[len(told) :], "finish_reason": reason}
                usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(tokens)}
                told = text
                yield {
                    "id": name,
                    "object": "text_completion",
                    "created": created,
                    "model": model,
                    "choices": [choice],
                    "usage": usage,
                }
        finally:
            if not finished:  # the client has gone
                self.requests.cancel_request(name)
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Drop the handler of a request that will deliver nothing."""
        self.requests.output_router.result_handlers.pop(name, None)


async def events(answer: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Yield an answer as server-sent events."""
    async for part in answer:
        yield f"data: {json.dumps(part)}\n\n"
    yield "data: [DONE]\n\n"


def main() -> None:
    """Load a model and serve it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder, or a name in the local cache")
    parser.add_argument("--gguf-file", help="of the folder")
    parser.add_argument("--adapters", help="a folder with a folder for each adapter")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-rank", type=int, default=64)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    file = {"gguf_file": arguments.gguf_file} if arguments.gguf_file else {}
    base = AutoModelForCausalLM.from_pretrained(arguments.model, **file).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **file)
    model = MultiLoRAModel(base, max_adapters=arguments.slots, max_rank=arguments.max_rank)
    model.keep_adapters(folder=arguments.adapters)
    with model.continuous_batching() as requests:
        server = Server(model, tokenizer, requests)
        uvicorn.run(server.app, host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
