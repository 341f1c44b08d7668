"""Several prompts together: each continues as it does alone, whatever it shares the batch and the cache with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_convert.decode import (
    BatchGeneration,
    PagedLatentCache,
    attach_absorbed,
    generate,
    generate_batch,
    save_absorbed,
)
from mla_convert.decode.batch import pages_needed
from mla_convert.errors import CacheFullError, UsageError
from mla_convert.mla import MLAForCausalLM
from mla_kernels import UnsupportedDeviceError
from tests.evaluate.models import byte_tokenizer, tiny_native
from tests.tiny import tiny_llama, tiny_tokenizer

COMMON = "Ten green bottles, hanging on the wall; and if one green bottle should accidentally fall, "  # 90 tokens
PROMPTS = ["a", "The latent", COMMON + "there'll be nine", COMMON + "mind your head", "x" * 64, "The latent"]
SIZES = {
    "plain": {},
    "biases": {"query_bias": True, "latent_bias": True, "output_bias": True},
    "windows": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9},
    # The smallest sizes that the kernel has; one window ends within a page.
    "kernel": {
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 70,
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def model_of(variant: str = "plain") -> MLAForCausalLM:
    model = tiny_native(vocab_size=257, **SIZES[variant])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    return model


@torch.no_grad()
def alone(model: MLAForCausalLM, tokenizer, prompt: str, count: int) -> list[int]:
    """Greedy tokens by transformers' own loop on its own cache."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=model.device)
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


def token_ids(batch: BatchGeneration) -> list[list[int]]:
    return [list(generation.token_ids) for generation in batch.generations]


@pytest.mark.parametrize("mode", ["auto", "absorbed", "expanded"])
@pytest.mark.parametrize("variant", ["plain", "biases", "windows"])
def test_every_prompt_continues_as_it_does_alone(tokenizer, variant: str, mode: str) -> None:
    model = model_of(variant)
    expected = [alone(model, tokenizer, prompt, 24) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) >= 4
    model.set_attention_mode(mode)
    batch = generate_batch(model, tokenizer, PROMPTS, max_new_tokens=24)
    assert token_ids(batch) == expected
    assert [generation.text for generation in batch.generations] == [tokenizer.decode(tokens) for tokens in expected]
    assert [generation.prompt_tokens for generation in batch.generations] == [len(prompt) for prompt in PROMPTS]
    assert min(generation.tokens_per_second for generation in batch.generations) > 0
    assert batch.tokens_per_second > max(generation.tokens_per_second for generation in batch.generations)


@pytest.mark.parametrize("merge", ["never", "always"])
def test_with_absorbed_matrices_too(tokenizer, merge, tmp_path) -> None:
    model = model_of("biases")
    expected = [alone(model, tokenizer, prompt, 12) for prompt in PROMPTS]
    model.save_pretrained(tmp_path)
    save_absorbed(tmp_path, merge)
    attach_absorbed(model, tmp_path)
    assert token_ids(generate_batch(model, tokenizer, PROMPTS, max_new_tokens=12)) == expected


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_the_kernel_continues_as_torch_does(tokenizer, cache_dtype) -> None:
    model, found = model_of("kernel").to("cuda" if torch.cuda.is_available() else "cpu"), []
    for backend in ("torch", "triton"):
        model.set_decode_backend(backend)
        options = {"max_new_tokens": 3, "cache_dtype": cache_dtype}
        found.append(token_ids(generate_batch(model, tokenizer, PROMPTS[1:3], **options)))
    assert found[0] == found[1]
    assert cache_dtype == "fp8" or found[0] == [alone(model, tokenizer, prompt, 3) for prompt in PROMPTS[1:3]]


def counted(model: MLAForCausalLM) -> list[tuple[int, ...]]:
    """The shapes [B, S] of everything that goes through the model from now on."""
    shapes: list[tuple[int, ...]] = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    return shapes


