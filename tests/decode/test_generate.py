import warnings

import pytest
import torch

from mla_convert.decode import attach_absorbed, generate, save_absorbed
from mla_convert.errors import UsageError
from mla_convert.mla import MLAForCausalLM
from tests.evaluate.models import byte_tokenizer, tiny_native

PROMPT = "The latent"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def model():
    return tiny_native(vocab_size=257)


def greedy_by_hand(model: MLAForCausalLM, ids: list[int], steps: int) -> list[int]:
    """The likeliest next token, over and over, with no cache."""
    ids = list(ids)
    start = len(ids)
    with torch.no_grad():
        for _ in range(steps):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[start:]


def test_greedy_is_the_likeliest_token_at_each_step(model, tokenizer):
    found = generate(model, tokenizer, PROMPT, max_new_tokens=12)
    expected = greedy_by_hand(model, tokenizer(PROMPT)["input_ids"], 12)
    assert list(found.token_ids) == expected
    assert found.text == tokenizer.decode(expected)
    assert found.prompt_tokens == len(PROMPT)
    assert found.tokens_per_second > 0


@pytest.mark.parametrize("merge", [None, "never", "always"])
def test_absorbed_continues_as_expanded_does_for_64_tokens(model, tokenizer, tmp_path, merge):
    model.set_attention_mode("expanded")
    expected = generate(model, tokenizer, PROMPT, max_new_tokens=64)
    assert len(expected.token_ids) == 64
    assert len(set(expected.token_ids)) > 3
    if merge is not None:
        model.save_pretrained(tmp_path)
        save_absorbed(tmp_path, merge)
        attach_absorbed(model, tmp_path)
    for mode in ("absorbed", "auto"):
        model.set_attention_mode(mode)
        assert generate(model, tokenizer, PROMPT, max_new_tokens=64).token_ids == expected.token_ids


def test_sampling_repeats_with_its_seed_and_leaves_torchs_state_alone(model, tokenizer):
    def sample(seed):
        return generate(model, tokenizer, PROMPT, max_new_tokens=16, temperature=1.0, seed=seed).token_ids

    state = torch.random.get_rng_state()
    assert sample(0) == sample(0)
    assert sample(0) != sample(1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_smallest_top_p_is_greedy(model, tokenizer):
    sampled = generate(model, tokenizer, PROMPT, max_new_tokens=8, temperature=1.0, top_p=1e-6)
    assert sampled.token_ids == generate(model, tokenizer, PROMPT, max_new_tokens=8).token_ids


def test_the_checkpoints_sampling_defaults_are_not_used(model, tokenizer):
    expected = generate(model, tokenizer, PROMPT, max_new_tokens=8).token_ids
    model.generation_config.update(do_sample=True, temperature=5.0, top_k=7, top_p=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generate(model, tokenizer, PROMPT, max_new_tokens=8).token_ids == expected


def test_stops_at_the_end_token(model, tokenizer):
    free = generate(model, tokenizer, PROMPT, max_new_tokens=8).token_ids
    model.generation_config.eos_token_id = free[2]
    found = generate(model, tokenizer, PROMPT, max_new_tokens=8).token_ids
    assert found == free[: free.index(free[2]) + 1]


def test_streams_the_text_that_it_returns(model, tokenizer):
    pieces: list[str] = []
    found = generate(model, tokenizer, PROMPT, max_new_tokens=12, stream=pieces.append)
    assert "".join(pieces).strip() == found.text.strip()


def test_prints_nothing(model, tokenizer, capsys):
    generate(model, tokenizer, PROMPT, max_new_tokens=4, stream=lambda piece: None)
    assert capsys.readouterr().out == ""


def test_the_chat_template_is_used_only_when_asked_for(model):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}"
    )
    plain = generate(model, tokenizer, "hi", max_new_tokens=1)
    chat = generate(model, tokenizer, "hi", max_new_tokens=1, chat=True)
    assert (plain.prompt_tokens, chat.prompt_tokens) == (2, len("[user]hi>"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": "a", "max_new_tokens": 0}, "new token"),
        ({"prompt": "a", "temperature": -1.0}, "temperature"),
        ({"prompt": "a", "temperature": 1.0, "top_p": 0.0}, "top-p"),
        ({"prompt": "a", "top_p": 0.9}, "temperature"),
        ({"prompt": "a", "chat": True}, "chat template"),
    ],
)
def test_refuses_options_that_make_no_sense(model, tokenizer, options, message):
    with pytest.raises(UsageError, match=message):
        generate(model, tokenizer, **options)
