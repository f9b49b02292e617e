"""The versions of an engine's live adapters: current, kept for rollback, or still in use."""

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
    """Marks a version as used while vLLM builds a request for it."""


@dataclass(eq=False)
class Version:
    """One version of an adapter. To vLLM it is an adapter of its own, with an id of its own."""

    number: int
    id: int
    request: Any  # the `LoRARequest` by which vLLM runs it, with a unique name and path
    num_bytes: int  # on the host, of all workers
    users: WeakSet[Any] = field(default_factory=WeakSet)  # requests that vLLM still holds

    @property
    def is_used(self) -> bool:
        """Whether a request that began under this version has not ended."""
        return any(isinstance(user, Hold) or not user.is_finished() for user in list(self.users))


class Versions:
    """Every live adapter of an engine.

    The engine's main thread changes the versions; another thread looks up those of new requests.
    """

    def __init__(self) -> None:
        # held while a request takes a version, and while one is dropped
        self.lock = threading.Lock()
        self._held: dict[str, list[Version]] = {}  # by name; the last one is current
        self._keep: dict[str, int] = {}  # by name: versions to keep without users
        self._removed: list[Version] = []  # of removed adapters, still used by requests
        self._next_id = FIRST_ID

    def new_id(self) -> int:
        """Return an id that no version has had yet."""
        self._next_id += 1
        return self._next_id - 1

    def held(self) -> dict[str, list[Version]]:
        """Return the versions of each name, the current one last."""
        return {name: list(versions) for name, versions in self._held.items()}

    def check_new(self, name: str, number: int) -> None:
        """Refuse the number of a version that the adapter has.

        Raises:
            InvalidInputError: a version has this number.
        """
        taken = numbers(self._held.get(name, []))
        if number in taken:
            raise InvalidInputError(
                f"live adapter {name!r} has a version {number}\n"
                f"  allowed: a number other than {', '.join(map(str, taken))}"
            )

    def put(self, name: str, version: Version, keep: int | None = None) -> None:
        """Make a version the current one."""
        with self.lock:
            others = [each for each in self._held.get(name, []) if each is not version]
            self._held[name] = [*others, version]
            if keep is not None:
                self._keep[name] = keep

    def find(self, name: str, number: int | None = None) -> Version:
        """Return a version of an adapter; without a number, the current one.

        Raises:
            InvalidInputError: no such adapter, or no such version.
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
            f"  to do: keep more versions with live.update(..., keep=)"
        )

    def asked_for(self, name: str, path: str, request_id: str = "") -> Version | None:
        """Return the version that a user's `LoRARequest` names; None if the adapter is not live.

        Args:
            name: `lora_name` of the request.
            path: `lora_path` of the request; after `SCHEME` it names an adapter or a version.
            request_id: vLLM's. The samples of one request (n > 1) take the version of the first.

        Raises:
            InvalidInputError: no such live adapter, or no such version.
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
        """Remove an adapter; its versions stay while requests use them.

        Raises:
            InvalidInputError: no live adapter has this name.
        """
        self.find(name)
        with self.lock:
            self._removed += self._held.pop(name)

    def take_unused(self) -> list[Version]:
        """Drop and return the versions beyond those to keep that no request uses."""
        with self.lock:
            unused = [version for version in self._removed if not version.is_used]
            self._removed = [version for version in self._removed if version not in unused]
            for name, versions in self._held.items():
                old = [each for each in versions[: -self._keep[name]] if not each.is_used]
                self._held[name] = [each for each in versions if each not in old]
                unused += old
        return unused


def request_name(name: str, number: int, id_: int) -> str:
    """Return vLLM's name of a version, a key of its prefix cache."""
    return f"{name}@{number}#{id_}"


def numbers(versions: Iterable[Version]) -> list[int]:
    """Return the numbers of versions, ascending."""
    return sorted(version.number for version in versions)
