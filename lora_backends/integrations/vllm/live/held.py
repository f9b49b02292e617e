"""The versions of an engine's live adapters: the one that new requests take, those in use."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from lora_backends.errors import InvalidInputError, did_you_mean
from lora_backends.integrations.vllm.live.messages import SCHEME

FIRST_ID = 2**30
"""vLLM's id of the first version: far above the ids that vLLM's server counts from 1."""


class Hold:
    """Keeps a version while vLLM makes a request of it."""


@dataclass(eq=False)
class Version:
    """One version of an adapter. To vLLM it is an adapter of its own, with an id of its own."""

    number: int
    id: int
    request: Any  # the `LoRARequest` by which vLLM runs it; its name and path are like no other
    num_bytes: int  # on the host, of all workers
    users: WeakSet[Any] = field(default_factory=WeakSet)  # requests, while vLLM holds them

    @property
    def is_used(self) -> bool:
        """Whether a request that began under this version has not ended."""
        return any(isinstance(user, Hold) or not user.is_finished() for user in list(self.users))


class Versions:
    """Every live adapter of an engine.

    The engine's main thread changes it; another thread asks which version a new request takes.
    """

    def __init__(self) -> None:
        self.lock = (
            threading.Lock()
        )  # held while a request takes a version, and while one is dropped
        self._held: dict[str, list[Version]] = {}  # by name; the last one is the current
        self._keep: dict[str, int] = {}  # versions of a name that are kept without requests
        self._removed: list[Version] = []  # which requests still use
        self._next_id = FIRST_ID

    def new_id(self) -> int:
        """Return an id that no version has had."""
        self._next_id += 1
        return self._next_id - 1

    def held(self) -> dict[str, list[Version]]:
        """Return the versions of each name, the current one last."""
        return {name: list(versions) for name, versions in self._held.items()}

    def check_new(self, name: str, number: int) -> None:
        """Refuse a number that a version of the adapter has.

        Raises:
            InvalidInputError: there is one.
        """
        taken = numbers(self._held.get(name, []))
        if number in taken:
            raise InvalidInputError(
                f"live adapter {name!r} has a version {number}\n"
                f"  allowed: another number than {', '.join(map(str, taken))}"
            )

    def put(self, name: str, version: Version, keep: int | None = None) -> None:
        """Let new requests take a version."""
        with self.lock:
            others = [each for each in self._held.get(name, []) if each is not version]
            self._held[name] = [*others, version]
            if keep is not None:
                self._keep[name] = keep

    def find(self, name: str, number: int | None = None) -> Version:
        """Return a version of an adapter, the current one without a number.

        Raises:
            InvalidInputError: there is none.
        """
        versions = self._held.get(name)
        if not versions:
            raise InvalidInputError(
                f"no live adapter {name!r}{did_you_mean(name, self._held)}\n"
                f"  allowed: {', '.join(sorted(self._held)) or 'none yet'}\n"
                f"  to do: call live.update first"
            )
        if number is None:
            return versions[-1]
        for version in versions:
            if version.number == number:
                return version
        raise InvalidInputError(
            f"live adapter {name!r} has no version {number}\n"
            f"  allowed: {', '.join(map(str, numbers(versions)))}\n"
            f"  to do: keep more versions: live.update(..., keep=)"
        )

    def asked_for(self, name: str, path: str, request_id: str = "") -> Version | None:
        """Return the version that a `LoRARequest` of a user asks for; None if it asks for a file.

        Args:
            name: of the request's adapter.
            path: its `lora_path`; with `SCHEME`, a live adapter and possibly a version.
            request_id: vLLM's. The samples of one request (n > 1) take the version of the first.

        Raises:
            InvalidInputError: it asks for a live adapter, or a version, that is not there.
        """
        if path.startswith(SCHEME):
            name = path.removeprefix(SCHEME)
            adapter, _, number = name.rpartition("@")
            if name not in self._held and number.isdigit():
                return self.find(adapter, int(number))
        elif name not in self._held:
            return None
        return self._of_sibling(name, request_id) or self.find(name)

    def _of_sibling(self, name: str, request_id: str) -> Version | None:
        index, _, parent = request_id.partition("_")  # vLLM's name of a sample: "3_parent"
        if index.isdigit() and parent:
            for version in self._held.get(name, []):
                for user in list(version.users):
                    if getattr(user, "request_id", "").endswith(f"_{parent}"):
                        return version
        return None

    def remove(self, name: str) -> None:
        """Forget an adapter; requests that began under it end under it.

        Raises:
            InvalidInputError: there is none.
        """
        self.find(name)
        with self.lock:
            self._removed += self._held.pop(name)

    def take_unused(self) -> list[Version]:
        """Forget the versions that are not kept and that no request uses, and return them."""
        with self.lock:
            unused = [version for version in self._removed if not version.is_used]
            self._removed = [version for version in self._removed if version not in unused]
            for name, versions in self._held.items():
                old = [each for each in versions[: -self._keep[name]] if not each.is_used]
                self._held[name] = [each for each in versions if each not in old]
                unused += old
        return unused


def request_name(name: str, number: int, id_: int) -> str:
    """Return the name that vLLM knows a version by, which its prefix cache tells adapters by."""
    return f"{name}@{number}#{id_}"


def numbers(versions: Iterable[Version]) -> list[int]:
    """Return the numbers of versions, in order."""
    return sorted(version.number for version in versions)
