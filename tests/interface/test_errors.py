"""Messages: what a stranger's file puts into them stays text."""

import pytest

from lora_backends import InvalidInputError, LoRABackendError, UnsupportedInputError


@pytest.mark.parametrize("kind", [LoRABackendError, InvalidInputError, UnsupportedInputError])
def test_a_message_cannot_act_on_the_terminal(kind):
    message = str(kind("no adapter named 'a\x1b[2J\x07\x9b\u202eb'\n\tgiven: é"))
    assert message == "no adapter named 'a\\x1b[2J\\x07\\x9b\\u202eb'\n\tgiven: é"


def test_a_message_can_always_be_printed():
    assert str(InvalidInputError("the file \udcff")).encode() == b"the file \\udcff"
