"""docs/families.md: what it says of families comes from the registry and from measurements."""

from __future__ import annotations

from typing import Any

from docs.generate_families import measurements, page, unknown_in
from mla_convert.sources.registry import ADAPTERS

MEASURED: dict[str, Any] = {
    "versions": {"torch": "2.0"},
    "families": {
        "LlamaForCausalLM": {
            "variants": {
                "small": {"max_logit_difference": 2e-6, "logit_std": 1.0, "traits": []},
                "wide": {"max_logit_difference": 3e-6, "logit_std": 30.0, "traits": ["biases", "scaled RoPE"]},
            }
        },
        "Qwen2ForCausalLM": {
            "variants": {"GQA": {"max_logit_difference": 1e-6, "logit_std": 1.0, "traits": ["biases"]}}
        },
    },
}


def _row(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_every_family_has_a_row_and_a_description() -> None:
    text = page(measurements())
    for adapter in ADAPTERS:
        assert f"| {adapter.family} | `{adapter.architecture}` |" in text
        assert f"- **{adapter.family}**: " in text


def test_the_worst_variant_is_shown_and_what_was_not_measured_is_said() -> None:
    text = page(MEASURED)
    assert _row(text, "| llama | `Llama").endswith("| 2 | 2.0e-06 | 1 |")
    assert "not measured" in _row(text, "| mistral | `Mistral")
    assert "(torch 2.0)" in text


def test_marks_tell_all_variants_from_some() -> None:
    text = page(MEASURED)
    assert "| family | scaled RoPE | biases |" in text
    assert _row(text, "| llama | ○") == "| llama | ○ | ○ |"
    assert _row(text, "| qwen2 |  |") == "| qwen2 |  | ● |"


def test_measurements_of_no_family_are_found() -> None:
    assert not [*unknown_in(MEASURED)]
    assert "Gone" in next(unknown_in({"families": {"Gone": {"variants": {}}}}))
