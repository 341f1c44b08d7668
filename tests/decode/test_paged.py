"""The paged cache: what lies where, what is shared, and that the model answers as it does with any other cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from mla_convert.decode import CachedSequence, PagedLatentCache, attach_absorbed, save_absorbed
from mla_convert.errors import CacheFullError, UsageError
from mla_convert.mla import MLAForCausalLM
from mla_kernels.fp8 import dequantize_latent, quantize_latent
from tests.mla.native import LAYERS, VARIANTS, VOCAB, cache_of, native

# float32 logits of order one through three layers; batched and single products sum in other orders.
TOLERANCE = 1e-5
PAGE = 64


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def paged(model: MLAForCausalLM, pages: int = 12, **options) -> PagedLatentCache:
    """A cache in which every number that nobody wrote is NaN."""
    cache = PagedLatentCache(model.config, pages, **options)
    cache.pool.fill_(255 if cache.fp8 else float("nan"))  # e4m3's 255 is NaN too
    return cache


@torch.no_grad()
def append(model: MLAForCausalLM, cache: PagedLatentCache, sequence: CachedSequence, new: Sequence[int]) -> Tensor:
    """Prefill ``new``; logits [S vocabulary]."""
    start = len(sequence.tokens)
    with cache.prefilling(sequence, new) as view:
        positions = torch.arange(start, start + len(new))[None]
        return model(torch.tensor([new]), position_ids=positions, cache=view, use_cache=True).logits[0]


@torch.no_grad()
def decode(
    model: MLAForCausalLM, cache: PagedLatentCache, sequences: list[CachedSequence], new: list[list[int]]
) -> Tensor:
    """Append ``new`` [B S] to all sequences at once; logits [B S vocabulary]."""
    steps = torch.arange(len(new[0]))
    positions = torch.stack([len(sequence.tokens) + steps for sequence in sequences])
    with cache.decoding(sequences, new) as view:
        return model(torch.tensor(new), position_ids=positions, cache=view, use_cache=True).logits


@torch.no_grad()
def alone(model: MLAForCausalLM, tokens: Sequence[int]) -> Tensor:
    """Logits [S vocabulary] of one sequence without any cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def max_difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return (found.double() - expected.double()).abs().max().item()  # NaN compares as too much


