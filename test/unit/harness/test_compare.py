"""The judge of all end-to-end tests must see every kind of wrong row."""

import numpy as np
import pytest

from sglang.test.routed_experts.compare import Tally

ROWS = np.arange(5 * 3 * 4, dtype=np.int32).reshape(5, 3, 4) % 17


def tally(rows: np.ndarray | None) -> Tally:
    result = Tally()
    result.add(rows, ROWS)
    return result


def test_order_within_a_set_does_not_matter() -> None:
    assert tally(ROWS[:, :, ::-1].copy()) == Tally(ids=60, mismatches=0)


def test_one_wrong_id_is_one_mismatch() -> None:
    wrong = ROWS.copy()
    wrong[2, 1, 3] = 30
    assert tally(wrong) == Tally(ids=60, mismatches=1)


def test_a_repeated_id_is_a_mismatch() -> None:
    wrong = ROWS.copy()
    wrong[2, 1, 3] = wrong[2, 1, 0]
    assert tally(wrong).mismatches == 1


def test_rows_one_step_late_are_nearly_all_wrong() -> None:
    late = np.concatenate([ROWS[:1], ROWS[:-1]])
    assert tally(late).mismatches > 40


@pytest.mark.parametrize("rows", [ROWS[:-1], np.concatenate([ROWS, ROWS[:1]])])
def test_a_row_too_few_or_too_many_counts(rows: np.ndarray) -> None:
    assert tally(rows).mismatches == 12


def test_no_rows_at_all_are_all_wrong() -> None:
    assert tally(None) == Tally(ids=60, mismatches=60)
    assert tally(ROWS[:0]) == Tally(ids=60, mismatches=60)


def test_rows_of_another_model_are_an_error() -> None:
    with pytest.raises(AssertionError, match="right"):
        tally(ROWS[:, :2])
