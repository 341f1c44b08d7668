"""The reference pipeline is what it says: exact where nothing is lost, the recipe `transmla` where both must agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.reference_pipeline import Sizes, balanced_factors, convert, rotated, rotations, sizes_for
from mla_convert.errors import UsageError
from mla_convert.evaluate import cache_bytes_per_token, load_for_evaluation
from mla_convert.maths.factorise import factorise_joint
from mla_convert.mla.attention_mla import rotate
from mla_convert.pipeline import ConvertRequest
from mla_convert.pipeline import convert as convert_with_recipe
from mla_convert.sources import open_source
from mla_convert.spec import RopeSpec
from tests.tiny import save_source, tiny_llama

# G = 2, K = 16: 64 cached numbers.
WIDTH, HEAD_DIM = 64, 16


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_source(tiny_llama(), tmp_path_factory.mktemp("reference") / "source")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("reference-text") / "text.txt"
    file.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(120)))
    return file


def logits(ref: Path) -> Tensor:
    model, _ = load_for_evaluation(str(ref), torch.float32)
    ids = torch.randint(250, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def reference(source: Path, text: Path, out: Path, *, cache: float, rope_dim: int | None, fold: int) -> Path:
    found = convert(str(source), out, text=str(text), tokens=512, context=64, cache=cache, rope_dim=rope_dim, fold=fold)
    # Two layers; first pass: queries 64, keys 32, values 32 of 512 tokens; second: no less, as the latent is whole.
    assert found["activation_bytes"] >= 2 * 512 * (64 + 32 + 32) * 4
    return out


def test_with_every_slot_and_all_of_the_rank_nothing_is_lost(source: Path, text: Path, tmp_path: Path) -> None:
    out = reference(source, text, tmp_path / "out", cache=1.0, rope_dim=2 * HEAD_DIM, fold=1)
    # float32 through two layers, in another order.
    torch.testing.assert_close(logits(out), logits(source), rtol=1e-3, atol=1e-3)


def test_unfolded_and_without_truncation_it_is_the_recipe_transmla(source: Path, text: Path, tmp_path: Path) -> None:
    out = reference(source, text, tmp_path / "out", cache=1.0, rope_dim=None, fold=1)
    request = ConvertRequest(
        source=str(source),
        out=tmp_path / "recipe",
        recipe="transmla",
        overrides=("calibration.context=64",),
        kv_rank=WIDTH - HEAD_DIM,
        rope_dim=HEAD_DIM,
        calibration=(str(text),),
        calibration_tokens=512,
    )
    convert_with_recipe(request)
    recipe = logits(request.out)
    torch.testing.assert_close(logits(out), recipe, rtol=1e-3, atol=2e-3)
    assert (recipe - logits(source)).abs().max() > 0.05  # what both lose is there to be seen


@pytest.mark.parametrize(("slots", "apart"), [(HEAD_DIM, 0), (2 * HEAD_DIM, 0), (2 * HEAD_DIM, 7)])
def test_folding_changes_no_score_but_by_its_frequencies(source: Path, slots: int, apart: int) -> None:
    # Scores of one position stand with every number of slots; others where all keep RoPE and a fold's pairs turn alike.
    weights = open_source(str(source)).attention(0)
    alike = torch.tensor([1.0, 0.3, 0.05, 0.01]).repeat_interleave(2)
    rope = RopeSpec(HEAD_DIM, tuple(alike.tolist()))
    query_at, key_at = torch.randn(2, weights.w_q.shape[2], generator=torch.Generator().manual_seed(2)).double()
    keys = torch.randn(50, 2 * HEAD_DIM, generator=torch.Generator().manual_seed(3))
    layer = rotated(weights, rotations(keys, groups=2, fold=2), rope, Sizes(WIDTH - slots, slots, fold=2))

    query, key = weights.w_q.double() @ query_at, weights.w_k.double() @ key_at
    wanted = (turned(query, apart, alike) * key.repeat_interleave(2, dim=0)).sum(-1)
    content = torch.einsum("hn,hnc,c->h", layer.w_uq @ query_at, layer.w_uk, layer.w_dkv @ key_at)
    found = content + turned(layer.w_qr @ query_at, apart, torch.tensor(layer.inv_freq)) @ (layer.w_kr @ key_at)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # frequencies come as float32


def turned(x: Tensor, position: int, frequencies: Tensor) -> Tensor:
    angles = frequencies.double() * position
    return rotate(x, angles.cos(), angles.sin())


def test_folded_and_truncated_it_has_the_size_it_is_to_have(source: Path, text: Path, tmp_path: Path) -> None:
    out = reference(source, text, tmp_path / "out", cache=0.75, rope_dim=None, fold=2)
    model, _ = load_for_evaluation(str(out), torch.float32)
    assert cache_bytes_per_token(model) == 0.75 * WIDTH * 2 * 4  # two layers, float32
    assert bool(logits(out).isfinite().all())


def test_the_low_rank_is_the_best_one_in_the_balanced_metric() -> None:
    generator = torch.Generator().manual_seed(0)
    content = torch.randn(200, 12, generator=generator, dtype=torch.float64) @ torch.randn(
        12, 12, generator=generator, dtype=torch.float64
    )
    down, up = balanced_factors(content, 4, 5)
    moment = content.mT @ content
    energy = moment.diagonal()
    weights = torch.cat(((1 / energy[:4].sum()).expand(4), (1 / energy[4:].sum()).expand(8)))
    best = factorise_joint(moment, torch.diag(weights), 5, damping=0.0)
    torch.testing.assert_close(up @ down, best.up @ best.down)


def test_sizes_that_do_not_go_together_are_refused(source: Path) -> None:
    spec = open_source(str(source)).spec
    with pytest.raises(UsageError, match="folds"):
        sizes_for(spec, 0.75, 14, 2)
    with pytest.raises(UsageError, match="rank"):
        sizes_for(spec, 0.1, None, 2)


def test_attention_it_knows_nothing_of_is_refused(tmp_path: Path) -> None:
    spec = open_source(str(save_source(tiny_llama(bias=True), tmp_path / "biased"))).spec
    with pytest.raises(UsageError, match="plain attention"):
        sizes_for(spec, 0.75, None, 2)