@pytest.mark.parametrize("mode", ["auto", "absorbed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_of_unequal_lengths_decode_together_as_each_alone(variant: str, mode: str) -> None:
    model = native(variant)
    model.set_attention_mode(mode)
    cache = paged(model)
    whole = [ids(n, seed) for seed, n in enumerate((3 + 8, 70 + 8, 61 + 8))]
    sequences = [cache.open(tokens[:-8]) for tokens in whole]
    for tokens, sequence in zip(whole, sequences, strict=True):
        assert max_difference(append(model, cache, sequence, tokens[:-8]), alone(model, tokens[:-8])) <= TOLERANCE
    found, at = [], [len(tokens) - 8 for tokens in whole]
    for step in (1, 1, 3, 2, 1):  # several tokens a step are causal among themselves
        new = [tokens[i : i + step] for tokens, i in zip(whole, at, strict=True)]
        found.append(decode(model, cache, sequences, new))
        at = [i + step for i in at]
    for row, tokens, sequence in zip(torch.cat(found, dim=1), whole, sequences, strict=True):
        assert max_difference(row, alone(model, tokens)[-8:]) <= TOLERANCE
        assert sequence.tokens == tokens


@pytest.mark.parametrize("merge", ["never", "always"])
def test_absorbed_matrices_are_used(merge, tmp_path) -> None:
    model, tokens = native("biases"), ids(9)
    model.save_pretrained(tmp_path)
    expected = alone(model, tokens)[-1:]
    save_absorbed(tmp_path, merge)
    attach_absorbed(model, tmp_path)
    cache = paged(model)
    sequence = cache.open(tokens)
    append(model, cache, sequence, tokens[:-1])
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.weight.data.fill_(float("nan"))
    assert max_difference(decode(model, cache, [sequence], [tokens[-1:]])[0], expected) <= TOLERANCE


def test_what_is_stored_is_what_any_cache_stores() -> None:
    model, tokens = native("latent-bias"), ids(130)
    cache = paged(model)
    sequence = cache.open(tokens)
    append(model, cache, sequence, tokens[:100])
    append(model, cache, sequence, tokens[100:129])
    decode(model, cache, [sequence], [tokens[129:]])
    with torch.no_grad():
        expected = cache_of(model(torch.tensor([tokens]), use_cache=True))
    assert len(sequence.pages) == 3
    for layer in range(LAYERS):
        c_kv, k_rope = cache.gather(layer, sequence.pages, 130)
        assert max_difference(c_kv, expected.layers[layer].keys[0, 0]) <= TOLERANCE
        assert max_difference(k_rope, expected.layers[layer].values[0, 0]) <= TOLERANCE
        # by hand: token t lies in the sequence's page t // 64
        for t in (0, 63, 64, 129):
            row = cache.layers[layer][sequence.pages[t // PAGE], t % PAGE]
            assert torch.equal(row, torch.cat((c_kv[t], k_rope[t])))


@pytest.mark.parametrize("variant", ["plain", "biases", "windows", "all-windows", "no-rope", "unequal"])
def test_a_shared_beginning_is_stored_and_computed_once(variant: str) -> None:
    model, common = native(variant), ids(150)
    tokens_seen: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: tokens_seen.append(inputs[0].numel()))
    cache = paged(model)
    whole = [common + ids(20 + 7 * i, seed=10 + i) for i in range(3)]
    sequences, found = [], []
    for tokens in whole:
        sequences.append(cache.open(tokens))
        found.append(append(model, cache, sequences[-1], tokens[len(sequences[-1].tokens) :])[-1])
    assert [sequence.shared for sequence in sequences] == [0, 128, 128]
    assert tokens_seen == [170, 177 - 128, 184 - 128]
    assert len({tuple(sequence.pages[:2]) for sequence in sequences}) == 1
    assert [cache.allocator.references(page) for page in sequences[0].pages] == [3, 3, 1]
    assert cache.allocator.used == 2 + 3 * 1
    statistics = cache.statistics()
    assert (statistics.pages_used, statistics.pages_shared) == (5, 4)
    assert (statistics.tokens_computed, statistics.tokens_shared) == (sum(tokens_seen), 256)
    assert statistics.bytes_used == 5 * statistics.bytes_per_page == 5 * cache.pool.nbytes // 12
    next_tokens = [[3], [4], [5]]
    decoded = decode(model, cache, sequences, next_tokens)
    for i, tokens in enumerate(whole):
        expected = alone(model, tokens + next_tokens[i])
        assert max_difference(torch.stack((found[i], decoded[i, 0])), expected[-2:]) <= TOLERANCE


def test_shared_rows_are_the_same_rows_and_nobody_writes_them_again() -> None:
    model, common = native(), ids(64)
    cache = paged(model)
    first = cache.open([*common, 3])
    append(model, cache, first, [*common, 3])
    page = first.pages[0]
    before = [pages[page].clone() for pages in cache.layers]
    second = cache.open([*common, 9])
    assert second.pages == [page]
    append(model, cache, second, [9])
    for _ in range(70):
        decode(model, cache, [first, second], [[5], [6]])
    assert all(torch.equal(pages[page], rows) for pages, rows in zip(cache.layers, before, strict=True))
    assert set(first.pages) & set(second.pages) == {page}


def test_the_last_token_of_a_prompt_is_never_shared() -> None:
    """The model must see a token to say what follows: of two prompts of 128 the first 64 tokens are shared."""
    model, tokens = native(), ids(128)
    cache = paged(model)
    one, other = cache.open(tokens), None
    append(model, cache, one, tokens)
    other = cache.open(tokens)
    assert other.shared == 64
    assert cache.open([*tokens, 5]).shared == 128


def test_closed_sequences_are_found_again_until_their_pages_are_needed() -> None:
    model, tokens = native(), ids(150)
    cache = paged(model, pages=3)
    sequence = cache.open(tokens)
    append(model, cache, sequence, tokens)
    cache.close(sequence)
    assert cache.allocator.free == 3
    again = cache.open(tokens)
    assert again.shared == 128
    assert max_difference(append(model, cache, again, tokens[128:]), alone(model, tokens)[128:]) <= TOLERANCE
    cache.close(again)
    other = cache.open(ids(100, seed=7))
    append(model, cache, other, ids(100, seed=7))
    assert cache.open(tokens).shared == 64  # of the three pages the end has gone first


def test_freed_pages_poisoned_with_nan_never_leak() -> None:
    """Pages come back in another order and partly filled; whatever is left in them from before is NaN."""
    model = native("windows")
    cache = paged(model, pages=4)
    generator = torch.Generator().manual_seed(0)
    kept = cache.open(ids(40))
    append(model, cache, kept, ids(40))
    for turn in range(4):
        tokens = ids(int(torch.randint(66, 128, (1,), generator=generator)), seed=turn)
        sequence = cache.open(tokens)
        assert max_difference(append(model, cache, sequence, tokens), alone(model, tokens)) <= TOLERANCE
        logits = decode(model, cache, [sequence, kept], [[2], [3]])
        assert max_difference(logits[0, 0], alone(model, [*tokens, 2])[-1]) <= TOLERANCE
        assert max_difference(logits[1, 0], alone(model, kept.tokens)[-1]) <= TOLERANCE
        freed = sequence.pages
        cache.close(sequence)
        cache.allocator.forget_free()
        for pages in cache.layers:
            pages[freed] = float("nan")


def state(cache: PagedLatentCache, *sequences: CachedSequence) -> object:
    references = [cache.allocator.references(page) for page in range(cache.allocator.pages)]
    return references, cache.allocator.free, [(list(s.tokens), list(s.pages)) for s in sequences]


def test_a_full_cache_refuses_a_step_whole_and_loses_nothing() -> None:
    model = native()
    cache = paged(model, pages=3)
    one, other = (cache.open(tokens) for tokens in (ids(64), ids(64, seed=1)))
    append(model, cache, one, ids(64))
    append(model, cache, other, ids(64, seed=1))
    before = state(cache, one, other)
    with pytest.raises(CacheFullError, match="2 more pages"):
        decode(model, cache, [one, other], [[2], [3]])
    assert state(cache, one, other) == before
    logits = decode(model, cache, [one], [[2]])
    assert max_difference(logits[0], alone(model, [*ids(64), 2])[-1:]) <= TOLERANCE


@pytest.mark.parametrize("how", ["prefill", "decode"])
def test_a_step_that_fails_midway_has_not_happened(how: str) -> None:
    model, tokens = native(), ids(70)
    cache = paged(model)
    sequence = cache.open(tokens)
    append(model, cache, sequence, tokens)
    before = state(cache, sequence)
    fail = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    new = ids(80, seed=2)
    with pytest.raises(ZeroDivisionError):
        append(model, cache, sequence, new) if how == "prefill" else decode(model, cache, [sequence], [new])
    fail.remove()
    assert state(cache, sequence) == before
    assert cache.open(tokens + new).shared == 64
    found = decode(model, cache, [sequence], [new])
    assert max_difference(found[0], alone(model, tokens + new)[70:]) <= TOLERANCE


def test_gradients_do_not_reach_into_the_pool() -> None:
    model = native()
    cache = paged(model)
    sequence = cache.open([2, 3, 4])
    with cache.prefilling(sequence, [2, 3, 4]) as view:
        model(torch.tensor([[2, 3, 4]]), cache=view, use_cache=True).logits.sum().backward()
    assert not cache.pool.requires_grad


def test_a_layer_takes_what_its_own_sizes_need() -> None:
    model, tokens = native("unequal"), ids(100)
    cache = paged(model, pages=2)
    assert [layer.shape for layer in cache.layers] == [(2, PAGE, c + r) for c, r in ((10, 4), (17, 0), (5, 6))]
    statistics = cache.statistics()
    assert (statistics.bytes_per_page, statistics.bytes_pool) == (PAGE * (14 + 17 + 11) * 4, 2 * PAGE * 42 * 4)
    sequence = cache.open(tokens)
    append(model, cache, sequence, tokens)
    with torch.no_grad():
        expected = cache_of(model(torch.tensor([tokens]), use_cache=True))
    for layer, held in enumerate(expected.layers):
        c_kv, k_rope = cache.gather(layer, sequence.pages, 100)
        assert max_difference(c_kv, held.keys[0, 0]) <= TOLERANCE
        assert torch.equal(k_rope, held.values[0, 0]) or max_difference(k_rope, held.values[0, 0]) <= TOLERANCE


def test_a_cache_without_pages_is_refused() -> None:
    with pytest.raises(UsageError, match="0 pages"):
        PagedLatentCache(native().config, 0)


# Rank 144 is a block of 128 channels and one of 16; e4m3 keeps 4 significant bits: half a step is 2^-4 relative.
FP8_SIZES = {"kv_lora_rank": 144, "qk_rope_head_dim": 6}


def test_fp8_rows_are_stored_to_four_bits_and_their_rope_part_to_eight() -> None:
    model, tokens = native(**FP8_SIZES), ids(100)
    exact, narrow = paged(model), paged(model, cache_dtype="fp8")
    assert narrow.pool.dtype == torch.uint8
    assert narrow.statistics().bytes_per_page == LAYERS * PAGE * 176  # 144 + 2 scales of 4 + 6 · 2, in whole 16 bytes
    for cache in (exact, narrow):
        append(model, cache, cache.open(tokens), tokens)
    # The first layer's rows depend on no attention.
    (c_kv, k_rope), (c_fp8, k_fp8) = (cache.gather(0, [0, 1], 100) for cache in (exact, narrow))
    blocks = c_kv.abs().split([128, 16], dim=1)
    smallest = torch.cat([block.amax(1, keepdim=True).expand_as(block) for block in blocks], dim=1) / 448 * 2**-10
    assert ((c_fp8 - c_kv).abs() <= c_kv.abs() * 2**-4 * 1.001 + smallest).all()
    assert ((k_fp8 - k_rope).abs() <= k_rope.abs() * 2**-8).all()
    assert max_difference(c_fp8, c_kv) > 0


class ChangedRows(DynamicCache):
    """transformers' cache of one sequence, with every row [c_kv | k_rope] changed before it is stored."""

    def __init__(self, model: MLAForCausalLM, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(config=model.config)
        self.change = change

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        rows = self.change(torch.cat((key_states, value_states), dim=-1))
        return super().update(*rows.split([key_states.shape[-1], value_states.shape[-1]], dim=-1), *args, **kwargs)


@torch.no_grad()
def with_changed_rows(model: MLAForCausalLM, tokens: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits [S vocabulary] from expanded attention over rows changed in that way."""
    cache = ChangedRows(model, change)
    return model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0]


@pytest.mark.parametrize("variant", ["plain", "windows"])
def test_fp8_attends_to_what_it_stores_whether_shared_or_not(variant: str) -> None:
    model, common = native(variant, **FP8_SIZES), ids(70)
    tokens = common + ids(30, seed=1)
    stored = with_changed_rows(model, [*tokens, 5], lambda rows: dequantize_latent(quantize_latent(rows, 144), 144, 6))
    error = max_difference(stored, alone(model, [*tokens, 5]))
    for beginning in ([], common):
        cache = paged(model, cache_dtype="fp8")
        if beginning:
            append(model, cache, cache.open(beginning), beginning)
        sequence = cache.open(tokens)
        assert sequence.shared == (64 if beginning else 0)
        append(model, cache, sequence, tokens[sequence.shared :])
        found = decode(model, cache, [sequence], [[5]])[0, 0]
        # A number near a tie may be rounded to either side after float32 sums in another order.
        assert max_difference(found, stored[-1]) <= 0.1 * error


def test_fp8_costs_less_than_the_most_that_rounding_can_be_off() -> None:
    model, tokens = native(**FP8_SIZES), ids(100)
    cache = paged(model, cache_dtype="fp8")
    generator = torch.Generator().manual_seed(0)

    def off_by_the_most(rows: Tensor) -> Tensor:
        signs = torch.randint(0, 2, rows.shape, generator=generator) * 2 - 1
        return rows * (1 + signs * torch.cat((torch.full((144,), 2**-4), torch.full((6,), 2**-8))))

    expected = alone(model, tokens)
    found = append(model, cache, cache.open(tokens), tokens)
    bound = with_changed_rows(model, tokens, off_by_the_most)
    assert 0 < (found - expected).square().mean() < (bound - expected).square().mean()


@pytest.mark.parametrize("rank", [10, 140])
def test_fp8_takes_any_rank(rank: int) -> None:
    """Ranks that are no multiple of 16 are stored with zeros behind them, and answer as they do without."""
    model, tokens = native(kv_lora_rank=rank), ids(90)
    pad = -rank % 16

    def stored(rows: Tensor) -> Tensor:
        wide = torch.cat((torch.nn.functional.pad(rows[..., :rank], (0, pad)), rows[..., rank:]), dim=-1)
        wide = dequantize_latent(quantize_latent(wide, rank + pad), rank + pad, 6)
        return torch.cat((wide[..., :rank], wide[..., rank + pad :]), dim=-1)

    expected = with_changed_rows(model, [*tokens, 5], stored)
    cache = paged(model, cache_dtype="fp8")
    sequence = cache.open(tokens)
    found = append(model, cache, sequence, tokens), decode(model, cache, [sequence], [[5]])[0]
    error = max_difference(expected, alone(model, [*tokens, 5]))
    assert max_difference(torch.cat(found), expected) <= 0.1 * error


def test_fp8_takes_layers_of_any_sizes_and_one_without_rope_dims() -> None:
    model, tokens = native("unequal"), ids(90)
    cache = paged(model, cache_dtype="fp8")
    # 16, 32 and 16 codes, a scale of 4 bytes, and 4, 2 (for none) and 6 numbers of 2 bytes, in whole 16 bytes
    assert [layer.shape[-1] for layer in cache.layers] == [32, 48, 32]
    sequence = cache.open(tokens)
    found = torch.cat((append(model, cache, sequence, tokens), decode(model, cache, [sequence], [[5]])[0]))

    def stored(rows: Tensor) -> Tensor:
        c, r = {14: (10, 4), 17: (17, 0), 11: (5, 6)}[rows.shape[-1]]
        wide = torch.nn.functional.pad(rows[..., :c], (0, -c % 16))
        rope = rows[..., c:] if r else rows.new_zeros(*rows.shape[:-1], 2)
        wide = dequantize_latent(quantize_latent(torch.cat((wide, rope), dim=-1), wide.shape[-1]), c + -c % 16, r or 2)
        return torch.cat((wide[..., :c], wide[..., c + -c % 16 :][..., :r]), dim=-1)

    expected = with_changed_rows(model, [*tokens, 5], stored)
    error = max_difference(expected, alone(model, [*tokens, 5]))
    assert error > 0
    assert max_difference(found, expected) <= 0.1 * error
