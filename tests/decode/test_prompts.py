import pytest

from mla_convert.decode import read_prompts
from mla_convert.errors import UsageError


def test_a_prompt_is_a_line_as_it_stands(tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes('one\r\n\n  two: \x85 \u2028 still two  \n \t\n"three"'.encode())
    assert read_prompts(file) == ["one", "  two: \x85 \u2028 still two  ", '"three"']


def test_json_lines_are_strings_or_objects(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"two\\nlines"\n\n{"prompt": "three", "id": 7}\n', encoding="utf-8")
    assert read_prompts(file) == ["two\nlines", "three"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\n", "no prompt"),
        ("a.txt", b"\xff\xfe", "cannot read"),
        ("a.jsonl", b'"a"\n{bad\n', "line 2 of .*a.jsonl is not JSON"),
        ("a.jsonl", b'{"text": "a"}', "line 1 .* gives no prompt"),
        ("a.jsonl", b'[""]', "gives no prompt"),
        ("a.jsonl", b'""', "gives no prompt"),
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
