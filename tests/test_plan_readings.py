"""Published logs and readings of nvidia-smi against the planner: the limits of `make bench`, on every test run."""

from __future__ import annotations

import pytest

from a3b_gguf.units import MIB
from plan_readings import CLOSE, CLOSE_BYTES, EXACT, SPEED, Compared, Judged, held_out, logs, readings


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    return list(readings())


@pytest.mark.parametrize("row", list(logs()), ids=lambda row: f"{row.id} {row.what}")
def test_buffers_that_llama_cpp_printed(row: Compared) -> None:
    # The difference of two readings of nvidia-smi, 294 or 298 for one setting: kernels that were loaded meanwhile are in it.
    measured = row.what.startswith("f16 copy")
    assert abs(row.off) <= (CLOSE if measured else EXACT)


def test_whole_cards_are_predicted(judged: list[Judged]) -> None:
    found = [row.vram for row in judged if row.vram]
    assert [row.id for row in found] == ["N1", "N3", "N4", *(f"N{i}" for i in range(6, 12)), *(f"N{i}" for i in range(13, 18))]
    for row in found:
        assert abs(row.off) <= CLOSE or abs(row.predicted - row.published) * MIB <= CLOSE_BYTES, row


def test_what_failed_is_refused_or_warned_about_and_what_worked_is_not_refused(judged: list[Judged]) -> None:
    verdicts = {row.id: row.verdict for row in judged}
    assert (verdicts["N12"], verdicts["N13"]) == ("refused", "tight")
    assert not [row.id for row in judged if row.wrong_fit]
    assert not [row.id for row in judged if row.wrong_refusal]


def test_decoding_speed(judged: list[Judged]) -> None:
    found = [row.decode for row in judged if row.decode]
    assert len(found) == 13
    for row in found:
        assert abs(row.off) <= SPEED, row


def test_decoding_speed_of_a_machine_that_nothing_was_fitted_to() -> None:
    """The form of the speed model, not its constants: each machine is predicted from the other's readings."""
    found = list(held_out())
    assert len(found) == 13
    assert max(abs(row.off) for row in found) <= SPEED
    assert max(abs(row.off) for row in found) > 0.2  # a fit that sees what it predicts is within 0.18
