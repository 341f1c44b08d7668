import hashlib
import logging
import sys
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest
import torch

from mla_convert.calibrate import text as text_module
from mla_convert.calibrate.text import Text, joint_digest, mixed_windows, read_text, uniform_windows, windows
from mla_convert.errors import TextError
from tests.evaluate.models import byte_tokenizer


def test_reads_a_file_and_digests_what_it_used(tmp_path):
    file = tmp_path / "plain"
    file.write_text("Grüße, world\n" * 3, encoding="utf-8")
    text = read_text(str(file), max_chars=5)
    assert (text.ref, text.text) == (str(file), "Grüße")
    assert text.digest == hashlib.sha256("Grüße".encode()).hexdigest()
    assert read_text(str(file)).text == "Grüße, world\n" * 3


def test_pydoc_is_every_topic_in_order_of_its_name():
    text = read_text("builtin:pydoc").text
    positions = [text.index(topics[name]) for name in sorted(topics)[:20]]
    assert positions == sorted(positions)
    assert len(text) == sum(map(len, topics.values())) + 2 * (len(topics) - 1)
    assert read_text("builtin:pydoc", max_chars=100).text == text[:100]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "cannot read"),
        ("latin.txt", "Grüße".encode("latin-1"), "UTF-8"),
        ("empty.txt", b" \n", "empty"),
    ],
)
def test_refuses_files_without_readable_text(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=message) as raised:
        read_text(str(tmp_path / name))
    assert raised.value.remedy


def test_refuses_a_folder(tmp_path):
    with pytest.raises(TextError, match="cannot read"):
        read_text(str(tmp_path))


def test_refuses_an_unknown_builtin():
    with pytest.raises(TextError, match="builtin:novel"):
        read_text("builtin:novel")


class FakeDatasets:
    """Stands for the datasets package; remembers what it was asked for."""

    def __init__(self, rows=(), error=None):
        self.rows, self.error, self.taken, self.asked = rows, error, 0, None

    def load_dataset(self, name, config, *, split, streaming):
        self.asked = (name, config, split, streaming)
        if self.error is not None:
            raise self.error
        for row in self.rows:
            self.taken += 1
            yield row


@pytest.mark.parametrize(
    ("ref", "asked", "column"),
    [
        ("stories", ("stories", None, "train", True), "text"),
        ("owner/name:config-2@test#body", ("owner/name", "config-2", "test", True), "body"),
        ("owner/name@validation[:10%]", ("owner/name", None, "validation[:10%]", True), "text"),
        ("owner/name#body", ("owner/name", None, "train", True), "body"),
    ],
)
def test_a_dataset_reference_names_config_split_and_column(monkeypatch, ref, asked, column):
    fake = FakeDatasets([{column: "one"}, {column: "two"}])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read_text(ref).text == "one\n\ntwo"
    assert fake.asked == asked


def test_a_dataset_is_streamed_no_further_than_needed(monkeypatch):
    fake = FakeDatasets([{"text": "abcd"}] * 100)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read_text("stories", max_chars=10).text == "abcd\n\nabcd"
    assert fake.taken == 2


def test_a_dataset_without_end_is_bounded_and_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets([{"text": "abcd"}] * 100))
    monkeypatch.setattr(text_module, "STREAMED_CHARS", 10)
    with caplog.at_level(logging.WARNING):
        assert len(read_text("stories").text) == 10
    assert "at most 10 characters" in caplog.text


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "datasets package"),
        (FakeDatasets(error=ConnectionError("no route\nto host")), "no route"),
        (FakeDatasets([{"body": "x"}]), "no column 'text'"),
    ],
)
def test_dataset_failures_have_a_remedy(monkeypatch, module, message):
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(TextError, match=message) as raised:
        read_text("stories")
    assert raised.value.remedy
    assert "\n" not in raised.value.message


def test_refuses_what_is_neither_a_file_nor_a_dataset_id():
    with pytest.raises(TextError, match="neither"):
        read_text("a b/c d")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def as_text(tokenizer, contexts: torch.Tensor) -> list[str]:
    return [tokenizer.decode(row) for row in contexts]


def test_windows_are_the_text_in_order(tokenizer):
    contexts = windows(tokenizer, "abcdefghijk", context=4)
    assert contexts.dtype == torch.long
    assert as_text(tokenizer, contexts) == ["abcd", "efgh"]
    assert as_text(tokenizer, windows(tokenizer, "abcdefghijk", context=4, max_tokens=7)) == ["abcd"]


def test_only_as_much_is_tokenised_as_is_needed(tokenizer):
    seen = []

    def spy(text, **options):
        seen.append(len(text))
        return tokenizer(text, **options)

    contexts = windows(spy, "word " * 100_000, context=8, max_tokens=800)
    assert contexts.shape == (100, 8)
    assert sum(seen) < 10_000


def test_a_text_is_tokenised_once_for_all_samples_of_it(tokenizer):
    seen = []

    def spy(text, **options):
        seen.append(text)
        return tokenizer(text, **options)

    first, again = (windows(spy, "every word " * 100, context=8, max_tokens=count, seed=0) for count in (80, 160))
    assert torch.equal(again[:10], first)
    windows(spy, "another text " * 100, context=8, seed=0)
    windows(lambda text, **options: spy(text, **options), "another text " * 100, context=8, seed=0)
    assert len(seen) == 3  # another tokenizer makes other tokens of a text


def test_a_prefix_has_the_tokens_of_the_whole_text():
    # One token for every word, whatever its length. The first prefix tried for 512 tokens, 6·512 + 1024 characters,
    # ends inside the 512th word: 10 + 510·8 characters are the 511 before it.
    def words(text, **options):
        return {"input_ids": [len(word) for word in text.split(" ")]}

    text = "a" * 10 + " aaaaaaa" * 2000
    whole = words(text)["input_ids"]
    for max_tokens in (8, 512, 1600):
        assert windows(words, text, context=8, max_tokens=max_tokens).flatten().tolist() == whole[:max_tokens]


def test_a_seed_draws_windows_without_replacement(tokenizer):
    text = "".join(chr(33 + i) for i in range(90))
    everything = as_text(tokenizer, windows(tokenizer, text, context=3))
    drawn = as_text(tokenizer, windows(tokenizer, text, context=3, seed=0))
    assert drawn != everything
    assert sorted(drawn) == sorted(everything)
    some = as_text(tokenizer, windows(tokenizer, text, context=3, max_tokens=30, seed=0))
    assert len(set(some)) == 10
    assert some == as_text(tokenizer, windows(tokenizer, text, context=3, max_tokens=30, seed=0))
    assert some != as_text(tokenizer, windows(tokenizer, text, context=3, max_tokens=30, seed=1))


def test_no_special_tokens_and_no_warning_about_length(caplog):
    calls = SimpleNamespace(options=None)
    inner = byte_tokenizer()

    def spy(text, **options):
        calls.options = options
        return inner(text, **options)

    with caplog.at_level(logging.WARNING):
        windows(spy, "longer than the sixteen tokens that this tokenizer admits", context=4)
    assert calls.options["add_special_tokens"] is False
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 100}, "it has 11"),
        ({"context": 4, "max_tokens": 3}, "do not fill"),
        ({"context": 1}, "predicts nothing"),
    ],
)
def test_refuses_too_little_text(tokenizer, options, message):
    with pytest.raises(TextError, match=message):
        windows(tokenizer, "hello world", **options)


def test_uniform_windows_are_seeded_and_reach_the_whole_vocabulary():
    drawn = uniform_windows(50, count=20, context=100, seed=3)
    assert drawn.shape == (20, 100)
    assert torch.equal(drawn, uniform_windows(50, count=20, context=100, seed=3))
    assert not torch.equal(drawn, uniform_windows(50, count=20, context=100, seed=4))
    # 2000 draws of 50 tokens leave one out with a probability of 50 * 0.98**2000, below 1e-15
    assert torch.equal(drawn.unique(), torch.arange(50))


def test_several_texts_take_turns_in_equal_shares(tokenizer):
    texts = [Text(name, letter * 40, name) for name, letter in (("a", "a"), ("b", "b"))]
    rows = mixed_windows(tokenizer, texts, context=4, max_tokens=24, seed=0)
    assert rows.shape == (6, 4)
    ids = [tokenizer(letter)["input_ids"][0] for letter in "ab"]
    assert rows[:, 0].tolist() == ids * 3


def test_a_text_that_is_shorter_than_its_share_gives_all_it_has(tokenizer):
    texts = [Text("a", "a" * 8, "a"), Text("b", "b" * 80, "b")]
    rows = mixed_windows(tokenizer, texts, context=4, max_tokens=40, seed=0)
    counts = [(rows[:, 0] == tokenizer(letter)["input_ids"][0]).sum().item() for letter in "ab"]
    assert counts == [2, 5]


def test_one_text_is_sampled_as_by_itself(tokenizer):
    text = Text("a", "abcdefghijklmnopqrstuvwxyz", "a")
    mixed = mixed_windows(tokenizer, [text], context=4, max_tokens=12, seed=3)
    assert torch.equal(mixed, windows(tokenizer, text.text, context=4, max_tokens=12, seed=3))


def test_every_text_needs_room_for_a_context(tokenizer):
    with pytest.raises(TextError, match="one context of 4 from each of 2 texts"):
        mixed_windows(tokenizer, [Text("a", "a" * 40, "a"), Text("b", "b" * 40, "b")], context=4, max_tokens=7, seed=0)


def test_texts_have_one_digest_that_knows_each_of_them():
    first, second, third = (Text(name, name, hashlib.sha256(name.encode()).hexdigest()) for name in "abc")
    assert joint_digest([first]) == first.digest
    digests = {joint_digest(texts) for texts in ([first, second], [second, first], [first, third], [first])}
    assert len(digests) == 4
