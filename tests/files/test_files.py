"""Paths and files: anything that is no regular file is refused by its kind, and nothing waits."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import lora_backends
from lora_backends import InvalidInputError
from lora_backends.common.files import TEXT_BYTES, as_path, kind_of, new_file, read_bytes, read_text
from lora_backends.errors import did_you_mean, shown


def too_large(path, size):
    return InvalidInputError(f"{path}: {size} bytes are too many")


def read(path, limit=1000):
    return read_bytes(path, limit, too_large)


@pytest.mark.parametrize(
    "given", [None, 3, b"bytes", ["a"], "nul\0byte", "~nosuchuser/x"], ids=repr
)
def test_what_is_no_path_is_refused(given):
    with pytest.raises(InvalidInputError, match="the folder is (no path|in the home of a user)"):
        as_path(given, "the folder")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_in_the_home_is_expanded(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_path(kind("~/x"), "the folder") == tmp_path / "x"


def test_a_file_is_read_whole(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 1000)
    assert read(tmp_path / "file") == b"x" * 1000
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read(tmp_path / "link") == b"x" * 1000


def test_a_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 1001)
    with pytest.raises(InvalidInputError, match="1001 bytes are too many"):
        read(tmp_path / "file")


def test_what_is_no_regular_file_is_refused_by_its_kind(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    server = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    server.bind("socket")
    kinds = {"fifo": "a FIFO", "folder": "a folder", "socket": "a socket", "none": "no such file"}
    for name, kind in kinds.items():
        with pytest.raises(InvalidInputError, match=f"given: {kind}"):
            read(tmp_path / name)
    with pytest.raises(InvalidInputError, match="given: a device"):
        read(Path("/dev/zero"))
    for name in ("loop", "x" * 300, "nul\0byte", "\udcff\ud800"):
        with pytest.raises(InvalidInputError, match="cannot read"):
            read(tmp_path / name)
    server.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "file").chmod(0)
    with pytest.raises(InvalidInputError, match="PermissionError"):
        read(tmp_path / "file")


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    def deny(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", deny)
    with pytest.raises(InvalidInputError, match="PermissionError: Permission denied"):
        kind_of(tmp_path)


def test_a_fifo_that_replaces_the_file_is_not_waited_for(tmp_path):
    """The reader has looked at a file, and opens a FIFO: nobody will ever write to it."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from lora_backends.common import files\n"
        "path = Path(sys.argv[1])\n"
        "files.kind_of = lambda _: 'a file'\n"
        "try:\n"
        "    files.read_bytes(path, 10, None)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    os.mkfifo(tmp_path / "fifo")
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "fifo")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(lora_backends.__file__).parents[1])},
    )
    assert "given: a FIFO" in result.stdout


@pytest.mark.parametrize("change", [b"", b"longer than before"])
def test_a_file_that_changes_while_it_is_read_is_refused(change, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    status = os.fstat

    def change_after(descriptor):
        found = status(descriptor)
        path.write_bytes(change)
        return found

    monkeypatch.setattr(os, "fstat", change_after)
    with pytest.raises(InvalidInputError, match="changed while it was read"):
        read(path)


def test_an_error_that_a_signal_raises_is_not_an_unreadable_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"content")

    class Cancelled(TimeoutError):
        pass

    def cancel(*_):
        raise Cancelled

    status = os.fstat
    previous = signal.signal(signal.SIGUSR1, cancel)
    try:
        monkeypatch.setattr(os, "fstat", lambda _: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(Cancelled):
            read(tmp_path / "file")
    finally:
        monkeypatch.setattr(os, "fstat", status)
        signal.signal(signal.SIGUSR1, previous)


def test_a_file_of_settings_is_small_text(tmp_path):
    (tmp_path / "file").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="UTF-8"):
        read_text(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"x" * (TEXT_BYTES + 1))
    with pytest.raises(InvalidInputError, match="a file of settings"):
        read_text(tmp_path / "file")


def test_values_without_a_repr_are_shown_by_their_type():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "a value of type list that cannot be shown"
    assert shown(10**5000) == "a value of type int that cannot be shown"
    assert len(shown("x" * 10**6)) <= 203


def test_no_word_is_sought_for_a_very_long_one_or_among_very_many():
    assert did_you_mean("torch_re", ["torch_ref"])
    assert did_you_mean("torch_ref" * 10**5, ["torch_ref" * 10**5 + "f"]) == ""
    assert did_you_mean("torch_re", ["torch_ref"] * 10**6) == ""


def test_a_new_file_takes_no_place_of_something_else(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    kinds = {tmp_path / "fifo": "a FIFO", tmp_path: "a folder", "/dev/null": "a device"}
    for path, kind in kinds.items():
        with pytest.raises(InvalidInputError, match=f"--svg: .* is {kind}"):
            new_file(path, "--svg")
    assert new_file(tmp_path / "new", "--svg") == tmp_path / "new"
