"""The options of a request besides its adapter: lengths, ends, and words that change scores.

Transformers' continuous batching passes the last token of each request to the processors of
scores, which read all tokens. Here every request has its own processors, made as `generate` makes
them for that prompt alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor

from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown, told
from lora_backends.hf.generating.config_words import (
    FOLLOWED,
    OF_THE_BATCH,
    check_followed,
    default_words,
    is_off,
    read_as_generate,
    shown_words,
    with_words,
)
from lora_backends.hf.layout.sites import vocabulary_of

MOST = 50.0
"""Largest score of a trial; scores of models are of that size."""


@dataclass(frozen=True)
class Asked:
    """The options of one request, checked."""

    max_new_tokens: int | None  # None: until an end, or as long as the cache holds it
    ends: list[int]  # token ids
    processors: Any  # LogitsProcessorList


class RequestWords:
    """The words of all requests of a manager.

    Args:
        base: the model.
        given: a GenerationConfig, or None for the model's own.
        per_request: whether a request may have words of its own.

    Raises:
        InvalidInputError: `generate` refuses the configuration or one of its values.
        UnsupportedInputError: a word that is not followed.
    """

    def __init__(self, base: Any, config: Any | None, per_request: bool) -> None:
        self.config = read_as_generate(base, config)
        check_followed(self.config)
        self._base, self._per_request = base, per_request
        self._vocabulary = vocabulary_of(base)
        self._ends = _checked_ends(self.config.eos_token_id)
        self._positions = _positions(base)
        self._sequences = self.config.num_return_sequences or 1
        # With an end token, as a request may have one: some processors exist only with it.
        any_list = self._processors(self.config, [0], 1, self._ends or [0])
        # If no request changes scores, the manager runs no processor.
        self.change_scores = per_request or bool(any_list)
        # Processors that read scores alone hold nothing of a prompt: requests share them.
        self._shared = any_list if _reads_scores_alone(any_list) else None

    def of_request(
        self, ids: list[int], new: int | None, room: int | None, options: dict[str, Any]
    ) -> Asked:
        """Return the checked options of a request.

        Args:
            ids: of its prompt.
            new: the most new tokens, or None.
            room: tokens that the cache holds, if that is known.
            options: words of a GenerationConfig.

        Raises:
            InvalidInputError: a wrong word or value, or more tokens than the cache or the
                positions of the model.
            UnsupportedInputError: a word that is not followed for one request.
        """
        # A request may always have ends of its own, whatever `per_request` says.
        ends = options.pop("eos_token_id", None)
        ends = self._ends if ends is None else _checked_ends(ends)
        config = self._config_of(options) if options else self.config
        new = self._new_tokens(len(ids), new, config, room)
        # Made for each request only where they read its tokens.
        processors = self._shared
        if processors is None or options:
            processors = self._processors(config, ids, new, ends)
        return Asked(new, ends, processors)

    def _config_of(self, options: Mapping[str, Any]) -> Any:
        config = with_words(self.config, options)
        if not self._per_request:
            raise UnsupportedInputError(
                f"a request has words of its own: {', '.join(options)}\n"
                f"  allowed: max_new_tokens and eos_token_id\n"
                f"  to do: ContinuousBatchingConfig(per_request_processors=True), or a "
                f"generation_config for all requests"
            )
        check_followed(config)
        for word in OF_THE_BATCH & options.keys():
            # A batch that samples takes the one token that `OnlyBest` leaves.
            if word == "do_sample" and config.do_sample is False and self._sequences == 1:
                continue
            if getattr(config, word) != getattr(self.config, word):
                raise UnsupportedInputError(
                    f"{word} of a request is {shown(options[word])}, and "
                    f"{getattr(self.config, word)} for the others\n"
                    f"  to do: give it in the generation_config, for all requests"
                )
        return config

    def _new_tokens(self, length: int, new: Any, config: Any, room: int | None) -> int | None:
        """Return the most new tokens of a prompt; a request that is too long would end all."""
        new = config.max_new_tokens if new is None else new
        if new is not None and (type(new) is not int or new < 1):
            raise InvalidInputError(f"max_new_tokens is {shown(new)}\n  allowed: an int, 1 or more")
        if new is None and config.max_length is not None:
            if type(config.max_length) is not int or config.max_length <= length:
                raise InvalidInputError(
                    f"max_length is {shown(config.max_length)} for a prompt of {length} tokens\n"
                    f"  allowed: an int above that; max_new_tokens counts without the prompt"
                )
            new = config.max_length - length
        needed = length + (new or 1)
        if room is not None and needed > room:
            raise InvalidInputError(
                f"the request needs {needed} tokens, the cache holds {room}\n"
                f"  to do: ask for fewer, or raise num_blocks of the ContinuousBatchingConfig"
            )
        if self._positions is not None and needed > self._positions:
            raise InvalidInputError(
                f"the request needs {needed} tokens, the model has {self._positions} positions\n"
                f"  to do: shorten the prompt, or ask for fewer"
            )
        # Without a limit of its own a request may fill the cache.
        most = [limit - length for limit in (room, self._positions) if limit is not None]
        return new or min(most, default=None)

    def _processors(self, config: Any, ids: list[int], new: int | None, ends: list[int]) -> Any:
        """Return the processors that `generate` makes for a prompt alone, each tried once."""
        # This word forces the last token, so the number of new tokens has to be known.
        if config.forced_eos_token_id is not None and new is None:
            raise InvalidInputError("forced_eos_token_id goes with max_new_tokens\n  given: None")
        # A copy, because lengths depend on the prompt and the configuration is shared.
        alone = copy.copy(config)
        alone.max_length = None if new is None else len(ids) + new
        if alone.min_new_tokens is not None:
            alone.min_length = alone.min_new_tokens + len(ids)
        try:
            processors = self._made(alone, ids, ends)
            if self.config.do_sample and not config.do_sample:
                processors.append(OnlyBest())
            # Some look at their values only at the first or at the last token, where a failure
            # would end the request.
            for tokens in (ids, ids + [0] * ((new or 1) - 1)) if processors else ():
                scores = torch.linspace(-MOST, MOST, self._vocabulary, device=self._base.device)
                scores = processors(torch.tensor([tokens], device=scores.device), scores[None])
                if config.do_sample and bool(scores.softmax(-1).isnan().any()):
                    raise ValueError(f"of scores from {-MOST} to {MOST} it leaves none to sample")
        except Exception as error:
            defaults = default_words()
            words = {word: getattr(config, word, None) for word in sorted(FOLLOWED)}
            changed = {word: v for word, v in words.items() if not is_off(word, v, defaults)}
            raise InvalidInputError(
                f"generate refuses one of {shown_words(changed)}: {told(error)}"
            ) from error
        return processors

    def _made(self, config: Any, ids: list[int], ends: list[int]) -> Any:
        device = self._base.device
        config._eos_token_tensor = torch.tensor(ends, device=device) if ends else None
        return self._base._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(ids),
            encoder_input_ids=torch.tensor([ids], device=device),
            device=device,
            model_kwargs={},
        )


class OnlyBest(LogitsProcessor):  # type: ignore[misc]  # has no types
    """Leaves each row its best token, the one that a greedy search takes."""

    supports_continuous_batching = True  # reads scores alone

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of 0 and minus infinity, [rows, vocabulary]; `input_ids` are not read."""
        best = scores.argmax(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, best, 0.0)