def test_what_prompts_begin_with_is_stored_and_computed_once(tokenizer) -> None:
    model, prompts = model_of(), [COMMON * 2 + end for end in ("one", "two", "three")]
    shapes = counted(model)
    batch = generate_batch(model, tokenizer, prompts, max_new_tokens=3)
    # 180 common tokens are two whole pages and a part; all three go through the two decoding steps together.
    assert shapes == [(1, 183), (1, 183 - 128), (1, 185 - 128), (3, 1), (3, 1)]
    assert batch.cache is not None
    assert (batch.cache.pages_used, batch.cache.pages_shared, batch.cache.pages) == (2 + 3, 2 * 2, 5)
    assert batch.cache.tokens_shared == 2 * 128
    assert batch.cache.tokens_computed == sum(rows * length for rows, length in shapes)
    row = 4 * (10 + 4)
    assert batch.cache.bytes_per_page == 3 * 64 * row
    assert batch.cache.bytes_used == 5 * 3 * 64 * row == batch.cache.bytes_pool


@pytest.mark.parametrize("pages", [3, 4, 7])
def test_a_small_cache_makes_prompts_wait_and_changes_nothing(tokenizer, pages: int) -> None:
    model = model_of()
    expected = [alone(model, tokenizer, prompt, 30) for prompt in PROMPTS]
    cache = PagedLatentCache(model.config, pages)
    cache.pool.fill_(float("nan"))
    batch = generate_batch(model, tokenizer, PROMPTS, max_new_tokens=30, cache=cache)
    assert token_ids(batch) == expected
    assert batch.cache is not None
    assert batch.cache.pages_used <= pages
    assert cache.allocator.free == pages


def test_a_prompt_that_cannot_fit_is_refused_and_leaves_nothing_behind(tokenizer) -> None:
    model = model_of()
    cache = PagedLatentCache(model.config, 2)
    with pytest.raises(CacheFullError, match="64 tokens and 66 new ones need 3 pages"):
        generate_batch(model, tokenizer, ["a", "x" * 64], max_new_tokens=66, cache=cache)
    assert cache.allocator.free == 2
    # the last new token is not stored
    assert generate_batch(model, tokenizer, ["x" * 64], max_new_tokens=65, cache=cache).generations[0].token_ids


