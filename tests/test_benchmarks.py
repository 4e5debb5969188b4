"""The benchmarks run, check what they time, and write rows that the documentation can draw."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("name", ["op", "peers", "scaling", "layer"])
def test_a_benchmark_writes_rows_that_can_be_drawn(name, tmp_path, monkeypatch):
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(BENCHMARKS)
    import plots

    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    (rows,), (figure,) = plots.read().values(), plots.figures().values()
    assert all(float(row["low"]) <= float(row["ratio"]) <= float(row["high"]) for row in rows)
    drawn = {text.get_text() for axes in figure.axes for text in axes.get_yticklabels()}
    drawn |= {
        text.get_text().removesuffix(", training") for box in figure.legends for text in box.get_texts()
    }
    assert {row.get("work") or row["variant"] for row in rows} <= drawn
