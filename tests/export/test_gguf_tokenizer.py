"""Tokenizers in GGUF files: llama.cpp cuts texts as transformers does, and what it would cut otherwise is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from transformers import PreTrainedTokenizerFast

from mla_convert.errors import FormatError
from mla_convert.export.gguf_tokenizer import TokenKind, gguf_tokenizer
from mla_convert.export.targets.gguf import FILE_NAME, GGUF
from mla_convert.export.targets.target import ExportOptions
from mla_convert.export.verify import llamacpp_engine
from mla_convert.progress import silent
from tests.export.test_gguf import exact
from tests.tiny import tiny_llama

needs_llamacpp = pytest.mark.skipif(llamacpp_engine.version() is None, reason="xllamacpp is not installed")

LLAMA3 = "".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
QWEN2 = LLAMA3.replace("{1,3}", "")

TEXTS = (
    "The cat sat on the mat in 1984, didn't it? IT'S 20 dogs' 7.5 km away.",
    "  two spaces,\ttabs\t\tand\n\nlines \n  \n end ",
    "Füße, naïve café; 漢字かな交じり文 и кириллица – «quotes» … ½ ² ٣٤",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 and control \x07 bytes \u200b zero width",
    "def f(x_1: int) -> str:\n    return f'{x_1!r}' # 0x1F4A9 == 128169\n",
    "<s>special</s> tokens <|user|> inside <s> text",
    "",
    " ",
    "aaaaaaaaaaaaaaaa            b",
)
CORPUS = [*TEXTS, "the cat sat on the mat and it is 1984 1985 2000 again. " * 4, "don't it's they're we'll I'd"]


def byte_level(pre: PreTokenizer, *, ignore_merges: bool = False, nfc: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def pattern(regex: str) -> PreTokenizer:
    bytes_only = ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([Split(Regex(regex), "isolated"), bytes_only])


def sentencepiece(*, metaspace: str | None = None) -> Tokenizer:
    """As Llama 2's: a piece is a merge, spaces are ▁, and what is not in the vocabulary becomes its bytes."""
    space = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    trained.normalizer = space
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=["<unk>", "<s>", "</s>", *raw], show_progress=False)
    trained.train_from_iterator(["the cat sat on the mat. " * 8, "don't it's 1984 and again, the end"], trainer)
    state = json.loads(trained.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    if metaspace is not None:
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def wrapped(tokenizer: Tokenizer, *, bos: bool = False, **fields: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken("<|user|>", normalized=False)])
    if bos:
        start = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"bos_token": "<s>", "eos_token": "</s>", **fields})


GPT2 = ByteLevel(add_prefix_space=False)
KINDS = {
    "gpt-2": lambda: wrapped(byte_level(GPT2)),
    "gpt-2 with bos": lambda: wrapped(byte_level(GPT2), bos=True),
    "smollm": lambda: wrapped(byte_level(pre_tokenizers.Sequence([Digits(individual_digits=True), GPT2]))),
    "llama-bpe": lambda: wrapped(byte_level(pattern(LLAMA3), ignore_merges=True), bos=True),
    "qwen2": lambda: wrapped(byte_level(pattern(QWEN2), nfc=True)),
    "sentencepiece": lambda: wrapped(sentencepiece(), bos=True, unk_token="<unk>"),
    "sentencepiece by metaspace": lambda: wrapped(sentencepiece(metaspace="always"), unk_token="<unk>"),
}

# Asks llama.cpp's server, in a process of its own, for the tokens of texts.
TOKENIZE = """
import json, sys, urllib.request
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup, params.fit_params = sys.argv[1], 64, False, False
server = xllamacpp.Server(params)
def ask(path, body):
    request = urllib.request.Request(
        server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
tokens = [
    ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
    for text in json.load(open(sys.argv[2]))
]
chat = ask("/apply-template", {"messages": [{"role": "user", "content": "hi there"}]})["prompt"]
json.dump([tokens, chat], open(sys.argv[3], "w"))
"""


