"""What only the native format holds is refused, by its name, by every other form."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mla_convert.errors import FormatError
from mla_convert.export.converted import ConvertedModel
from mla_convert.export.deepseek import check_deepseek
from mla_convert.export.obstacles import model_obstacles, source_obstacles
from mla_convert.export.targets.registry import TARGETS
from mla_convert.export.targets.target import ExportOptions
from mla_convert.mla import MLAConfig
from mla_convert.sources import open_source
from mla_convert.spec import BlockSpec, QKNormSpec, RopeUpdate, SourceSpec
from tests.mla.exported import saved
from tests.mla.native import native
from tests.tiny import save_source, tiny_llama

# A field of BlockSpec, another value than Llama's, and a word of the refusal.
BLOCKS: dict[str, tuple[Any, str]] = {
    "norm": ("layer", "LayerNorm"),
    "norm_offset": (1.0, "added to the norms"),
    "input_norms": (False, "no norms before"),
    "output_norms": (True, "normalised"),
    "parallel_residual": (True, "side by side"),
    "mlp": ("plain", "no gate"),
    "num_experts": (4, "4 experts"),
    "embedding_scale": (8.0, "Embeddings are scaled by 8"),
    "residual_scale": (0.5, "Residual branches are scaled by 0.5"),
    "logits_scale": (0.25, "Logits are scaled by 0.25"),
    "final_logit_softcap": (30.0, "Logits are capped at 30"),
    "learned_positions": (64, "learned"),
    "embedding_norm": (True, "embeddings are normalised"),
}
# Fields that say more of what another one has refused already.
DETAILS = {"norm_bias": "norm", "shared_input_norm": "parallel_residual"} | dict.fromkeys(
    (
        "num_experts_per_tok",
        "norm_topk_prob",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "expert_layers",
    ),
    "num_experts",
)
# Fields of the config, and of a source, and a word of the refusal.
ATTENTION: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "softcap": ({"attention_softcap": 50.0}, {"attention_softcap": 50.0}, "capped at 50"),
    "alibi": ({"alibi_slopes": [0.5] * 4}, {"alibi_slopes": (0.5,) * 8}, "ALiBi"),
    "qk-norm": ({"qk_norm": "head"}, {"qk_norm": QKNormSpec("head", 1e-6)}, "normalised over each head"),
    "qk-norm over all": ({"qk_norm": "all"}, {"qk_norm": QKNormSpec("all", 1e-6)}, "all heads together"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(native(), tmp_path_factory.mktemp("plain")).folder


def refusals(folder: Path, changes: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Target -> why it refuses the plain model with other fields in its config; empty where it does not."""
    config = MLAConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    model = ConvertedModel(folder, config)
    plans = {name: target.plan(model, ExportOptions()) for name, target in TARGETS.items()}
    return {name: plan.reasons if plan.form is None else () for name, plan in plans.items()}


def test_every_field_of_a_block_is_refused_or_says_more_of_one_that_is() -> None:
    assert {field.name for field in fields(BlockSpec)} == set(BLOCKS) | set(DETAILS)


def test_a_model_of_llamas_kind_is_not_refused(folder: Path) -> None:
    assert not [*model_obstacles(MLAConfig.from_pretrained(folder))]
    assert not refusals(folder, {})["transformers"]


@pytest.mark.parametrize("field", BLOCKS)
def test_targets_refuse_another_block(folder: Path, field: str) -> None:
    value, word = BLOCKS[field]
    for target, reasons in refusals(folder, {field: value}).items():
        assert any(word in reason for reason in reasons), target


@pytest.mark.parametrize("kind", ATTENTION)
def test_targets_refuse_another_attention(folder: Path, kind: str) -> None:
    changes, _, word = ATTENTION[kind]
    for target, reasons in refusals(folder, changes).items():
        assert any(word in reason for reason in reasons), target


def test_targets_refuse_rope_that_changes_with_the_length(folder: Path) -> None:
    update = {"kind": "longrope", "original_positions": 32, "inv_freq": [1.0], "theta": 0.0, "factor": 1.0, "dim": 2}
    for target, reasons in refusals(folder, {"rope_update": update}).items():
        assert any("longrope" in reason for reason in reasons), target


def test_targets_refuse_slots_that_do_not_turn_under_a_factor(folder: Path) -> None:
    changes = {"rope_inv_freq": [[1.0, 0.5, 0.0]] * 3, "rope_attention_scaling": 1.2}
    for target, reasons in refusals(folder, changes).items():
        assert any("do not turn" in reason for reason in reasons), target


@pytest.mark.parametrize("field", BLOCKS)
def test_the_deepseek_format_refuses_another_block(spec: SourceSpec, field: str) -> None:
    value, word = BLOCKS[field]
    with pytest.raises(FormatError, match=word) as caught:
        check_deepseek(replace(spec, block=replace(BlockSpec(), **{field: value})))
    assert "--format native" in caught.value.remedy


@pytest.mark.parametrize("kind", ATTENTION)
def test_the_deepseek_format_refuses_another_attention(spec: SourceSpec, kind: str) -> None:
    _, changes, word = ATTENTION[kind]
    with pytest.raises(FormatError, match=word):
        check_deepseek(replace(spec, **changes))


def test_the_deepseek_format_refuses_rope_of_several_kinds(spec: SourceSpec) -> None:
    changing = replace(spec.rope, update=RopeUpdate("dynamic", 128, theta=1e4, factor=2.0))
    with pytest.raises(FormatError, match="dynamic"):
        check_deepseek(replace(spec, rope=changing))
    assert any("dynamic" in said for said in source_obstacles(replace(spec, layer_ropes=(spec.rope, changing))))
    with pytest.raises(FormatError, match="RoPE of their own"):
        check_deepseek(replace(spec, layer_ropes=(spec.rope,) * spec.num_layers))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> SourceSpec:
    return open_source(str(save_source(tiny_llama(), tmp_path_factory.mktemp("source")))).spec
