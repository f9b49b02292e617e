"""A case: some adapters of a world in one batch, run in one of several ways and compared."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from helpers.sweeps.sweep import BOUND, result

from lora_backends import LoRABackendError

from .adapters import Adapter, blended, tensors_of
from .bases import draw_inputs
from .judging import PeftError, changes, doubled, fault_of, logits_of, of_peft, of_rows

if TYPE_CHECKING:
    from .runs import World

ADAPTERS = 16  # of a world
NEW_TOKENS = 3

Rows = list[Adapter | None]
Given = dict[str, torch.Tensor]


class Case:
    """Some adapters of a world in one batch, run in one of several ways."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self.world, self.draw, self.model = world, draw, world.model
        self.base = world.base
        names = draw.sample(
            [f"a{number}" for number in range(ADAPTERS)], draw.choice([1, 2, 2, 3, 4])
        )
        self.steps = [f"{self.base.name}, {world.backend}"]
        self.adapters = [world.adapter(name) for name in names]
        self.steps += [f"{adapter.name}: {adapter.config}" for adapter in self.adapters]
        self.refusals: list[str] = []
        self.changed = False  # a row by its adapter
        self.judged = True

    def run(self) -> tuple[str, str | None]:
        """Return the outcome, and what is wrong."""
        draw, loaded = self.draw, list(self.adapters)
        while missing := [a for a in loaded if a.name not in self.model.adapters]:
            fault = self._load(missing[0])  # it may evict another one of the case
            if fault:
                return "wrong", fault
            if missing[0].name not in self.model.adapters:
                loaded.remove(missing[0])
        rows: Rows = [draw.choice([None, *loaded, *loaded]) for _ in range(draw.randint(1, 6))]
        given = draw_inputs(draw, self.base, len(rows))
        kinds = [*WAYS] if self.base.is_causal else [w for w in WAYS if w not in CAUSAL]
        way = draw.choices(kinds, [WAYS[kind][0] for kind in kinds])[0]
        self.steps.append(f"{way}: {[row and row.name for row in rows]} {given}")
        try:
            fault = WAYS[way][1](self, rows, given)
        except LoRABackendError as error:
            outcome, fault = self.world.judge_refusal(error, [row for row in rows if row])
            self.refusals.append(f"{way} {outcome}")
            fault = fault or self.world.changed()
        except PeftError:
            fault, self.judged = None, False
        if fault:
            return "wrong", f"{way}: {fault}"
        if draw.random() < 0.1 and loaded:
            self.model.unload_adapter(draw.choice(loaded).name)
        fault = self.world.changed() if draw.random() < 0.2 else None
        if self.refusals:
            return self.refusals[-1], fault
        told = "equal" if self.changed else "equal, no adapter changes a row"
        return f"{way}: {told if self.judged else 'runs, not compared'}", fault

    def _load(self, adapter: Adapter) -> str | None:
        """Load an adapter; return what is wrong."""
        names = self.model.adapters
        try:
            how = self.draw.random()
            if how < 0.7:
                self.model.load_adapter(adapter.name, adapter.folder)
            elif how < 0.85 and adapter.config.get("init_lora_weights") not in ("pissa", "olora"):
                self.model.add_adapter(adapter.name, adapter.peft)
            else:
                config = adapter.peft.peft_config["default"]
                self.model.add_adapter(adapter.name, tensors_of(adapter.peft), config)
        except LoRABackendError as error:
            outcome, fault = self.world.judge_refusal(error, [adapter])
            self.refusals.append(outcome)
            if self.model.adapters != names:
                fault = f"after a refusal the adapters are {self.model.adapters}, not {names}"
            return fault or self.world.changed()
        return None

    def _peft(self, row: Adapter | None) -> Any:
        return self.base.model if row is None else row.peft

    def _judge(self, found: torch.Tensor, rows: Rows, given: Given) -> str | None:
        """Compare each row with PEFT's rows of its adapter."""
        for row in {id(row): row for row in rows}.values():
            own = [at for at, other in enumerate(rows) if other is row]
            part = of_rows(given, own)
            right = logits_of(self._peft(row), part)
            if row is not None and not self.changed:
                self.changed = changes(right, logits_of(self.base.model, part))
            for place, at in enumerate(own):
                exact = partial(self._exact, row, part, place)
                fault = fault_of(found[at], right[place], exact)
                if fault:
                    return f"row {at} of {row and row.name} is {fault}"
        return None

    def _exact(self, row: Adapter | None, part: Given, place: int) -> Any:
        return logits_of(self._double(row), doubled(part))[place]

    def _double(self, row: Adapter | None) -> Any:
        return copy.deepcopy(self.base.model).double() if row is None else row.in_float64()

    # Ways to run a batch

    def forward(self, rows: Rows, given: Given) -> str | None:
        names = [row and row.name for row in rows]
        words: dict[str, Any] = {"adapters": names}
        if self.draw.random() < 0.2:
            words = {"adapter_names": ["__base__" if name is None else name for name in names]}
        return self._judge(result(self.model(**words, **given)), rows, given)

    def split(self, rows: Rows, given: Given) -> str | None:
        names = [row and row.name for row in rows]
        words = {"split": True}
        if hasattr(self.base.model.config, "use_cache"):
            words["use_cache"] = False
        return self._judge(result(self.model(adapters=names, **words, **given)), rows, given)

    def prepared(self, rows: Rows, given: Given) -> str | None:
        names = [row and row.name for row in rows]
        tokens = self._same_length(given)
        with self.model.prepare(names[::-1], tokens=tokens) as step:
            step.update(names)
            return self._judge(result(self.model(adapters=step, **given)), rows, given)

    def _same_length(self, given: Given) -> int:
        """Give the decoder as many tokens as the encoder; return how many."""
        if self.base.takes_decoder_ids:
            given["decoder_input_ids"] = given["input_ids"].flip(0)
        return given["input_ids"].shape[1]

    def from_embeddings(self, rows: Rows, given: Given) -> str | None:
        embed = self.base.model.get_input_embeddings()
        given = dict(given)
        with torch.no_grad():
            given["inputs_embeds"] = embed(given.pop("input_ids"))
        return self.forward(rows, given)

    def same_per_token(self, rows: Rows, given: Given) -> str | None:
        length = self._same_length(given)
        entries: list[Any] = [[row and row.name] * length for row in rows]
        if any(row and row.is_invoked for row in rows):  # an entry per token overrides aLoRA's
            entries = [row and row.name for row in rows]
        return self._judge(result(self.model(adapters=entries, **given)), rows, given)

    def generate(self, rows: Rows, given: Given) -> str | None:
        """Compare greedy tokens, and their logits, until the first that PEFT nearly ties."""
        words = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        words |= {"pad_token_id": 0, "eos_token_id": None, "output_logits": True}
        words["return_dict_in_generate"] = True
        given = {"attention_mask": torch.ones_like(given["input_ids"]), **given}
        names = [row and row.name for row in rows]
        found = self.model.generate(adapters=names, **given, **words)
        for row in {id(row): row for row in rows}.values():
            own = [at for at, other in enumerate(rows) if other is row]
            with of_peft():
                right = self._peft(row).generate(**of_rows(given, own), **words)
            for place, at in enumerate(own):
                fault = self._fault_of_tokens(found, at, right, place)
                if fault:
                    return f"row {at} of {row and row.name}: {fault}"
        return None

    def _fault_of_tokens(self, found: Any, at: int, right: Any, place: int) -> str | None:
        for step in range(NEW_TOKENS):
            ours, pefts = found.logits[step][at], right.logits[step][place]
            bound = BOUND * max(1.0, pefts.abs().max().item()) * (step + 1)
            error = (ours - pefts).abs().max().item()
            self.changed = True
            if not error <= bound:
                return f"the logits of token {step} are off by {error:.3g}, bound {bound:.3g}"
            column = step - NEW_TOKENS
            if found.sequences[at, column] != right.sequences[place, column]:
                first, second = pefts.topk(2).values.tolist()
                if first - second > 2 * bound:
                    return f"token {step} is another, with {first - second:.3g} between two"
                return None
        return None

    def changing_per_token(self, rows: Rows, given: Given) -> str | None:
        """Change the adapter in the middle of each row: PEFT goes on from another's cache."""
        ids = given["input_ids"]
        length = ids.shape[1]
        at = self.draw.randint(1, length - 1) if length > 1 else length
        if any(row and row.is_invoked for row in rows):  # an entry per token overrides aLoRA's
            return self.forward(rows, given)
        later = [self.draw.choice([None, *rows]) for _ in rows]
        entries = [
            [a and a.name] * at + [b and b.name] * (length - at)
            for a, b in zip(rows, later, strict=True)
        ]
        self.steps.append(f"entries {entries}")
        found = result(self.model(adapters=entries, input_ids=ids))
        for row, (a, b) in enumerate(zip(rows, later, strict=True)):
            self.changed |= bool(a or b)
            right = partial(self._continued, ids[row : row + 1], at, a, b)
            fault = fault_of(found[row], right(self._peft), partial(right, self._double))
            if fault:
                return f"row {row} of {a and a.name}, then {b and b.name}, is {fault}"
        return None

    def _continued(self, ids: torch.Tensor, at: int, a: Any, b: Any, get: Any) -> torch.Tensor:
        """Return PEFT's logits of one row: one adapter, then another from the first one's cache."""
        length = ids.shape[1]
        with of_peft():
            first = get(a)(input_ids=ids[:, :at], use_cache=True)
            if at == length:
                return first.logits[0]
            name = next(n for n in ("cache", "past_key_values") if first.get(n) is not None)
            more = {name: first[name], "attention_mask": torch.ones(1, length).long()}
            second = get(b)(input_ids=ids[:, at:], **more)
        return torch.cat([first.logits, second.logits], 1)[0]

    def blend(self, rows: Rows, given: Given) -> str | None:
        """Give every row one or two adapters with strengths; PEFT runs both at once."""
        named = [row for row in rows if row]
        if not named:
            return self.forward(rows, given)
        parts = {row.name: row for row in self.draw.sample(named, min(2, len(named)))}
        strengths = {name: self.draw.choice([0.5, -1.0, 1.0, 0.3, 2.0]) for name in parts}
        found = result(self.model(adapters=[strengths if row else None for row in rows], **given))
        pairs = [(parts[name], strength) for name, strength in strengths.items()]
        if not all(adapter.is_plain for adapter in parts.values()):
            self.judged = False  # PEFT scales no whole modules, and scales the norm of DoRA
            return None
        self.changed = True
        model = blended(self.base, pairs)
        right = logits_of(model, given)

        def exact(at: int) -> torch.Tensor:
            return logits_of(copy.deepcopy(model).double(), given)[at]

        for at in (at for at, row in enumerate(rows) if row):
            fault = fault_of(found[at], right[at], partial(exact, at))
            if fault:
                return f"row {at} of {strengths} is {fault}"
        return None


WAYS = {
    "forward": (0.45, Case.forward),
    "generate": (0.15, Case.generate),
    "entries per token": (0.1, Case.changing_per_token),
    "one entry per token": (0.05, Case.same_per_token),
    "strengths": (0.08, Case.blend),
    "prepared": (0.08, Case.prepared),
    "split": (0.06, Case.split),
    "embeddings": (0.04, Case.from_embeddings),
}
CAUSAL = ("generate", "entries per token")
