"""Which modules an `adapter_config.json` targets, and the rank and scaling of each.

rank, alpha   of the first pattern in rank_pattern, alpha_pattern that matches, else r, lora_alpha
scaling       alpha / rank, or alpha / sqrt(rank) for rsLoRA
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.files.messages import as_json, problem
from lora_backends.adapters.peft.config import ALL_LINEAR, ALLOWED, PeftLoraConfig
from lora_backends.adapters.peft.expressions import (
    BrokenExpressionError,
    Expression,
    MatchingFailedError,
    MatchingTimeoutError,
    match_all,
)
from lora_backends.errors import InvalidInputError, UnsupportedInputError

T = TypeVar("T")

HEAD = "lm_head"
"""Path of the head that most decoders tie with their embedding."""

_TIED_NAMES = ("embed_tokens", HEAD)
_HEAD_NAMES = (HEAD, "embed_out")
_CLASSIFIER_NAMES = ("score", "classifier")
_SAVED_BY_TASK = {
    "SEQ_CLS": _CLASSIFIER_NAMES,
    "TOKEN_CLS": _CLASSIFIER_NAMES,
    "QUESTION_ANS": ("qa_outputs",),
}

_METACHARACTERS = frozenset(r"\^$*+?{}[]|()")
# The first numbered component counts: later ones number experts.
_NUMBERED = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")


@dataclass(frozen=True)
class ModuleRule:
    """Whether a configuration targets a module, and its rank and scaling."""

    targeted: bool  # PEFT would put LoRA on it
    rank: int
    scaling: float


def module_rules(
    config: PeftLoraConfig,
    modules: Sequence[str],
    path: Path,
    limits: LoadLimits,
    may_tie: bool = False,
) -> dict[str, ModuleRule]:
    """Return the rule of each module, as PEFT reads it from a configuration.

    With `may_tie` the caller compares the LoRA with the base model's tied weights.

    Raises:
        InvalidInputError: a regular expression is broken, or matching takes too long.
        UnsupportedInputError: whether the head is adapted depends on the base model.
    """
    deadline = time.monotonic() + limits.matching_seconds
    if not may_tie and ties_targets(config, path, limits):
        reason = "whether the head is adapted depends on the base model's tied weights"
        raise UnsupportedInputError(
            problem(
                path,
                "the adapter uses a feature that this library cannot reproduce exactly",
                f"ensure_weight_tying = true: {reason}",
                "ensure_weight_tying = false, or targets without embedding and head",
            )
        )
    rules = _Rules(config, _matches(config, modules, path, limits))
    by_module = {}
    for module in modules:
        if time.monotonic() > deadline:  # patterns without metacharacters are matched here
            raise _too_slow(config, path, limits)
        by_module[module] = rules.rule(module)
    if not config.is_of_peft(0, 15):
        _check_old_patterns(config, rules, by_module, path)
    return by_module


def _check_old_patterns(
    config: PeftLoraConfig, rules: _Rules, by_module: Mapping[str, ModuleRule], path: Path
) -> None:
    """Refuse patterns that PEFT up to 0.14 read in another way, where only the alphas differ."""
    given = []
    for module, rule in by_module.items():
        # by the first key of both patterns that matches; a wrong rank shows in the tensors
        old = rules.old_rule(module)
        if rule.targeted and old.rank == rule.rank and old.scaling != rule.scaling:
            given.append(f"{module!r}: scaling {old.scaling:g} up to 0.14, {rule.scaling:g} since")
    if given:
        what = "PEFT up to 0.14 read rank_pattern and alpha_pattern in another way than since"
        version = f"peft_version = {as_json(config.peft_version)}"
        allowed = "the same keys in both, or a peft_version of 0.15 or later"
        to_do = f'where 0.15 or later trained it, add "peft_version": "0.15.0" to {path.name}'
        raise UnsupportedInputError(problem(path, what, [version, *given], allowed, to_do))


def targets_among(
    config: PeftLoraConfig, modules: Sequence[str], path: Path, limits: LoadLimits
) -> list[str]:
    """Return the modules of a base model that a configuration targets, whatever the file holds."""
    # the LoRA of these depends on the base model
    tied = _TIED_NAMES if config.ensure_weight_tying else ()
    asked = [module for module in modules if module.split(".")[-1] not in tied]
    # Ranks do not matter here, and matching their patterns takes time.
    plain = config.model_copy(update={"rank_pattern": None, "alpha_pattern": None})
    rules = _Rules(plain, _matches(plain, asked, path, limits))
    targeted = [module for module in asked if rules.rule(module).targeted]
    if str(config.target_modules).lower() == ALL_LINEAR:
        return [module for module in targeted if any(part.isdigit() for part in module.split("."))]
    return targeted


def saved_names(config: PeftLoraConfig) -> tuple[str, ...]:
    """Return the ends of the paths of modules that PEFT saves whole, those of a task as well."""
    named = (*(config.modules_to_save or ()), *_SAVED_BY_TASK.get(config.task_type or "", ()))
    return tuple(dict.fromkeys(named))


def ties_saved(config: PeftLoraConfig) -> bool:
    """Return whether PEFT makes one module of a saved embedding and its tied head."""
    last = {name.split(".")[-1] for name in config.modules_to_save or ()}
    return config.ensure_weight_tying and not last.isdisjoint(_TIED_NAMES)


def ties_targets(config: PeftLoraConfig, path: Path, limits: LoadLimits) -> bool:
    """Return whether PEFT gives a tied head the LoRA of the embedding, transposed."""
    if not config.ensure_weight_tying or ties_saved(config):
        return False
    rules = _Rules(config, _matches(config, _TIED_NAMES, path, limits))
    return any(map(rules.is_tied_target, _TIED_NAMES))


def targets_parameter(config: PeftLoraConfig, path: str) -> bool:
    """Return whether PEFT puts LoRA on a parameter: `target_parameters` names its path's end."""
    # neither `exclude_modules` nor `layers_to_transform` narrows these
    names = config.target_parameters or ()
    return any(path == name or path.endswith(f".{name}") for name in names)