def test_a_cache_that_is_kept_knows_earlier_prompts_and_answers(tokenizer) -> None:
    model = model_of()
    cache = PagedLatentCache(model.config, 12)
    first = generate_batch(model, tokenizer, [COMMON], max_new_tokens=60, cache=cache)
    answer = first.generations[0]
    following = COMMON + answer.text + "?"
    follow_ids = tokenizer(following)["input_ids"]
    known = tokenizer(COMMON)["input_ids"] + list(answer.token_ids)
    shapes = counted(model)
    again = generate_batch(model, tokenizer, [following], max_new_tokens=8, cache=cache)
    same = next((i for i, (a, b) in enumerate(zip(follow_ids, known, strict=False)) if a != b), len(known))
    assert shapes[0] == (1, len(follow_ids) - 64 * (same // 64))
    assert token_ids(again) == [alone(model, tokenizer, following, 8)]


def test_an_error_in_the_caller_gives_all_pages_back(tokenizer) -> None:
    model = model_of()
    cache = PagedLatentCache(model.config, 4)
    pieces: list[str] = []

    def stop(piece: str) -> None:
        pieces.append(piece)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_batch(model, tokenizer, ["one two "], max_new_tokens=100, cache=cache, stream=stop)
    assert pieces
    assert cache.allocator.free == 4


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_the_batch_size_bounds_what_is_decoded_at_once(tokenizer, batch_size: int) -> None:
    model = model_of()
    expected = [alone(model, tokenizer, prompt, 4) for prompt in PROMPTS]
    shapes = counted(model)
    batch = generate_batch(model, tokenizer, PROMPTS, max_new_tokens=4, batch_size=batch_size)
    assert token_ids(batch) == expected
    assert max(rows for rows, _ in shapes) == min(batch_size, len(PROMPTS))


def test_pages_are_counted_for_what_runs_at_once() -> None:
    common = list(range(128))
    prompts = [[*common, 200 + i] for i in range(4)]
    assert pages_needed(prompts, 1, batch_size=4) == 2 + 4
    assert pages_needed(prompts, 64, batch_size=4) == 2 + 4 * 1
    assert pages_needed(prompts, 65, batch_size=4) == 2 + 4 * 2
    assert pages_needed(prompts, 1, batch_size=1) == 3
    assert pages_needed([[7] * 64, [7] * 64], 1, batch_size=9) == 2  # the last token is never shared
    assert pages_needed([[7] * 64, [7] * 65], 1, batch_size=9) == 2


def test_planning_takes_no_longer_for_more_new_tokens() -> None:
    common = list(range(128))
    prompts = [[*common, 200 + i] for i in range(4)]
    tokens = 64 * 10**15
    assert pages_needed(prompts, tokens, batch_size=4) == 2 + 4 * 10**15
    assert pages_needed(prompts, tokens, batch_size=1) == 2 + 10**15


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_a_pool_beyond_the_memory_is_refused_with_its_bytes(cache_dtype) -> None:
    pages = 2**44
    row = 3 * (10 + 4) if cache_dtype == "auto" else None
    with pytest.raises(CacheFullError, match=f"no memory for a cache of {pages} pages .* bytes") as raised:
        PagedLatentCache(model_of().config, pages, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    assert row is None or f" {2 * row * 64 * pages} bytes" in raised.value.message


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        ({"dtype": torch.bfloat16}, {}, "the cache is for torch.bfloat16, and the model computes in torch.float32"),
        ({"dtype": torch.bfloat16, "cache_dtype": "fp8"}, {}, "the cache is for torch.bfloat16"),
        ({}, {"cache_dtype": "fp8"}, "dtype of fp8 cannot be asked"),
        ({"cache_dtype": "fp8"}, {"cache_dtype": "fp8"}, "dtype of fp8 cannot be asked"),
    ],
)
def test_a_cache_that_is_not_the_models_is_refused(tokenizer, made, options, message) -> None:
    model, started = model_of(), []
    cache = PagedLatentCache(model.config, 4, **made)
    with pytest.raises(UsageError, match=message):
        generate_batch(model, tokenizer, ["a"], cache=cache, on_start=lambda: started.append(1), **options)
    assert not started


def test_a_given_fp8_cache_is_used_as_one_that_is_made(tokenizer) -> None:
    model = model_of()
    cache = PagedLatentCache(model.config, 20, cache_dtype="fp8")
    given = generate_batch(model, tokenizer, PROMPTS, max_new_tokens=6, cache=cache)
    assert token_ids(given) == token_ids(generate_batch(model, tokenizer, PROMPTS, max_new_tokens=6, cache_dtype="fp8"))


def test_each_prompt_stops_at_its_own_end_and_makes_room(tokenizer) -> None:
    model = model_of()
    free = [alone(model, tokenizer, prompt, 20) for prompt in PROMPTS]
    ends = [free[0][3], free[2][9]]
    model.generation_config.eos_token_id = ends
    shapes = counted(model)
    found = token_ids(generate_batch(model, tokenizer, PROMPTS, max_new_tokens=20))
    for tokens, whole in zip(found, free, strict=True):
        stop = next((i for i, token in enumerate(whole) if token in ends), len(whole) - 1)
        assert tokens == whole[: stop + 1]
    assert len({len(tokens) for tokens in found}) > 1
    # what has ended is not decoded on
    assert sum(rows for rows, length in shapes if length == 1 and rows > 1) < sum(len(tokens) for tokens in found)


def test_a_sample_depends_on_seed_and_place_and_not_on_its_neighbours(tokenizer) -> None:
    model = model_of()

    def sample(prompts: list[str], seed: int = 0, **options) -> list[list[int]]:
        return token_ids(
            generate_batch(model, tokenizer, prompts, max_new_tokens=16, temperature=1.0, seed=seed, **options)
        )

    state = torch.random.get_rng_state()
    together = sample(PROMPTS)
    assert together == sample(PROMPTS, batch_size=1)
    others = [PROMPTS[0], "something", "quite", "else", "y", PROMPTS[5]]
    changed = sample(others)
    assert (changed[0], changed[5]) == (together[0], together[5])
    assert together[1] != together[5]  # the same prompt at another place
    assert sample(PROMPTS, seed=1)[0] != together[0]
    single = generate(model, tokenizer, PROMPTS[0], max_new_tokens=16, temperature=1.0)
    assert list(single.token_ids) == together[0]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_other_models_go_through_transformers_one_by_one() -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    model.generation_config.repetition_penalty = 5.0
    prompts = ["the cat", "sat on the mat"]
    batch = generate_batch(model, tokenizer, prompts, max_new_tokens=6)
    assert batch.cache is None
    for prompt, found in zip(prompts, token_ids(batch), strict=True):
        ids = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            for token in found:
                assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
                ids.append(token)
    options = {"max_new_tokens": 6, "temperature": 1.0}
    sampled = [token_ids(generate_batch(model, tokenizer, prompts, seed=s, **options)) for s in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_other_models_have_no_paged_cache() -> None:
    with pytest.raises(UsageError, match="LlamaForCausalLM does not decode on a paged cache") as raised:
        generate_batch(tiny_llama(), tiny_tokenizer(), ["the"], cache_dtype="fp8")
    assert "--format native" in raised.value.remedy


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompt"),
        (["a", ""], {}, "empty"),
        (["a"], {"batch_size": 0}, "batch of 0"),
        (["a", "b"], {"stream": print}, "2 prompts cannot be streamed"),
    ],
)
def test_refuses_what_makes_no_sense(tokenizer, prompts, options, message) -> None:
    with pytest.raises(UsageError, match=message):
        generate_batch(model_of(), tokenizer, prompts, **options)


