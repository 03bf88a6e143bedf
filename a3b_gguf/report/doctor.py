"""The table of `a3b doctor`."""

from __future__ import annotations

from a3b_gguf.probe.survey import Survey
from a3b_gguf.report.console import say, say_table


def show_survey(survey: Survey) -> None:
    say_table("This machine", ("what", "value", "remark"), [(line.what, line.value, line.remark) for line in survey.lines])
    for text in survey.machine.notes:
        say(f"note: {text}")
