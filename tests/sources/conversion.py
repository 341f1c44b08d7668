"""What the whole conversion must do with every family; inherited by :class:`tests.sources.conformance`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_convert.calibrate.collect import collect
from mla_convert.evaluate.cache import cache_bytes_per_token
from mla_convert.export.reference import reference_logits
from mla_convert.mla import MLAForCausalLM
from mla_convert.pipeline import ConvertRequest, convert
from mla_convert.plan import make_plan
from mla_convert.recipe import load_recipe
from mla_convert.transform import convert_layer

# Longer than every window and original context of the tiny models.
TOKENS = 40
# For logits of order one in float32, as the sums that make them are long; see `difference`.
BAR = 1e-4


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of logits, in units of their standard deviation where that is above 1."""
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.std().clamp_min(1.0)).item()


def prompt(case: Any, batch: int = 2, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, case.source.spec.vocab_size, (batch, tokens), generator=generator)


def dear(test: Any) -> Any:
    """Mark a test that takes seconds: of a family's variants the first is tested by default, the others are slow."""
    test.dear = True
    return test


class ConversionConformance:
    """Tests of the conversion of a ``case``.

    Attributes:
        shifts: whether logits depend on distances alone, so that all positions may be moved together; False for learned
            positions and for RoPE whose frequencies change with the length.
    """

    shifts: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def native(cls, case: Any, tmp_path_factory: pytest.TempPathFactory) -> MLAForCausalLM:
        """The case converted at full size, read back from its folder."""
        out = tmp_path_factory.mktemp("converted") / "out"
        convert(ConvertRequest(source=str(case.folder), out=out, recipe="exact", dtype="float32"))
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        assert isinstance(model, MLAForCausalLM)
        return model.eval()

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, case: Any) -> Tensor:
        with torch.no_grad():
            return case.load()(prompt(case), use_cache=False).logits

    @pytest.mark.parametrize("mode", ["expanded", "absorbed"])
    def test_the_full_rank_conversion_answers_as_the_source(
        self, native: MLAForCausalLM, case: Any, expected: Tensor, mode: str
    ) -> None:
        assert expected.std() > 0.1
        native.set_attention_mode(mode)
        with torch.no_grad():
            found = native(prompt(case), use_cache=False).logits
        native.set_attention_mode("auto")
        assert difference(found, expected) <= BAR

    @torch.no_grad()
    def test_generation_with_a_cache_equals_none(self, native: MLAForCausalLM, case: Any) -> None:
        """At lengths up to which no frequency changes: beyond, cached keys keep the angles that they were given."""
        length = TOKENS
        if case.source.spec.rope.update is not None:
            length = min(length, case.source.spec.rope.update.original_positions)
        ids = prompt(case)[:, :length]
        whole = native(ids, use_cache=False).logits
        outputs = native(ids[:, :5], use_cache=True)
        found = [outputs.logits]
        for at in range(5, length):
            cache = next(outputs[name] for name in ("cache", "past_key_values") if outputs.get(name) is not None)
            outputs = native(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            found.append(outputs.logits)
        assert difference(torch.cat(found, dim=1), whole) <= BAR

    @torch.no_grad()
    def test_left_padding_changes_no_answer(self, native: MLAForCausalLM, case: Any) -> None:
        ids = prompt(case)[:, :12]
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        padded = native(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        assert difference(padded[:1], native(ids[:1], use_cache=False).logits) <= BAR
        assert difference(padded[1:, 5:], native(ids[1:, 5:], use_cache=False).logits) <= BAR

    @torch.no_grad()
    def test_positions_may_start_anywhere(self, native: MLAForCausalLM, case: Any) -> None:
        ids = prompt(case)[:, :12]
        moved = native(ids, position_ids=torch.arange(12)[None] + 9, use_cache=False).logits
        if self.shifts and case.source.spec.rope.update is None:
            assert difference(moved, native(ids, use_cache=False).logits) <= BAR
        else:
            expected = case.load()(ids, position_ids=torch.arange(12)[None] + 9, use_cache=False).logits
            assert difference(moved, expected) <= BAR

    @dear
    def test_a_calibrated_conversion_is_exact_at_full_size_and_closer_with_more_cache(
        self, case: Any, expected: Tensor
    ) -> None:
        """The default recipe's statistics, over random tokens."""
        spec = case.source.spec
        statistics = collect(
            case.source.load_decoder(dtype=torch.float32), spec, prompt(case, 24), gradients=True, seed=0
        )
        recipe = load_recipe("fast")
        errors = []
        for share in (0.25, 0.6, 1.0):
            shapes = make_plan(spec, recipe=recipe, cache=share).layers
            layers = {
                i: convert_layer(case.source.attention(i), statistics[i], spec.rope_of(i), shapes[i], recipe).weights
                for i in range(spec.num_layers)
            }
            found = reference_logits(case.source, layers, prompt(case), torch.float32)
            errors.append((found - expected).square().mean().item() / expected.var().item())
        exact = 1e-8  # moments with condition numbers up to 1e8 leave half of float64's digits
        assert errors[2] <= exact
        assert errors[1] < errors[0]  # where x has few dims, full rank may come before all of the cache
        assert errors[2] <= max(errors[1], exact)

    @dear
    def test_the_cache_holds_what_the_plan_promises(self, case: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        spec = case.source.spec
        rope = 2 * (spec.max_rope_dim // 4)
        rank = spec.num_kv_heads * spec.head_dim // 2
        record = convert(
            ConvertRequest(
                source=str(case.folder), out=out, recipe="fast", kv_rank=rank, rope_dim=rope, dtype="float32",
                calibration=(str(_text(tmp_path)),), calibration_tokens=512,
            )
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        promised = spec.num_layers * (rank + rope + spec.key_scales) * 4
        assert record["plan"]["cache"]["bytes_per_token"] == promised
        lengths = (4, 6) if any(spec.windows) else (16, 32)
        assert cache_bytes_per_token(model, lengths=lengths) == promised
        config = json.loads((out / "config.json").read_text())
        assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (rank, rope)


def _text(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog, 0123456789 times; then (again) it rests. " * 20)
    return file
