"""Prompts files are read in order, and what is wrong with one is named by line."""

import pytest

from eldr.recording import Prompt, PromptsError, read_prompts


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_json_lines_keep_order_ids_and_domains(tmp_path):
    path = write(
        tmp_path, "p.jsonl", '{"id": "b", "text": "x\\ny", "domain": "law"}\n\n{"id": 7, "text": "z"}\n'
    )
    assert read_prompts(path) == [Prompt("b", "x\ny", "law"), Prompt("7", "z")]


def test_text_lines_are_numbered_by_line(tmp_path):
    path = write(tmp_path, "p.txt", "one\r\n\n{not json}\n")
    assert read_prompts(path) == [Prompt("1", "one"), Prompt("3", "{not json}")]


def test_separators_inside_a_text_do_not_end_its_line(tmp_path):
    path = write(tmp_path, "p.txt", "a\u2028b\x0bc\n")
    assert read_prompts(path) == [Prompt("1", "a\u2028b\x0bc")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be a JSON object, got list"),
        ('{"text": ""}', "line 2: text must be"),
        ('{"text": 5}', "line 2: text must be"),
        ('{"text": "b", "domain": 5}', "line 2: domain must be a text, got int"),
        ('{"text": "b", "id": []}', r"line 2: id must be a text or a number, got \[\]"),
        ('{"text": "b", "id": "1"}', "line 2: id '1' is already that of line 1"),
        ('{"text": "a", "id": "2"}', "line 2: the same text as line 1"),
    ],
)
def test_a_bad_line_is_refused_by_number(tmp_path, line, message):
    path = write(tmp_path, "p.jsonl", '{"text": "a", "id": "1"}\n' + line)
    with pytest.raises(PromptsError, match=message):
        read_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(PromptsError, match=r"p\.txt holds no prompts"):
        read_prompts(write(tmp_path, "p.txt", "\n \n"))


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"ab\xff\n")
    with pytest.raises(PromptsError, match="not UTF-8 at byte 2"):
        read_prompts(path)
