"""The snippets of the documentation run as they stand, one after another on each page."""

import re
from pathlib import Path

import onnxruntime
import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[1]
# docs/distributed.md needs two processes: tests/test_distributed.py
PAGES = [
    "README.md",
    "docs/index.md",
    "docs/guide.md",
    "docs/faq.md",
    pytest.param(
        "docs/export.md",
        marks=pytest.mark.skipif(
            Version(onnxruntime.__version__) < Version("1.29"),
            reason="onnxruntime before 1.29 has no cosines in float64",
        ),
    ),
]


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run_and_print_what_they_promise(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # compiling C++ takes minutes; tests/test_export.py does it with fewer headers
    text = "\n".join(snippet for snippet in snippets(page) if "aoti_compile" not in snippet)
    assert text
    exec(compile(text, page, "exec"), {})
    promised = [line.split(": ")[0] for line in re.findall(r"^print\(.*\)  # (.*)", text, re.MULTILINE)]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith("[torch.onnx]")] == promised
