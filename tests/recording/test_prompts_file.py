"""Prompts files are read in order, and what is wrong with one is named by line."""

import pytest

from eldr.recording import Prompt, PromptsError, prompts_sha256, read_prompts, refuse_overlap


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


def test_the_hash_follows_every_field_and_the_order():
    prompts = [Prompt("1", "a", "law"), Prompt("2", "b")]
    same = prompts_sha256(prompts)
    assert prompts_sha256([Prompt("1", "a", "law"), Prompt("2", "b")]) == same
    for other in (
        prompts[::-1],
        prompts[:1],
        [Prompt("1", "a", ""), prompts[1]],
        [Prompt("1", "c", "law"), prompts[1]],
        [Prompt("3", "a", "law"), prompts[1]],
    ):
        assert prompts_sha256(other) != same


def test_a_held_out_text_is_refused_under_any_id():
    with pytest.raises(
        PromptsError, match=r"1 of 2 prompts are held out too.*prompt '2' is the held-out '9'"
    ):
        refuse_overlap([Prompt("1", "a"), Prompt("2", "b")], [Prompt("9", "b")])


def test_a_held_out_id_is_refused_where_both_files_give_it():
    with pytest.raises(PromptsError, match="prompt 'x' has the id 'x' of a held-out one"):
        refuse_overlap([Prompt("x", "a")], [Prompt("x", "b")])


def test_line_numbers_are_no_ids_to_overlap(tmp_path):
    for name, text in (("a.txt", "one\ntwo"), ("b.jsonl", '{"text": "three"}\n{"text": "four"}')):
        write(tmp_path, name, text)
    first, second = read_prompts(tmp_path / "a.txt"), read_prompts(tmp_path / "b.jsonl")
    assert {prompt.id for prompt in first} & {prompt.id for prompt in second}
    refuse_overlap(first, second)
    refuse_overlap(first, [])