def file_with(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """The file of a tiny model that has this tokenizer."""
    model = exact(tiny_llama("MQA", vocab_size=len(tokenizer) + 3), folder)
    tokenizer.save_pretrained(model.folder)
    (folder / "out").mkdir()
    plan = GGUF.plan(model, ExportOptions())
    assert plan.form == "gguf", plan.reasons
    GGUF.write(model, plan, ExportOptions(), folder / "out", silent)
    return folder / "out" / FILE_NAME


@needs_llamacpp
@pytest.mark.parametrize("kind", KINDS)
def test_llamacpp_cuts_texts_as_transformers_does(tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind]()
    # where a text, or one after a special token, begins with a space, transformers' Metaspace adds none: see the notes
    texts = [text for text in TEXTS if "metaspace" not in kind or not text.startswith((" ", "<s>"))]
    tokenizer.chat_template = "{% for message in messages %}<|user|>{{ message['content'] }}</s>{% endfor %}"
    file = file_with(tokenizer, tmp_path)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    arguments = [str(file), str(tmp_path / "texts.json"), str(tmp_path / "tokens.json")]
    run = subprocess.run([sys.executable, "-c", TOKENIZE, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    tokens, chat = json.loads((tmp_path / "tokens.json").read_text())
    for text, found in zip(texts, tokens, strict=True):
        assert found == tokenizer(text)["input_ids"], text
    assert chat == tokenizer.apply_chat_template([{"role": "user", "content": "hi there"}], tokenize=False)


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (lambda: wrapped(byte_level(pattern(r"\s+|\S+"))), "no pre-tokenizer that is known"),
        (lambda: wrapped(byte_level(pre_tokenizers.Sequence([Digits(), GPT2]))), "no pre-tokenizer that is known"),
        (lambda: wrapped(byte_level(ByteLevel(add_prefix_space=True))), "no space before the text"),
        (lambda: wrapped(byte_level(pattern(LLAMA3))), "another ignore_merges"),
        (lambda: wrapped(byte_level(GPT2), eos_token=None), "no token that ends a text"),
        (lambda: wrapped(sentencepiece(metaspace="never")), None),
        (lambda: wrapped(Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, "<s>"))), "type WordLevel"),
    ],
)
def test_what_llamacpp_would_cut_otherwise_is_refused(tokenizer: Any, reason: str | None) -> None:
    if reason is None:
        assert not gguf_tokenizer(tokenizer(), 1000).add_space
        return
    with pytest.raises(FormatError, match=reason):
        gguf_tokenizer(tokenizer(), 1000)


def test_lowercased_text_is_refused() -> None:
    tokenizer = byte_level(GPT2)
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(FormatError, match="Lowercase"):
        gguf_tokenizer(wrapped(tokenizer), 1000)


def test_known_differences_are_noted() -> None:
    assert "NFC" in gguf_tokenizer(KINDS["qwen2"](), 1000).notes[0]
    first = wrapped(sentencepiece(metaspace="first"), unk_token="<unk>")
    begins, after = gguf_tokenizer(first, 1000).notes
    assert "text that begins with one" in begins
    assert "after a special token" in after


def test_more_tokens_than_rows_are_refused() -> None:
    with pytest.raises(FormatError, match="more tokens than the embedding has rows, 100"):
        gguf_tokenizer(KINDS["gpt-2"](), 100)


def test_kinds_of_tokens() -> None:
    found = gguf_tokenizer(KINDS["sentencepiece"](), 600)
    by_token = dict(zip(found.tokens, found.kinds, strict=True))
    assert by_token["<unk>"] is TokenKind.UNKNOWN
    assert by_token["</s>"] is TokenKind.CONTROL
    assert by_token["<|user|>"] is TokenKind.USER_DEFINED
    assert by_token["<0x0A>"] is TokenKind.BYTE
    assert found.kinds[-1] is TokenKind.UNUSED
    assert found.add_bos
    assert not found.add_eos
