"""Stages leave one line each, with their time, where there is no terminal."""

import io

from rich.console import Console

from eldr.demo.stages import Stages


def test_a_finished_stage_is_a_line_with_its_time():
    moments = iter([0.0, 10.0, 14.0, 14.0, 20.0])
    out = io.StringIO()
    stages = Stages(Console(file=out, width=100), lambda: next(moments))
    with stages.stage("warmed up", 3) as advance:
        for _ in range(3):
            advance()
    stages.line("note [x]")
    assert out.getvalue() == "[   14 s] warmed up, 4 s\n[   20 s] note [x]\n"