Matches: TypeAlias = Mapping[Expression, Mapping[str, bool | str]]
Patterns: TypeAlias = Mapping[str, tuple[T, Mapping[str, bool | str] | None]]
"""Per pattern its value, and the modules that it matches where `re` decides that."""


class _Rules:
    def __init__(self, config: PeftLoraConfig, matches: Matches) -> None:
        self._config, self._matches = config, matches
        self._saved = [f".{name}." for name in saved_names(config)]
        self._layers = frozenset(_as_list(config.layers_to_transform))
        self._ranks = self._with_matches(config.rank_pattern or {})
        self._alphas = self._with_matches(config.alpha_pattern or {})

    def rule(self, module: str) -> ModuleRule:
        config = self._config
        rank = _first(self._ranks, module, config.r)
        alpha = _first(self._alphas, module, config.lora_alpha)
        return ModuleRule(self._is_targeted(module), rank, self._scaling(rank, alpha))

    def old_rule(self, module: str) -> ModuleRule:
        """Return the rule of PEFT up to 0.14, which looks up one key in both patterns."""
        config = self._config
        keys = {
            key: (key, matches)
            for key, (_, matches) in (*self._ranks.items(), *self._alphas.items())
        }
        key = _first(keys, module, module)
        rank = (config.rank_pattern or {}).get(key, config.r)
        alpha = (config.alpha_pattern or {}).get(key, config.lora_alpha)
        return ModuleRule(self._is_targeted(module), rank, self._scaling(rank, alpha))

    def _scaling(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)

    def is_tied_target(self, name: str) -> bool:
        """Return whether the embedding or head of this name is among the targets."""
        targets = self._config.target_modules
        if isinstance(targets, list):
            return any(target.split(".")[-1] == name for target in targets)
        if targets is None or targets.lower() == ALL_LINEAR:
            return False
        return self._names(targets, name)

    def _with_matches(self, patterns: Mapping[str, T]) -> Patterns[T]:
        return {
            pattern: (
                value,
                None if _is_literal(pattern) else self._matches[_pattern_expression(pattern)],
            )
            for pattern, value in patterns.items()
        }

    def _is_targeted(self, module: str) -> bool:
        """Return whether PEFT puts LoRA on a module: not on one that it saves whole, or in one."""
        targets, excluded = self._config.target_modules, self._config.exclude_modules
        if targets is None or (excluded and self._names(excluded, module)):
            return False
        if any(name in f".{module}." for name in self._saved):
            return False
        if isinstance(targets, str):
            if targets.lower() == ALL_LINEAR:
                # "all-linear" leaves out the head, which is recognised by its name here
                return not _is_head(self._config, module)
            # a string is a regular expression for the full path
            return self._names(targets, module)
        # a list matches whole trailing components; `layers_to_transform` narrows such matches, but
        # not an entry that is the full path
        return module in targets or (self._names(targets, module) and self._is_in_layer(module))

    def _names(self, names: list[str] | str, module: str) -> bool:
        if isinstance(names, str):
            return bool(self._matches[Expression("whole", names)][module])
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _is_in_layer(self, module: str) -> bool:
        if not self._layers:
            return True
        patterns = _layers_patterns(self._config)
        if not patterns:
            match = _NUMBERED.match(module)
            return match is not None and int(match["idx"]) in self._layers
        # As in PEFT, the first pattern that matches decides.
        for pattern in patterns:
            layer = self._matches[_layer_expression(pattern)][module]
            if isinstance(layer, str):
                return int(layer) in self._layers
        return False


