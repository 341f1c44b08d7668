import pytest

from mla_convert.decode import check_prompts, read_prompts
from mla_convert.errors import UsageError


def test_a_prompt_is_a_line_as_it_stands(tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes('one\r\n\n  two: \x85 \u2028 still two  \n \t\n"three"'.encode())
    assert read_prompts(file) == ["one", "  two: \x85 \u2028 still two  ", '"three"']


def test_json_lines_are_strings_or_objects(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"two\\nlines"\n\n{"prompt": "three", "id": 7}\n', encoding="utf-8")
    assert read_prompts(file) == ["two\nlines", "three"]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path, name) -> None:
    file = tmp_path / name
    file.write_bytes(b'\xef\xbb\xbf"one"\n"two"\n')
    assert read_prompts(file) == (["one", "two"] if name.endswith(".jsonl") else ['"one"', '"two"'])


def test_whole_pairs_of_surrogates_are_a_character(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"\\ud83d\\ude00"')
    assert read_prompts(file) == ["\U0001f600"]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompt"),
        ([""], "the prompt is empty"),
        (["a", ""], "prompt 2 of 2 is empty"),
        (["\udc80"], r"the prompt is no Unicode text: its character 1 is U\+DC80"),
        (["a", "b\ud83d"], r"prompt 2 of 2 is no Unicode text: its character 2 is U\+D83D"),
    ],
)
def test_what_is_no_text_is_no_prompt(prompts, message) -> None:
    with pytest.raises(UsageError, match=message):
        check_prompts(prompts)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\n", "no prompt"),
        ("a.txt", b"\xff\xfe", "cannot read"),
        ("a.jsonl", b'"a"\n{bad\n', "line 2 of .*a.jsonl is not JSON"),
        ("a.jsonl", b'{"text": "a"}', "line 1 .* gives no prompt"),
        ("a.jsonl", b'[""]', "gives no prompt"),
        ("a.jsonl", b'""', "gives no prompt"),
        ("a.jsonl", b'"a"\n' + b"[" * 10**6, "line 2 of .*a.jsonl is not JSON"),
        ("a.jsonl", b"9" * 10**4, "line 1 of .*a.jsonl is not JSON"),
        ("a.jsonl", b'"a"\n{"prompt": "a\\ud83d"}', r"line 2 of .* is no Unicode text: its character 2 is U\+D83D"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_place(tmp_path, name, content, message) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:
        read_prompts(file)
    assert raised.value.remedy


def test_a_missing_file_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(tmp_path / "none.txt")
