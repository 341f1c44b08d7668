"""Rules of the house that no linter holds."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ""}
MACHINE_PATH = re.compile(r"(?<![\w./~])/(?:home|root|tmp|work|Users)/")


def tracked_files() -> list[Path]:
    """Return the files of the project: what git tracks, or where there is no repository, what lies in its folders."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0 and listing.stdout:
        return [path for name in listing.stdout.splitlines() if (path := ROOT / name).is_file()]
    folders = ("mla_convert", "kernels", "benchmarks", "tests", "docs", "examples", "recipes")
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]


FILES = tracked_files()


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_kernels_is_not_a_package() -> None:
    """Transformers imports a PyPI package named `kernels`; a folder with an __init__.py would take its place."""
    assert (ROOT / "kernels" / "mla_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".py"], ids=relative)
def test_no_source_file_outgrows_one_concept(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_no_catch_all_modules() -> None:
    assert [path for path in FILES if path.stem in {"utils", "helpers", "misc", "common"}] == []


def test_no_file_names_a_place_on_one_machine() -> None:
    found = {
        relative(path)
        for path in FILES
        if path.suffix in TEXT_SUFFIXES and path != Path(__file__) and MACHINE_PATH.search(path.read_text("utf-8"))
    }
    assert found == set()


def test_nothing_is_left_to_do_in_the_code() -> None:
    marker = re.compile(r"\b(?:TODO|FIXME|XXX)\b|raise NotImplementedError")
    code = [path for path in FILES if path.suffix == ".py" and path != Path(__file__)]
    assert {relative(path) for path in code if marker.search(path.read_text("utf-8"))} == set()


def test_the_library_never_prints() -> None:
    code = [path for path in FILES if path.is_relative_to(ROOT / "mla_convert") and path.suffix == ".py"]
    assert {
        relative(path) for path in code if re.search(r"^\s*print\(", path.read_text("utf-8"), re.MULTILINE)
    } == set()


def test_both_packages_say_that_they_are_typed() -> None:
    assert (ROOT / "mla_convert" / "py.typed").is_file()
    assert (ROOT / "kernels" / "mla_kernels" / "py.typed").is_file()
