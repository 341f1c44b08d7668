"""The licence of a source is what its model card or GGUF file says, else a link to its licence file, else nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mla_convert.sources.licence import licence_of_folder, licence_of_gguf


def _card(folder: Path, metadata: str) -> None:
    (folder / "README.md").write_text(f"---\n{metadata}\n---\n# A model\n\nlicense: not-this\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ("license: apache-2.0\ntags: [a]", {"license": "apache-2.0"}),
        (
            "license: other\nlicense_name: acme-1\nlicense_link: https://acme.example/1",
            {"license": "other", "license_name": "acme-1", "license_link": "https://acme.example/1"},
        ),
        ("license:\n- mit\n- apache-2.0", {"license": ["mit", "apache-2.0"]}),
    ],
)
def test_a_card_is_taken_at_its_word(metadata: str, found: dict, tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("MIT License")
    _card(tmp_path, metadata)
    assert licence_of_folder(tmp_path) == found


@pytest.mark.parametrize("metadata", ["tags: [a]", "license: [", "just text", "license: 3"])
def test_without_one_on_the_card_the_file_is_linked_and_its_text_not_interpreted(metadata, tmp_path: Path) -> None:
    _card(tmp_path, metadata)
    assert licence_of_folder(tmp_path) == {}
    (tmp_path / "LICENSE.txt").write_text("MIT License")
    found = licence_of_folder(tmp_path)
    assert (found["license"], found["license_link"]) == ("other", "LICENSE.txt")


@pytest.mark.parametrize("text", ["# No metadata\nlicense: mit\n", "---\nlicense: mit\n", ""])
def test_text_outside_the_metadata_states_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert licence_of_folder(tmp_path) == {}


def test_of_a_gguf_file() -> None:
    fields = {"general.license": "apache-2.0", "general.license.link": "https://acme.example/1"}
    reader = SimpleNamespace(
        get_field=lambda key: SimpleNamespace(contents=lambda: fields[key]) if key in fields else None
    )
    assert licence_of_gguf(reader) == {"license": "apache-2.0", "license_link": "https://acme.example/1"}  # type: ignore[arg-type]
    del fields["general.license"]
    assert licence_of_gguf(reader) == {}  # type: ignore[arg-type]
