"""Text that somebody else wrote, made fit to be shown."""

__all__ = ["printable"]


def printable(text: str) -> str:
    """Write out as escapes what could move a terminal's cursor, forge a line or hide a word.

    That is all that `str.isprintable` refuses: control characters, line ends, direction marks, lone
    surrogates. An empty text becomes two quotes, so that it can be seen in a message.
    """
    if text.isprintable():
        return text or "''"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