def test_the_positions_of_the_model_bound_the_longest_prompt_with_its_new_tokens(tokenizer) -> None:
    model = tiny_native(vocab_size=257, max_position_embeddings=70)
    assert generate_batch(model, tokenizer, ["a", "x" * 64], max_new_tokens=6).generations
    with pytest.raises(UsageError, match="64 tokens and 7 new ones are more than the 70 positions") as raised:
        generate_batch(model, tokenizer, ["x" * 64, "a"], max_new_tokens=7)
    assert raised.value.remedy == "ask for at most 6 new tokens"
    with pytest.raises(UsageError, match="70 tokens and 1 new ones") as raised:
        generate_batch(model, tokenizer, ["x" * 70], max_new_tokens=1)
    assert raised.value.remedy == "give prompts of less than 70 tokens"


def test_a_kernel_that_cannot_run_fails_before_the_start(tokenizer, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model, started = model_of("kernel"), []
    model.set_decode_backend("triton")
    options = {"max_new_tokens": 2, "on_start": lambda: started.append(1)}
    shapes = counted(model)
    with pytest.raises(UnsupportedDeviceError, match="needs a GPU"):
        generate_batch(model, tokenizer, ["a"], **options)
    assert not started
    assert not shapes
    # expanded attention has no use for the kernel
    model.set_attention_mode("expanded")
    generate_batch(model, tokenizer, ["a"], **options)
    assert started == [1]


def test_the_start_is_told_before_anything_is_computed(tokenizer) -> None:
    for model, words in ((model_of(), tokenizer), (tiny_llama(), tiny_tokenizer())):
        seen: list[str] = []
        embedding = model.model.embed_tokens
        embedding.register_forward_hook(lambda *_, seen=seen: seen.append("computed"))
        generate_batch(model, words, ["the", "cat"], max_new_tokens=2, on_start=lambda seen=seen: seen.append("start"))
        assert seen[0] == "start"
        assert seen.count("start") == 1
        assert "computed" in seen


def test_logits_are_those_of_each_prompt_alone_to_rounding(tokenizer) -> None:
    """The tokens being equal could be luck of large margins: the logits are compared too."""
    model = model_of()
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: found.append(logits[:, -1]))
    generate_batch(model, tokenizer, PROMPTS, max_new_tokens=5)
    hook.remove()
    first, later = torch.cat(found[: len(PROMPTS)]), torch.stack(found[len(PROMPTS) :], dim=1)
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt)["input_ids"] + alone(model, tokenizer, prompt, 4)
        with torch.no_grad():
            expected = model(torch.tensor([ids]), use_cache=False).logits[0, -5:]
        ours = torch.cat((first[i : i + 1], later[i]))
        # float32 through three layers
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
