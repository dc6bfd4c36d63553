import pytest

from pantry.stock import count


@pytest.mark.parametrize(
    ("deliveries", "expected"),
    [
        pytest.param([], {}, id="nothing at all"),
    ],
)
def test_amounts_are_added_up(deliveries, expected):
    assert count(deliveries) == expected
