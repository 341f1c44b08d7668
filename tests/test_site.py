"""The documentation: it builds without a broken link and loads nothing from elsewhere; the notebook runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.tiny import save_source, tiny_llama

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "convert.ipynb"
pytest.importorskip("mkdocs")
pytest.importorskip("nbclient")


class Loaded(HTMLParser):
    """What a page loads when it is opened: scripts, styles, images and fonts; links that a reader follows are not."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found += [values[name] or "" for name in ("src", "srcset", "poster") if name in values]
        if tag == "link" and values.get("rel") != "canonical":
            self.found.append(values.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {path.stem for path in site.glob("*.html")} == pages | {"404"}
    for page in site.glob("*.html"):
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.found
        assert [address for address in loaded.found if re.match(r"(https?:)?//", address)] == []
    for style in site.rglob("*.css"):
        assert not re.findall(r"@import|url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_formulas_are_drawn_by_the_browser(site: Path) -> None:
    source = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    page = (site / "method.html").read_text(encoding="utf-8")
    assert page.count("<math") == source.count("```math") + source.count("$`") > 20
    text = re.sub(r"<[^>]*>", "", page)
    assert not re.search(r"\$`|formula\d|\\(?:frac|sum|mathrm|overline|rho|Vert)", text)


@pytest.mark.parametrize("script", ["generate_pages.py", "generate_api.py"])
def test_generated_pages_are_what_the_code_says(script: str) -> None:
    subprocess.run([sys.executable, f"docs/{script}", "--check"], cwd=ROOT, check=True)


def run_notebook(**environment: str) -> str:
    """Run the notebook from top to bottom in a fresh kernel; return what its cells printed."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=540, kernel_name="python3").execute(env=os.environ | environment)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs_on_a_tiny_model(tmp_path: Path) -> None:
    source = save_source(tiny_llama(), tmp_path / "tiny")
    said = run_notebook(SOURCE=str(source), CALIBRATION_TOKENS="1024")
    for line in ("kept 50% of the cache", "log ratio", "layer  1: C 24, R 8", "The Python programming language is"):
        assert line in said


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs_on_the_embedded_model() -> None:
    said = run_notebook()
    assert float(re.search(r"log ratio (-?[\d.]+)", said)[1]) < 1.0


def test_the_notebook_is_kept_without_outputs() -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 4
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
