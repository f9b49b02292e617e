"""Checks the body of a request: every field is honoured, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

MOST_TOKENS = 16  # of an answer, unless the request says otherwise
MOST_STOPS = 4

GREEDY_BELOW = 1e-5  # temperatures that would overflow scores

BOUNDS = {
    "temperature": (0, 2),
    "top_p": (1e-9, 1),
    "top_k": (0, 1_000_000),
    "min_p": (0, 1),
    "repetition_penalty": (1e-9, 10),
}
"""Sampling parameters with their least and largest values."""

NEUTRAL: Mapping[str, tuple[Any, ...] | None] = {
    "n": (1,),
    "best_of": (1,),
    "seed": (),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "user": None,  # any value: it changes no answer
    "metadata": None,
    "store": (False,),
}
"""Fields that this server does not honour, with the values besides null that change nothing."""

READ = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stop", "stream"} | {
    "stream_options",
    *BOUNDS,
}


def refused(status: int, message: str) -> HTTPException:
    """Return the error that answers a request with `status`."""
    return HTTPException(status, message)


@dataclass(frozen=True)
class Asked:
    """A body, checked."""

    model: str
    prompt: Any  # a text, a list of token ids, or a tuple of messages
    most: int
    words: dict[str, Any]  # of a GenerationConfig
    stops: list[str]
    stream: bool
    usage: bool  # whether a stream ends with its usage


def asked(body: Any, chat: bool, samples: bool) -> Asked:
    """Check a body.

    Args:
        body: as JSON gives it.
        chat: whether "messages" are asked for, and not a "prompt".
        samples: whether the model samples where the request says nothing.

    Raises:
        HTTPException: status 400; it names the word.
    """
    if not isinstance(body, dict):
        raise refused(400, "the body is not a JSON object")
    body = {word: value for word, value in body.items() if value is not None}
    for word, value in body.items():
        allowed = NEUTRAL.get(word, ())
        if word not in READ and allowed is not None:
            # compare types, too: True is not 1
            if not any(type(value) is type(each) and value == each for each in allowed or ()):
                raise refused(400, f"{word[:50]!r} is not honoured by this server: leave it out")
    source = "messages" if chat else "prompt"
    if not isinstance(body.get("model"), str) or source not in body:
        raise refused(400, f'"model" (a text) and "{source}" are needed')
    most = body.get("max_completion_tokens", body.get("max_tokens", MOST_TOKENS))
    options = body.get("stream_options", {})
    words = {**options} if isinstance(options, dict) else {"": options}
    if words.keys() - {"include_usage"} or not all(type(v) is bool for v in words.values()):
        raise refused(400, '"stream_options" allows "include_usage", true or false')
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise refused(400, '"stop" is neither a text nor a list of texts')
    if len(stops) > MOST_STOPS:
        raise refused(400, f'"stop" has more than {MOST_STOPS} texts')
    if type(body.get("stream", False)) is not bool:
        raise refused(400, '"stream" is neither true nor false')
    return Asked(
        body["model"],
        messages(body["messages"]) if chat else prompt(body["prompt"]),
        most,
        sampling(body, samples),
        stops,
        body.get("stream", False),
        options.get("include_usage", False),
    )


def sampling(body: Mapping[str, Any], samples: bool) -> dict[str, Any]:
    """Return the sampling parameters of a request as fields of a GenerationConfig."""
    words: dict[str, Any] = {}
    for word, (least, largest) in BOUNDS.items():
        if word in body:
            value = body[word]
            kinds = (int,) if word == "top_k" else (int, float)
            # NaN fails the comparison, so it is refused.
            if type(value) not in kinds or not least <= value <= largest:
                raise refused(400, f'"{word}" is not from {least:g} to {largest:g}')
            words[word] = value if word == "top_k" else float(value)
    cold = words.get("temperature", 1) < GREEDY_BELOW
    if cold or not (samples or words.keys() - {"repetition_penalty"}):
        penalty = {k: v for k, v in words.items() if k == "repetition_penalty"}
        return {"do_sample": False, **penalty}
    if words.keys() - {"repetition_penalty"}:  # OpenAI's defaults, not the model's
        words = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **words}
    return words


def prompt(value: Any) -> Any:
    """Return a text, or token ids, which the manager checks."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        value.encode()  # half a character is a ValueError
    elif not isinstance(value, list):
        raise refused(400, '"prompt" is neither a text nor a list of token ids')
    elif any(isinstance(each, (str, list)) for each in value):
        raise refused(400, '"prompt" has several prompts: send a request for each')
    return value


def messages(value: Any) -> tuple[dict[str, str], ...]:
    """Return the messages of a chat with their texts."""
    found = []
    for each in value if isinstance(value, list) else ():
        parts = each.get("content") if isinstance(each, dict) else None
        if isinstance(parts, list):
            texts = [p.get("text") if is_text(p) else None for p in parts]
            parts = "".join(texts) if all(isinstance(t, str) for t in texts) else None
        if not isinstance(parts, str) or not isinstance(each.get("role"), str):
            raise refused(400, 'each of "messages" needs a "role" and a text as "content"')
        # Clients send an answer back with fields that are null or empty.
        if others := [word for word in each if word not in ("role", "content") and each[word]]:
            raise refused(400, f"{others[0][:50]!r} of a message is not honoured by this server")
        (parts + each["role"]).encode()
        found.append({"role": each["role"], "content": parts})
    if not found:
        raise refused(400, '"messages" is not a list with at least one message')
    return tuple(found)


def is_text(part: Any) -> bool:
    """Return whether a part of a message is a text and nothing else."""
    return isinstance(part, dict) and part.get("type") == "text" and len(part) == 2
