"""Arguments of the wrong type are refused by name."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from ocgpu import ConfigError, Lease, Pacer

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")


def set_weight(weight: Any) -> None:  # noqa: ANN401
    with Pacer() as pacer:
        pacer.weight = weight


@pytest.mark.parametrize("value", ["1", True, None, [1.0]])
@pytest.mark.parametrize("call", [Pacer, set_weight])
def test_a_weight_that_is_no_number_is_refused_by_name(
    call: Callable[[Any], object], value: object
) -> None:
    with pytest.raises(
        ConfigError, match=r"invalid `weight`: .*; use a number from 0\.001 to 1000"
    ):
        call(value)


@pytest.mark.parametrize("value", [2, 2.0, Fraction(2)])
def test_any_kind_of_number_is_a_weight(value: Any) -> None:  # noqa: ANN401
    with Pacer(value) as pacer:
        assert pacer.weight == 2.0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("name", lambda value: Pacer(name=value)),
        ("mode", lambda value: Lease(mode=value)),
        ("reason", lambda value: Lease(reason=value)),
        ("timeout", lambda value: Lease(timeout=[value])),  # type: ignore[arg-type]
        ("timeout", lambda value: Lease().acquire(timeout=[value])),  # type: ignore[arg-type]
    ],
)
def test_other_arguments_of_the_wrong_type_are_refused_by_name(
    name: str, call: Callable[[Any], object]
) -> None:
    with pytest.raises(ConfigError, match=f"invalid `{name}`: .*5.*; use "):
        call(5)


def test_a_pacer_shows_where_it_stands() -> None:
    with Pacer(1.5) as pacer:
        assert repr(pacer) == "<Pacer weight=1.5, slot 0>"

    assert repr(pacer) == "<Pacer weight=1.5, not paced: left>"
