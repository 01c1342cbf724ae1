import pytest

from ocgpu.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "''"),
        ("llama 3.2 ü", "llama 3.2 ü"),
        ("a\nb\x1b[2J\x00", r"a\nb\x1b[2J\x00"),
        ("\N{RIGHT-TO-LEFT OVERRIDE}x\N{NO-BREAK SPACE}", r"\u202ex\xa0"),
        ("\udcff", r"\udcff"),
    ],
)
def test_what_could_deceive_a_reader_is_written_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown
