from pathlib import Path

import pytest
import torch

from mla_convert.errors import TextError
from mla_convert.heal.data import HealingText, healing_text
from tests.evaluate.models import byte_tokenizer

CONTEXT = 8


@pytest.fixture(scope="module")
def refs(tmp_path_factory) -> list[str]:
    """Two texts of 100 and 40 windows of 8 single-byte tokens; no window is there twice."""
    folder = tmp_path_factory.mktemp("texts")
    for name, letter, count in (("long.txt", "a", 100), ("short.txt", "b", 40)):
        (folder / name).write_text("".join(f"{letter}{i:07d}" for i in range(count)))
    return [str(folder / "long.txt"), str(folder / "short.txt")]


def make(refs: list[str], **changes) -> HealingText:
    options = {"context": CONTEXT, "tokens": 2 * 20 * CONTEXT, "held_out_share": 0.25, "seed": 0}
    return healing_text(byte_tokenizer(), refs, **options | changes)


def shown(rows: torch.Tensor) -> list[str]:
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(row) for row in rows]


def test_texts_take_turns_and_give_equal_shares(refs):
    text = make(refs)
    letters = [window[0] for window in shown(text.train[text.order])]
    assert letters == ["a", "b"] * 20
    assert [window[0] for window in shown(text.held_out)] == ["a"] * 5 + ["b"] * 5


def test_held_out_windows_are_the_last_of_each_text_and_never_trained_on(refs):
    text = make(refs)
    assert shown(text.held_out) == [f"a{i:07d}" for i in range(95, 100)] + [f"b{i:07d}" for i in range(35, 40)]
    assert not set(shown(text.train)) & set(shown(text.held_out))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_held_out_share_is_of_the_training_windows_and_at_least_one(refs, share):
    text = make(refs, tokens=2 * 3 * CONTEXT, held_out_share=share)
    assert len(text.held_out) == 2 * max(1, int(share * 3))
    assert not set(shown(text.train)) & set(shown(text.held_out))


def test_without_a_second_pass_no_window_comes_twice(refs):
    text = make(refs)
    assert len(text.train) == len(text.order) == len(set(shown(text.train))) == 40
    assert sorted(text.order.tolist()) == list(range(40))


def test_a_window_comes_again_only_after_all_others_of_its_text(refs):
    text = make(refs, tokens=2 * 90 * CONTEXT, passes=3)
    assert len(text.train) == 90 + 30  # the short text has 40 windows, of which 10 are held out
    of_short = text.order[1::2].tolist()
    assert [sorted(of_short[i : i + 30]) for i in (0, 30, 60)] == [list(range(90, 120))] * 3
    assert of_short[:30] != of_short[30:60] != of_short[60:]


def test_the_seed_draws_the_windows(refs):
    assert make(refs).digest == make(refs).digest
    assert make(refs).digest != make(refs, seed=1).digest
    assert make(refs).digests == make(refs, seed=1).digests
    assert make(refs).digest != make(refs[::-1]).digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # 41 windows of 8 to train on, and 10 of 8 to hold out: a quarter of the shorter text's 40
        ({"tokens": 2 * 41 * CONTEXT}, "has 320 tokens in contexts of 8, and 408 are needed: 328 to train on .* 80"),
        ({"tokens": 2 * 91 * CONTEXT, "passes": 3}, "short.txt has 320 tokens .* 328 are needed"),
        ({"tokens": 15}, "at least 16 tokens"),
        ({"context": 500}, "do not fill one context of 500"),
        ({"held_out_share": 0.0}, "held-out share"),
        ({"held_out_share": 1.0}, "held-out share"),
        ({"passes": 0}, "0 passes"),
    ],
)
def test_refuses_texts_that_are_too_short(refs, changes, message):
    with pytest.raises(TextError, match=message):
        make(refs, **changes)


def test_refuses_a_text_shorter_than_one_context(refs, tmp_path):
    tiny = tmp_path / "tiny.txt"
    tiny.write_text("abc")
    with pytest.raises(TextError, match="it has 3"):
        make([*refs, str(tiny)])


def test_refuses_a_text_given_twice(refs, tmp_path):
    copy = tmp_path / "copy.txt"
    copy.write_text(Path(refs[0]).read_text())
    with pytest.raises(TextError, match="same text"):
        make([*refs, str(copy)])


def test_refuses_no_text():
    with pytest.raises(TextError, match="no text"):
        make([])
