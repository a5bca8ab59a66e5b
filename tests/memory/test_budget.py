"""resolve_budget: every spelling, and what is refused."""

from __future__ import annotations

import pytest

from streamload.errors import BudgetError, StreamloadError
from streamload.memory import resolve_budget

MiB = 1024 * 1024
AVAILABLE = 1000 * MiB


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (1, 1),
        (12345, 12345),
        ("12345", 12345),
        ("12345B", 12345),
        ("7kb", 7_000),
        ("7KiB", 7 * 1024),
        ("32MiB", 32 * MiB),
        ("32mib", 32 * MiB),
        (" 32 MiB ", 32 * MiB),
        ("32MB", 32_000_000),
        ("1.5GiB", 1536 * MiB),
        ("2GB", 2_000_000_000),
        ("1TiB", 1 << 40),
        ("1TB", 10**12),
        ("10%", 100 * MiB),
        ("0.5 %", 5 * MiB),
        ("100%", AVAILABLE),
    ],
)
def test_spellings(spelling: int | str, expected: int):
    assert resolve_budget(spelling, AVAILABLE) == expected


@pytest.mark.parametrize(
    ("available", "expected"),
    [(0, 0), (100, 25), (256 * MiB - 4, 64 * MiB - 1), (256 * MiB, 64 * MiB), (1 << 40, 64 * MiB)],
)
def test_auto_is_the_smaller_of_64_mib_and_a_quarter(available: int, expected: int):
    assert resolve_budget("auto", available) == expected


@pytest.mark.parametrize(
    "spelling",
    [
        0,
        -1,
        "0",
        "0B",
        "0MiB",
        "0%",
        "0.1B",
        "101%",
        "200 %",
        "-5MiB",
        "lots",
        "",
        "MiB",
        "%",
        "3 bananas",
        "1e6",
        "5 5",
        "Auto!",
        "10MiB%",
        True,
        False,
        None,
        [1],
    ],
)
def test_refused_with_the_value(spelling: object):
    with pytest.raises(BudgetError) as caught:
        resolve_budget(spelling, AVAILABLE)  # type: ignore[arg-type]
    message = str(caught.value)
    assert f"memory_limit={spelling!r}" in message
    assert "expected" in message
    assert "\n" not in message
    assert isinstance(caught.value, StreamloadError)
