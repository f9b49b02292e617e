"""The words of a GenerationConfig: those that `generate` reads, and those that are followed here.

The words are read from the configuration itself: a word that no list here names is refused if its
value differs from Transformers' default.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown, told

OF_THE_BATCH = frozenset({"do_sample", "num_return_sequences"})
"""Followed, with one value for all requests of a manager; of one that samples, a request may be
greedy."""

FOLLOWED = OF_THE_BATCH | frozenset(
    """max_new_tokens max_length min_new_tokens min_length eos_token_id temperature top_k top_p
    top_h min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty
    encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids sequence_bias suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id exponential_decay_length_penalty remove_invalid_values
    renormalize_logits""".split()
)
"""Requests get the tokens that `generate` would give them alone with these words."""

WITHOUT_EFFECT = frozenset(
    {
        # of the cache and of compiled programs
        *"""use_cache cache_config max_cache_len prefill_chunk_size compile_config
        disable_compile""".split(),
        # of beams and assistants, which other words turn on
        *"""early_stopping length_penalty low_memory num_assistant_tokens
        num_assistant_tokens_schedule assistant_confidence_threshold
        assistant_lookbehind assistant_ensemble_weight target_lookbehind
        max_matching_ngram_size""".split(),
        # of padding and of prompts without tokens
        *"""pad_token_id bos_token_id decoder_start_token_id return_dict_in_generate
        transformers_version""".split(),
    }
)
"""Words that change no generated token, if the prompt is given as ids and runs alone."""

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    # all but "quantized", which changes keys and values
    "cache_implementation": tuple(
        """dynamic static offloaded offloaded_static paged hybrid hybrid_chunked sliding_window
        offloaded_hybrid offloaded_hybrid_chunked""".split()
    ),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
}
"""Values that turn a word off, besides its default."""

# the last three are of assistants, which take one row
KEEPING_ROWS = (
    FOLLOWED
    | WITHOUT_EFFECT
    | frozenset(
        """num_beams max_time stop_strings watermarking_config guidance_scale cache_implementation
        output_attentions output_hidden_states output_scores output_logits
        prompt_lookup_num_tokens assistant_early_exit is_assistant""".split()
    )
)
"""With these words `generate` keeps rows in order, or repeats each next to itself."""


def read_as_generate(base: Any, asked: Any | None) -> Any:
    """Return the configuration by which `generate(generation_config=asked)` would run.

    A word that `asked` leaves out is the model's own, then Transformers' default. `max_length` is
    None where neither sets it.

    Raises:
        InvalidInputError: no GenerationConfig, or one that `generate` refuses.
    """
    if asked is not None and not isinstance(asked, GenerationConfig):
        raise InvalidInputError(
            f"generation_config is {shown(asked)}\n  allowed: a GenerationConfig, or None for the "
            f"model's own"
        )
    try:
        # Private, but the only place where Transformers orders the sources of a word.
        config, _ = base._prepare_generation_config(asked)
    except Exception as error:  # values of a wrong type raise any error
        raise InvalidInputError(
            f"generate refuses this generation_config: {told(error)}"
        ) from error
    lengths = [getattr(source, "max_length", None) for source in (asked, base.generation_config)]
    # The merged one may hold a default, which would end prompts without a length.
    config.max_length = next((length for length in lengths if length is not None), None)
    return config


def with_words(config: Any, words: Mapping[str, Any]) -> Any:
    """Return a copy of a configuration with the words of one request.

    Raises:
        InvalidInputError: a word that no GenerationConfig has, or a value that it refuses.
    """
    # Shallow: `update` sets attributes, and no request writes into their values.
    changed = copy.copy(config)
    try:
        unknown = changed.update(**words)
    except Exception as error:
        raise InvalidInputError(f"generate refuses {shown_words(words)}: {told(error)}") from error
    if unknown:
        raise InvalidInputError(
            f"a request has no option {', '.join(map(shown, unknown))}\n"
            f"  allowed: streaming, record_timestamps and words of a GenerationConfig"
        )
    return changed


def check_followed(config: Any) -> None:
    """Refuse words that continuous batching would drop.

    Raises:
        UnsupportedInputError: it names each of them.
    """
    defaults = default_words()
    dropped = {
        word: value
        for word, value in vars(config).items()
        if not word.startswith("_")
        and word not in FOLLOWED | WITHOUT_EFFECT
        and not is_off(word, value, defaults)
    }
    if dropped:
        raise UnsupportedInputError(
            f"continuous batching does not follow {shown_words(dropped)}\n"
            f"  allowed: {', '.join(sorted(FOLLOWED))}\n"
            f"  to do: call generate() for these prompts, or take the word out of the "
            f"generation_config and of the model's own"
        )


def default_words() -> dict[str, Any]:
    """Return the words of the installed Transformers, with their defaults."""
    defaults: dict[str, Any] = GenerationConfig._get_default_generation_params()
    return {**vars(GenerationConfig()), **defaults}


def is_off(word: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Return whether a word has no effect: None, its default, or a value that turns it off."""
    default = defaults.get(word)
    off = (None, *HARMLESS.get(word, ()), False if default is None else default)
    # Kinds are compared first: 0 is not False here, and a tensor has no single truth value.
    return any(value is each or (_kind(value) is _kind(each) and value == each) for each in off)


def _kind(value: Any) -> type:
    # 1 and 1.0 are one value of a word, True and 1 are not.
    return float if type(value) is int else type(value)


def shown_words(words: Mapping[str, Any]) -> str:
    """Return words with their values, e.g. for an error."""
    return ", ".join(f"{word}={shown(value)}" for word, value in words.items())


def check_rows_are_kept(base: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse words by which `generate` may move, drop or repeat rows.

    Args:
        base: the model.
        inputs: of the call of `generate`.

    Raises:
        UnsupportedInputError: it names each of them.
    """
    sources = inputs.get("generation_config"), getattr(base, "generation_config", None)
    defaults = default_words()  # others are attributes that generate never reads
    moving = {}
    for word in defaults:
        # An argument of the call wins over its configuration, and that over the model's.
        values = [getattr(source, word, None) for source in sources]
        value = inputs[word] if word in inputs else next((v for v in values if v is not None), None)
        # Private attributes are Transformers' own caches.
        if not word.startswith("_") and word not in KEEPING_ROWS:
            if not is_off(word, value, defaults):
                moving[word] = value
    if moving:
        raise UnsupportedInputError(
            f"adapters differ by row or token, and generate may move rows with "
            f"{shown_words(moving)}\n"
            f"  allowed: {', '.join(sorted(KEEPING_ROWS))}\n  to do: split the batch by adapter"
        )
