"""``mla-convert generate`` on several prompts: what it prints and what ``--json`` says about each and the cache."""

import json
import sys

import pytest

from mla_convert.decode import rows
from mla_convert.errors import CacheFullError, UsageError
from mla_kernels import UnsupportedShapeError
from tests.tiny import tiny_tokenizer

generation = sys.modules["mla_convert.decode.generate"]  # the package has a function of that name
LAYERS = 2
COMMON = "the cat sat on the mat. " * 30
PROMPTS = [COMMON + "and then", "a", COMMON + "but the dog"]


def options(prompts: list[str], count: int = 8) -> list[object]:
    return [*(part for prompt in prompts for part in ("--prompt", prompt)), "--max-new-tokens", count]


def test_several_prompts_answer_as_each_alone_and_share_what_they_begin_with(cli, converted) -> None:
    alone = [cli("generate", converted, *options([prompt]), "--json").json() for prompt in PROMPTS]
    together = cli("generate", converted, *options(PROMPTS), "--json").json()
    keys = ("prompt", "text", "token_ids", "prompt_tokens")
    assert [{key: one[key] for key in keys} for one in together["results"]] == [
        {key: one[key] for key in keys} for one in alone
    ]
    for one in alone:
        assert [{key: one[key] for key in keys}] == [{key: result[key] for key in keys} for result in one["results"]]
    assert not set(keys) & set(together)
    assert together["tokens_per_second"] > 0

    lengths = [len(tiny_tokenizer()(prompt)["input_ids"]) for prompt in PROMPTS]
    shared = len(tiny_tokenizer()(COMMON)["input_ids"]) // 64
    assert shared > 0
    cache = together["cache"]
    config = json.loads((converted / "config.json").read_text())
    row = 4 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    assert cache["bytes_per_page"] == LAYERS * 64 * row
    assert cache["pages_shared"] == shared
    assert cache["tokens_shared"] == 64 * shared
    # An answer may end early; its last token is not stored.
    stored = [length + len(one["token_ids"]) - 1 for length, one in zip(lengths, together["results"], strict=True)]
    assert cache["tokens_computed"] == sum(stored) - 64 * shared
    pages = [-(-length // 64) for length in stored]
    assert cache["pages_used"] == sum(pages) - shared
    assert together["decode_backend"]["name"] == "torch"
    assert "cpu" in together["decode_backend"]["reason"]


def test_prompts_come_from_a_file_after_those_that_are_given(cli, converted, tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "two\\nlines"}\n"three"\n')
    answer = cli("generate", converted, "--prompts", file, *options(["one"]), "--json").json()
    assert [result["prompt"] for result in answer["results"]] == ["one", "two\nlines", "three"]


def test_a_reader_sees_each_prompt_with_its_continuation(cli, converted) -> None:
    results = cli("generate", converted, *options(PROMPTS), "--json").json()["results"]
    answer = cli("generate", converted, *options(PROMPTS))
    headed = [
        f"--- prompt {i} of 3 ---\n{result['prompt']}{result['text']}\n" for i, result in enumerate(results, start=1)
    ]
    assert answer.out == "\n".join(headed)
    assert "--- prompt 2 of 5 ---" in " ".join(cli("generate", "--help").out.split())


def test_fp8_takes_fewer_bytes_a_page(cli, converted) -> None:
    prompt = options([COMMON])
    wide = cli("generate", converted, *prompt, "--json").json()["cache"]
    narrow = cli("generate", converted, *prompt, "--cache-dtype", "fp8", "--json").json()["cache"]
    assert narrow["pages_used"] == wide["pages_used"]
    assert narrow["bytes_used"] <= wide["bytes_used"] / 2


def test_the_kernel_continues_as_torch_does(cli, converted) -> None:
    """Interpreted on the CPU here: see tests/conftest.py."""
    prompt = options(PROMPTS[1:2], count=4)
    expected = cli("generate", converted, *prompt, "--backend", "torch", "--json").json()
    found = cli("generate", converted, *prompt, "--backend", "triton", "--json").json()
    assert found["decode_backend"]["name"] == "triton"
    assert found["token_ids"] == expected["token_ids"]


def test_a_source_continues_several_prompts_too(cli, tiny_folder) -> None:
    answer = cli("generate", tiny_folder, *options(PROMPTS), "--json").json()
    assert (answer["cache"], answer["decode_backend"]) == (None, None)
    alone = cli("generate", tiny_folder, *options(PROMPTS[2:]), "--json").json()
    assert answer["results"][2]["token_ids"] == alone["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no prompt"),
        (("--prompts", "none.txt"), "none.txt"),
        (("--prompt", ""), "empty"),
        (("--prompt", "x", "--device", "tape"), "--device tape"),
        (("--prompt", "x", "--device", "meta"), "--device meta"),
        (("--prompt", "x", "--device", "cuda:99"), "cuda:99"),
        (("--prompt", "x", "--prompt", "a\udc80b"), "prompt 2 of 2 is no Unicode text: its character 2 is U+DC80"),
        (("--prompt", "x", "--temperature", "inf"), "temperature of inf"),
        (("--prompt", "x", "--top-p", "0.5"), "top-p without a temperature"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_answer(cli, converted, arguments, said) -> None:
    answer = cli("generate", converted, *arguments, "--json")
    assert answer.code == UsageError.exit_code
    assert said in answer.err
    assert "  try: " in answer.err
    assert answer.out == ""


@pytest.mark.parametrize("extra", [("--cache-dtype", "fp8"), ("--backend", "torch")])
def test_a_source_has_neither_cache_nor_backend_to_choose(cli, tiny_folder, extra) -> None:
    answer = cli("generate", tiny_folder, "--prompt", "x", *extra)
    assert answer.code == UsageError.exit_code
    assert f"error: {' '.join(extra)} needs" in answer.err
    assert f"leave {extra[0]} out" in answer.err
    assert "--format native" in answer.err
    assert answer.out == ""


@pytest.mark.parametrize("extra", [(), ("--cache-dtype", "fp8")])
@pytest.mark.parametrize("count", [1, 2])
def test_the_kernel_on_a_cpu_is_refused_before_the_answer(cli, converted, monkeypatch, count, extra) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    answer = cli("generate", converted, *options(["x"], count), "--backend", "triton", "--device", "cpu", *extra)
    assert answer.code == UsageError.exit_code
    assert answer.err.endswith("  try: give --backend torch\n")
    assert answer.out == ""


def test_rows_that_fp8_cannot_hold_are_refused_with_the_option_to_leave_out(cli, converted, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedShapeError("no row for these sizes", "pad them")

    monkeypatch.setattr(rows, "fp8_layout", refuse)
    answer = cli("generate", converted, *options(["x"]), "--cache-dtype", "fp8")
    assert answer.code == UsageError.exit_code
    assert answer.err == "error: no row for these sizes\n  try: leave --cache-dtype out\n"
    assert answer.out == ""


@pytest.mark.parametrize("of", ["converted", "tiny_folder"])
@pytest.mark.parametrize("count", [10**4, 10**30])
def test_more_tokens_than_positions_are_refused_before_the_answer(cli, request, of, count) -> None:
    folder = request.getfixturevalue(of)
    length = len(tiny_tokenizer()(COMMON)["input_ids"])
    answer = cli("generate", folder, *options([COMMON], count))
    assert answer.code == UsageError.exit_code
    assert f"a prompt of {length} tokens and {count} new ones are more than the 256 positions" in answer.err
    assert f"  try: ask for at most {256 - length} new tokens\n" in answer.err
    assert answer.out == ""
    assert cli("generate", folder, *options([COMMON], 256 - length)).code == 0


@pytest.mark.parametrize(("extra", "fp8_helps"), [((), True), (("--cache-dtype", "fp8"), False)])
def test_a_cache_beyond_the_memory_is_refused_before_the_answer(cli, converted, monkeypatch, extra, fp8_helps) -> None:
    monkeypatch.setattr(generation, "pages_needed", lambda *_: 2**44)
    answer = cli("generate", converted, *options(["x"]), *extra)
    assert answer.code == CacheFullError.exit_code
    assert f"no memory for a cache of {2**44} pages" in answer.err
    assert "  try: lower --max-new-tokens or --batch-size" in answer.err
    assert ("--cache-dtype fp8" in answer.err) == fp8_helps
    assert answer.out == ""


@pytest.mark.parametrize("of", ["converted", "tiny_folder"])
@pytest.mark.parametrize("temperature", ["1e-320", "1e-300", "1e-38"])
def test_a_temperature_next_to_0_is_0(cli, request, of, temperature) -> None:
    folder = request.getfixturevalue(of)
    expected = cli("generate", folder, *options(["the cat"])).out
    assert cli("generate", folder, *options(["the cat"]), "--temperature", temperature).out == expected
