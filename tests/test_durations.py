import pytest

from ocgpu.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("0s", 0.0),
        ("60s", 60.0),
        ("15m", 900.0),
        ("1m30s", 90.0),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("500ms", 0.5),
        ("250us", 250e-6),
        ("250µs", 250e-6),
        ("250\N{GREEK SMALL LETTER MU}s", 250e-6),
        ("7ns", 7e-9),
        ("1h0m0.25s", 3600.25),
    ],
)
def test_go_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


NOT_DURATIONS = ["", " ", "60", "s", "1", "-1s", "+1s", "1 s", "1s ", "1d", "1S", "1e3s", "1m30"]
NOT_NUMBERS = [".s", "1..5s", "nan", "inf", "infs", "1,5s", "٣s", "0x1s", "1s\n", "0\n", "00"]


@pytest.mark.parametrize("text", [*NOT_DURATIONS, *NOT_NUMBERS, "9999999999999h"])
def test_what_is_not_a_go_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0"),
        (7e-9, "7ns"),
        (250e-6, "250us"),
        (0.5, "500ms"),
        (1.0, "1s"),
        (59.25, "59.25s"),
        (60.0, "1m"),
        (90.0, "1m30s"),
        (900.0, "15m"),
        (3600.0, "1h"),
        (3661.5, "1h1m1.5s"),
    ],
)
def test_duration_is_written_as_go_reads_it(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
    assert parse_duration(text) == pytest.approx(seconds)
