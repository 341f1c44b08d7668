"""The native model: both forms of attention are the paper's, with every cache, mask and position."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from mla_convert.maths.absorb import absorb_layer
from mla_convert.mla import MLAConfig, MLAForCausalLM
from mla_convert.mla.attention_mla import mask_scores
from mla_convert.mla.names import from_hf
from mla_convert.mla.weights import MLAWeights
from mla_convert.spec import MLAShape
from tests.mla.native import LAYERS, SIZES, VARIANTS, VOCAB, cache_of, logits_by_hand, native, tokens

MODES = ("expanded", "absorbed", "auto")

# Logits are of order one, computed in float32 (6e-8) through three layers of sums over some dozens of terms.
TOLERANCE = 1e-5


def max_difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return (found.double() - expected.double()).abs().max().item()


@torch.no_grad()
def logits(model: MLAForCausalLM, ids: Tensor, **options) -> Tensor:
    return model(ids, use_cache=False, **options).logits


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", ["expanded", "absorbed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_papers_equations(variant: str, mode: str, implementation: str) -> None:
    model, ids = native(variant), tokens()
    model.set_attn_implementation(implementation)
    model.set_attention_mode(mode)
    expected = torch.stack([logits_by_hand(model, row)[0] for row in ids])
    assert expected.std() > 0.5
    assert max_difference(logits(model, ids), expected) <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_absorbed_equals_expanded(variant: str) -> None:
    model, ids = native(variant), tokens(batch=3, length=20)
    found = []
    for mode in ("absorbed", "expanded"):
        model.set_attention_mode(mode)
        found.append(logits(model, ids))
    assert max_difference(*found) <= TOLERANCE


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_equal_the_full_forward(variant: str, mode: str, implementation: str) -> None:
    """Eight tokens, then one, three and one at a time: a chunk over a cache has a mask of its own."""
    model, ids = native(variant), tokens()
    model.set_attn_implementation(implementation)
    model.set_attention_mode(mode)
    expected = torch.stack([logits_by_hand(model, row)[0] for row in ids])
    cache, found, start = None, [], 0
    for step in (7, 1, 3, 1):
        with torch.no_grad():
            outputs = model(ids[:, start : start + step], past_key_values=cache, use_cache=True)
        cache, start = cache_of(outputs), start + step
        found.append(outputs.logits)
    assert max_difference(torch.cat(found, dim=1), expected) <= TOLERANCE


@pytest.mark.parametrize("mode", ["expanded", "absorbed"])
@pytest.mark.parametrize("variant", ["plain", "biases", "windows", "unequal"])
def test_left_padding_changes_nothing(variant: str, mode: str) -> None:
    model, ids = native(variant), tokens(batch=1, length=9)
    model.set_attention_mode(mode)
    expected = logits_by_hand(model, ids[0])[0]
    padded = torch.cat((torch.ones(1, 4, dtype=torch.long), ids), dim=1)
    mask = torch.cat((torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)), dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = logits(model, padded, attention_mask=mask, position_ids=positions)
    assert torch.isfinite(found).all()
    assert max_difference(found[0, 4:], expected) <= TOLERANCE


@pytest.mark.parametrize("mode", ["expanded", "absorbed"])
def test_positions_matter_by_their_distance_alone(mode: str) -> None:
    model, ids = native(), tokens(batch=1)
    model.set_attention_mode(mode)
    shifted = logits(model, ids, position_ids=torch.arange(40, 40 + ids.shape[1])[None])
    assert max_difference(shifted[0], logits_by_hand(model, ids[0], first_position=40)[0]) <= TOLERANCE
    # float32 angles of up to 51 radians are off by some 1e-6
    assert max_difference(shifted, logits(model, ids)) <= 10 * TOLERANCE
    stretched = logits(model, ids, position_ids=2 * torch.arange(ids.shape[1])[None])
    assert max_difference(stretched, shifted) > 0.01


def test_every_layer_turns_at_frequencies_of_its_own() -> None:
    model, ids = native(), tokens()
    before = logits(model, ids)
    for layer in range(LAYERS):
        changed = [list(row) for row in SIZES["rope_inv_freq"]]
        changed[layer][0] += 0.3
        assert max_difference(logits(native(rope_inv_freq=changed), ids), before) > 0.01


def test_masks_hide_what_they_say_in_each_of_their_forms() -> None:
    scores = torch.arange(12.0).view(1, 1, 3, 4)
    visible = torch.tensor([[True, True, False, False], [True, True, True, False], [False, True, True, True]])
    lowest = torch.finfo(torch.float32).min
    expected = scores.masked_fill(~visible, lowest)
    assert torch.equal(mask_scores(scores, visible[None, None]), expected)
    additive = torch.zeros(1, 1, 3, 6).masked_fill(~torch.nn.functional.pad(visible, (0, 2)), lowest)
    assert torch.equal(mask_scores(scores, additive).softmax(-1), expected.softmax(-1))
    # without a mask the queries are the last of the cached tokens
    causal = torch.tensor([[True, True, False, False], [True, True, True, False], [True, True, True, True]])
    assert torch.equal(mask_scores(scores, None), scores.masked_fill(~causal, lowest))
    assert torch.equal(mask_scores(scores[:, :, :1], None), scores[:, :, :1])


@pytest.mark.parametrize("mode", MODES)
def test_the_cache_holds_latent_and_rope_key_and_no_byte_more(mode: str) -> None:
    model, ids = native(), tokens(batch=3)
    model.set_attention_mode(mode)
    with torch.no_grad():
        cache = cache_of(model(ids, use_cache=True))
        for length in (12, 13, 14):
            for layer in cache.layers:
                assert (layer.keys.shape, layer.values.shape) == ((3, 1, length, 10), (3, 1, length, 6))
            storages = {t.untyped_storage().data_ptr(): t for layer in cache.layers for t in (layer.keys, layer.values)}
            assert sum(t.untyped_storage().nbytes() for t in storages.values()) == 3 * length * LAYERS * (10 + 6) * 4
            cache = cache_of(model(ids[:, :1], past_key_values=cache, use_cache=True))


@pytest.mark.parametrize("mode", MODES)
def test_every_layer_caches_what_is_its_own(mode: str) -> None:
    model, ids = native("unequal"), tokens(batch=3)
    model.set_attention_mode(mode)
    with torch.no_grad():
        cache = cache_of(model(ids, use_cache=True))
        cache = cache_of(model(ids[:, :1], past_key_values=cache, use_cache=True))
    found = [(layer.keys.shape, layer.values.shape) for layer in cache.layers]
    assert found == [((3, 1, 13, c), (3, 1, 13, r)) for c, r in ((10, 4), (17, 0), (5, 6))]


def test_cached_rows_are_the_latent_and_the_rotated_shared_key() -> None:
    model, ids = native("latent-bias"), tokens(batch=1)
    with torch.no_grad():
        outputs = model(ids, use_cache=True, output_hidden_states=True)
        layer = model.model.layers[0]
        x = layer.input_layernorm(outputs.hidden_states[0])[0].double()
    compressed = x @ layer.self_attn.kv_a_proj_with_mqa.weight.double().T + layer.self_attn.kv_a_proj_with_mqa.bias
    cached = cache_of(outputs).layers[0]
    assert max_difference(cached.keys[0, 0], compressed[:, :10].detach()) <= TOLERANCE
    for position in range(ids.shape[1]):
        for slot, frequency in enumerate(SIZES["rope_inv_freq"][0]):
            first, second = compressed[position, 10 + slot].item(), compressed[position, 13 + slot].item()
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            turned = cached.values[0, 0, position]
            assert turned[slot].item() == pytest.approx(cos * first - sin * second, abs=TOLERANCE)
            assert turned[slot + 3].item() == pytest.approx(sin * first + cos * second, abs=TOLERANCE)


def test_a_window_bounds_the_cache() -> None:
    model = native("all-windows")
    with torch.no_grad():
        cache = cache_of(model(tokens(length=20), use_cache=True))
        cache = cache_of(model(tokens(length=1), past_key_values=cache, use_cache=True))
    assert cache.get_seq_length() == 21
    assert max(layer.keys.shape[2] for layer in cache.layers) <= 4


@torch.no_grad()
def greedy_by_hand(model: MLAForCausalLM, prompt: Tensor, count: int) -> list[int]:
    ids = prompt
    for _ in range(count):
        ids = torch.cat((ids, logits_by_hand(model, ids)[0][-1].argmax()[None]))
    return ids[len(prompt) :].tolist()


@pytest.mark.parametrize("variant", ["plain", "biases", "windows", "unequal"])
@pytest.mark.parametrize("mode", MODES)
def test_a_padded_batch_continues_as_each_prompt_alone(variant: str, mode: str) -> None:
    model = native(variant)
    model.set_attention_mode(mode)
    prompts = [tokens(1, length, seed)[0] for seed, length in enumerate((3, 9, 6))]
    rows = [torch.cat((torch.ones(9 - len(p), dtype=torch.long), p)) for p in prompts]
    masks = [torch.cat((torch.zeros(9 - len(p), dtype=torch.long), torch.ones_like(p))) for p in prompts]
    found = model.generate(
        torch.stack(rows), attention_mask=torch.stack(masks), max_new_tokens=10, do_sample=False, pad_token_id=1
    )
    assert found[:, 9:].tolist() == [greedy_by_hand(model, prompt, 10) for prompt in prompts]


def test_beams_carry_their_own_cache() -> None:
    model, prompt = native(), tokens(1, 5)
    found = []
    for mode in ("absorbed", "expanded"):
        model.set_attention_mode(mode)
        options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
        found.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), **options))
    assert torch.equal(*found)


def weights_of(model: MLAForCausalLM, layer: int) -> MLAWeights:
    config = model.config
    rank, rope = config.kv_rank_of(layer), config.rope_dim_of(layer)
    shape = MLAShape(rank, rope, config.qk_nope_head_dim, config.v_head_dim)
    tensors = dict(model.model.layers[layer].self_attn.named_parameters())
    return from_hf(tensors, shape, config.num_attention_heads, tuple(config.rope_inv_freq[layer]))


@pytest.mark.parametrize("merge", ["never", "always"])
@pytest.mark.parametrize("variant", ["plain", "biases", "unequal"])
def test_matrices_made_ready_decode_to_the_same(variant: str, merge) -> None:
    model, ids = native(variant), tokens()
    expected = torch.stack([logits_by_hand(model, row)[0] for row in ids])[:, -1:]
    for i, layer in enumerate(model.model.layers):
        weights = weights_of(model, i)
        layer.self_attn.absorbed = absorb_layer(
            weights.w_uk.detach(), weights.w_uv.detach(), weights.w_o.detach(), merge=merge
        )
    with torch.no_grad():
        cache = cache_of(model(ids[:, :-1], use_cache=True))
        found = model(ids[:, -1:], past_key_values=cache, use_cache=True).logits
    assert max_difference(found, expected) <= TOLERANCE


def test_auto_absorbs_to_decode_and_expands_to_prefill() -> None:
    attention = native().model.layers[0].self_attn
    assert not attention.uses_absorption(queries=12, tokens=12)
    assert attention.uses_absorption(queries=1, tokens=13)
    # absorbed S·(2·10 + 6) multiplications a head and token, expanded 10·(8 + 7) + S·(8 + 6 + 7): even at S = 30
    assert attention.uses_absorption(queries=29, tokens=1000)
    assert not attention.uses_absorption(queries=30, tokens=1000)


def test_an_unknown_mode_is_refused() -> None:
    model = native()
    with pytest.raises(ValueError, match="'latent'"):
        model.set_attention_mode("latent")
    assert {layer.self_attn.attention_mode for layer in model.model.layers} == {"auto"}


@pytest.mark.parametrize("mode", ["expanded", "absorbed"])
def test_attentions_are_the_papers(mode: str) -> None:
    model, ids = native("windows"), tokens()
    model.set_attn_implementation("eager")
    model.set_attention_mode(mode)
    with torch.no_grad():
        outputs = model(ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    assert len(outputs.attentions) == LAYERS
    assert len(outputs.hidden_states) == LAYERS + 1
    for row in range(len(ids)):
        for found, expected in zip(outputs.attentions, logits_by_hand(model, ids[row])[1], strict=True):
            assert max_difference(found[row], expected) <= TOLERANCE


@pytest.mark.parametrize("variant", ["plain", "biases", "tied", "windows", "unequal"])
def test_a_saved_model_comes_back(variant: str, tmp_path: Path) -> None:
    model, ids = native(variant), tokens()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is MLAForCausalLM
    assert torch.equal(logits(again, ids), logits(model, ids))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, MLAConfig)
    for name in (*SIZES, *VARIANTS[variant]):
        assert getattr(config, name) == getattr(model.config, name)


def test_frequencies_stay_exact_in_narrow_models(tmp_path: Path) -> None:
    native().save_pretrained(tmp_path)
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert narrow.model.embed_tokens.weight.dtype == torch.bfloat16
    expected = torch.tensor(SIZES["rope_inv_freq"], dtype=torch.float32)
    assert torch.equal(narrow.model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("mode", ["expanded", "absorbed"])
def test_checkpointing_gives_the_same_gradients(mode: str) -> None:
    ids, gradients = tokens(), []
    for checkpointing in (False, True):
        model, runs = native("biases").train(), []
        model.set_attention_mode(mode)
        model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        if checkpointing:  # transformers renamed it in 5.2x
            newer = getattr(model, "activation_checkpointing_enable", None)
            (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
        model(ids, labels=ids, use_cache=False).loss.backward()
        assert len(runs) == (2 if checkpointing else 1)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(g is not None and g.abs().max() > 0 for g in gradients[0].values())
    for name, expected in gradients[0].items():
        # the same float32 operations a second time
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-5, atol=1e-7)


def test_gradients_of_both_forms_agree() -> None:
    ids, gradients = tokens(), []
    for mode in ("expanded", "absorbed"):
        model = native("biases")
        model.set_attention_mode(mode)
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert max_difference(*gradients) <= TOLERANCE * gradients[0].abs().max()


def test_the_loss_is_the_next_tokens_cross_entropy() -> None:
    model, ids = native(), tokens()
    with torch.no_grad():
        found = model(ids, labels=ids).loss.item()
    log_p = torch.stack([logits_by_hand(model, row)[0] for row in ids]).log_softmax(-1)
    expected = -log_p[:, :-1].gather(-1, ids[:, 1:, None]).mean().item()
    assert found == pytest.approx(expected, rel=1e-5)


def test_only_the_last_logits_where_asked() -> None:
    model, ids = native(), tokens()
    assert max_difference(logits(model, ids, logits_to_keep=2), logits(model, ids)[:, -2:]) <= 1e-6


def test_embeddings_stand_for_tokens_and_one_of_both_is_needed() -> None:
    model, ids = native(), tokens()
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(logits(model, None, inputs_embeds=embedded), logits(model, ids))
    for arguments in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match="exactly one"):
            model(**arguments)


def test_sizes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        MLAConfig(**SIZES | {"qk_rope_head_dim": 5})
    with pytest.raises(ValueError, match=r"\[3, 3, 3\], found \[3, 3\]"):
        MLAConfig(**SIZES | {"rope_inv_freq": [[1.0, 0.5, 0.1]] * 2})
    with pytest.raises(ValueError, match=r"\[3, 3, 3\], found \[3, 2, 3\]"):
        MLAConfig(**SIZES | {"rope_inv_freq": [[1.0, 0.5, 0.1], [1.0, 0.5], [1.0, 0.5, 0.1]]})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_lora_ranks": None}, "go together"),
        ({"qk_rope_head_dims": None}, "go together"),
        ({"kv_lora_ranks": [10, 17]}, "each of 3 layers"),
        ({"qk_rope_head_dims": [4, 0, 6, 6]}, "each of 3 layers"),
        ({"kv_lora_rank": 10}, "the largest of kv_lora_ranks, 17"),
        ({"qk_rope_head_dim": 8}, "the largest of qk_rope_head_dims, 6"),
        ({"qk_rope_head_dims": [3, 0, 6]}, "even"),
        ({"qk_rope_head_dims": [4, 2, 6]}, r"\[2, 1, 3\], found \[2, 0, 3\]"),
    ],
    ids=str,
)
def test_sizes_of_layers_that_do_not_go_together_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MLAConfig(**{**SIZES, **VARIANTS["unequal"], **changes})


def test_frequencies_of_unequal_layers_are_geometric_unless_given() -> None:
    config = MLAConfig(**{**SIZES, **VARIANTS["unequal"], "rope_inv_freq": None})
    assert config.rope_inv_freq == [[1.0, 10000**-0.5], [], pytest.approx([1.0, 10000 ** (-1 / 3), 10000 ** (-2 / 3)])]


def test_layers_alike_are_not_listed(tmp_path: Path) -> None:
    """A folder of one size is written as it was before layers could differ."""
    native().save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert not {"kv_lora_ranks", "qk_rope_head_dims"} & set(said)
    native("unequal").save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert (said["kv_lora_ranks"], said["qk_rope_head_dims"]) == ([10, 17, 5], [4, 0, 6])


def test_the_vocabulary_is_the_heads() -> None:
    model = native()
    assert model.lm_head.weight.shape == (VOCAB, 36)
    assert model.get_output_embeddings() is model.lm_head
    assert native("tied").lm_head.weight is not None
    tied = native("tied")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_a_static_cache_is_refused_and_not_misread():
    model = native("plain")
    with pytest.raises(ValueError, match="static caches are not supported"):
        model(tokens(), past_key_values=StaticCache(config=model.config, max_cache_len=32))