class RowProcessors(LogitsProcessor):  # type: ignore[misc]  # has no types
    """Changes the scores of each request by its own processors.

    Args:
        rows: returns processors and tokens of the first rows of the scores, in order; no token is
            taken from later rows.
    """

    supports_continuous_batching = True  # or Transformers would warn

    def __init__(self, rows: Callable[[], Iterable[tuple[Any, Sequence[int]]]]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, [rows, vocabulary]; `input_ids`, the last tokens, are not read."""
        rows = list(self._rows())
        shared = {id(processors): processors for processors, _ in rows}
        # One call for all rows where no processor reads tokens.
        if len(shared) == 1 and _reads_scores_alone(rows[0][0]):
            scores = rows[0][0](input_ids, scores)
            return scores
        changed = [*scores[:, None]]
        for row, (processors, tokens) in enumerate(rows):
            ids = torch.tensor([tokens], device=scores.device)
            changed[row] = processors(ids, changed[row])
        return torch.cat(changed)


def _reads_scores_alone(processors: Any) -> bool:
    """Return whether processors may run on many requests at once, by Transformers' own word."""
    return all(getattr(each, "supports_continuous_batching", None) is True for each in processors)


def _checked_ends(value: Any) -> list[int]:
    """Return the ids of tokens that end a request; none for None, and -1 is no token's."""
    ends = value.tolist() if isinstance(value, torch.Tensor) else value
    ends = [] if ends is None else [ends] if type(ends) is int else ends
    if not isinstance(ends, (list, tuple)) or not all(type(end) is int for end in ends):
        raise InvalidInputError(
            f"eos_token_id is {shown(value)}\n  allowed: an int or a list of ints, None or -1 for "
            f"no end"
        )
    return list(ends)


def _positions(base: Any) -> int | None:
    """Return how many positions a request may have, as the model's configuration says.

    Where the frequencies of positions change beyond a length ("longrope"), a request beyond it
    would change them for all requests in its passes.
    """
    config = base.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [rules for rules in rope.values() if isinstance(rules, Mapping)]
    most = [getattr(config, "max_position_embeddings", None)]
    for rules in (rope, *by_layer):
        if rules.get("rope_type") == "longrope":
            most.append(rules.get("original_max_position_embeddings"))
    return min((each for each in most if type(each) is int and each > 0), default=None)