def _matches(
    config: PeftLoraConfig, names: Sequence[str], path: Path, limits: LoadLimits
) -> Matches:
    # All at once: starting the process takes longer than matching.
    keys = list(_expressions(config))
    expressions = [expression for _, _, expression in keys]
    try:
        results = match_all(expressions, names, limits.matching_seconds)
    except BrokenExpressionError as error:
        key, pattern, _ = keys[error.index]
        what = f"{key} holds a broken regular expression"
        facts = [as_json(pattern), str(error)]
        raise InvalidInputError(problem(path, what, facts, ALLOWED[key])) from error
    except MatchingTimeoutError as error:
        raise _too_slow(config, path, limits) from error
    except MatchingFailedError as error:
        given = f"{len(expressions)} regular expressions; {error}"
        what = "its regular expressions could not be matched with the modules"
        allowed = "names of modules, or expressions that take little time and memory"
        to_do = f"write the names of modules in {path.name}"
        raise InvalidInputError(problem(path, what, given, allowed, to_do)) from error
    return {
        e: dict(zip(names, result, strict=True))
        for e, result in zip(expressions, results, strict=True)
    }


def _too_slow(config: PeftLoraConfig, path: Path, limits: LoadLimits) -> InvalidInputError:
    given = [f"{key} = {as_json(pattern)}" for key, pattern, _ in _expressions(config)]
    seconds = limits.matching_seconds
    facts = ["patterns that take longer to match with the modules", *given]
    return limits.exceeded("matching_seconds", path, facts, 10 * seconds)


def _expressions(config: PeftLoraConfig) -> Iterator[tuple[str, str, Expression]]:
    """Yield the key, the text in the file and the expression of everything that `re` decides."""
    for key in ("target_modules", "exclude_modules"):
        value = getattr(config, key)
        if isinstance(value, str) and not (key == "target_modules" and value.lower() == ALL_LINEAR):
            yield key, value, Expression("whole", value)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key) or ():
            if not _is_literal(pattern):
                yield key, pattern, _pattern_expression(pattern)
    for pattern in _layers_patterns(config):
        yield "layers_pattern", pattern, _layer_expression(pattern)


def _first(patterns: Patterns[T], module: str, default: T) -> T:
    for pattern, (value, matches) in patterns.items():
        if _is_tail(pattern, module) if matches is None else matches[module]:
            return value
    # A path that is a key, but does not match itself as an expression, counts as well.
    return patterns[module][0] if module in patterns else default


def _pattern_expression(pattern: str) -> Expression:
    return Expression("start", rf"(.*\.)?({pattern})$")


def _layer_expression(pattern: str) -> Expression:
    return Expression("layer", rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.")


def _is_literal(pattern: str) -> bool:
    return _METACHARACTERS.isdisjoint(pattern)


def _is_tail(pattern: str, module: str) -> bool:
    """Return whether whole trailing components match a pattern where only "." is special."""
    start = len(module) - len(pattern)
    if start < 0 or (start > 0 and module[start - 1] != "."):
        return False
    tail = module[start:]
    return tail == pattern or all(p in (".", m) for p, m in zip(pattern, tail, strict=True))


def _as_list(value: list[T] | T | None) -> list[T]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _layers_patterns(config: PeftLoraConfig) -> list[str]:
    return _as_list(config.layers_pattern or None)


def _is_head(config: PeftLoraConfig, module: str) -> bool:
    classifier = config.task_type == "SEQ_CLS" and module in _CLASSIFIER_NAMES
    return classifier or module.split(".")[-1] in _HEAD_NAMES
