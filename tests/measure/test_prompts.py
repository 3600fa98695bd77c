"""A question file loads as it is written or is refused by line; the shipped ones load."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specexp.errors import UserError
from specexp.measure import prompts as prompts_module
from specexp.measure.parameters import problems_of
from specexp.measure.prompts import NAMES, SHIPPED, Prompt, in_chat, load
from specexp.zoo.known import Known


def line(question_id: object = 1, category: object = "code", turns: object = ("x = 1",)) -> str:
    return json.dumps({"question_id": question_id, "category": category, "turns": turns}) + "\n"


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "question.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(folder: Path, content: str | bytes) -> str:
    with pytest.raises(UserError) as refused:
        load(write(folder, content))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_set_has_sixteen_prompts_of_its_category(name: str) -> None:
    prompts = load(name)
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 16
    assert {prompt.category for prompt in prompts} == {name}
    for prompt in prompts:
        assert len(prompt.turns) == 1
        assert 100 <= len(prompt.text) <= 1000
        assert not prompt.text.endswith(" "), "a trailing blank breaks the next token"
    assert max(len(p.text) for p in prompts) > 1.5 * min(len(p.text) for p in prompts), "ragged"


def test_all_has_every_shipped_prompt_once() -> None:
    prompts = load("all")
    rows = zip(*map(load, NAMES), strict=True)
    assert prompts == [prompt for row in rows for prompt in row]
    assert len({prompt.question_id for prompt in prompts}) == len(prompts)
    assert sorted(path.stem for path in SHIPPED.iterdir()) == sorted(NAMES)


def test_editing_prompts_end_where_the_repetition_begins() -> None:
    for prompt in load("editing"):
        passage, task = prompt.text.split("\n\n")[0], prompt.text.rsplit("\n\n", 1)[1]
        begun = task.split("\n", 1)[1]
        heading = task.split("\n", 1)[0]
        if heading not in ("CSV:", "JSON lines:"):
            assert passage.split("\n", 1)[1].startswith(begun.rstrip("\n"))


def test_spec_bench_file_loads_unchanged(tmp_path: Path) -> None:
    questions = [
        {
            "question_id": 81,
            "category": "writing",
            "turns": ["Write a post.\n", "Shorten it."],
            "reference": ["", "..."],
        },
        {"question_id": "q-82", "category": "math", "turns": ["Näher: 1\u20282"], "score": 1.5},
    ]
    path = write(tmp_path, "".join(json.dumps(q, ensure_ascii=False) + "\n" for q in questions))
    prompts = load(path)
    assert prompts == [
        Prompt(81, "writing", ("Write a post.\n", "Shorten it.")),
        Prompt("q-82", "math", ("Näher: 1\u20282",)),
    ]
    assert prompts[0].text == "Write a post.\n"
    assert load(str(path)) == prompts


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]
SHARED = [{"from": "gpt", "value": "Hello"}, {"from": "human", "value": "1+1?"}]
ONE = Prompt(1, "mine", ("a b",))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("mine.jsonl", '{"prompt": "a b"}\n', [ONE]),
        ("mine.jsonl", '{"text": "a b", "id": 7}', [ONE]),
        ("mine.jsonl", '{"turns": ["a b", "c"]}', [Prompt(1, "mine", ("a b", "c"))]),
        ("mine.jsonl", '{"prompt": "a b", "chat": true}', [replace(ONE, chat=True)]),
        ("mine.jsonl", '{"prompt": "a b", "chat": null}', [ONE]),
        ("mine.csv", "text,chat\na b,TRUE\n", [Prompt(2, "mine", ("a b",), chat=True)]),
        ("mine.csv", "text,chat\na b,false\n", [Prompt(2, "mine", ("a b",))]),
        ("mine.csv", "text,chat\na b,\n", [Prompt(2, "mine", ("a b",))]),
        ("mine.unknown", '{"prompt": "a b"}', [ONE]),
        (
            "mine.jsonl",
            json.dumps({"messages": CHAT}),
            [Prompt(1, "mine", ("1+1?", "And 2+2?"), ("2",), "Be brief.")],
        ),
        ("mine.jsonl", json.dumps({"prompt": CHAT[1:2]}), [Prompt(1, "mine", ("1+1?",))]),
        ("mine.jsonl", json.dumps({"prompt": [{"role": "User", "content": "a b"}]}), [ONE]),
        (  # as a table has it, where each part has every key
            "mine.jsonl",
            json.dumps({"prompt": [{"from": "Human", "value": [{"text": None}, {"text": "a b"}]}]}),
            [ONE],
        ),
        (
            "mine.json",
            json.dumps([{"conversations": SHARED[:1]}, {"conversations": SHARED}], indent=1),
            [Prompt(2, "mine", ("1+1?",))],
        ),
        ("mine.txt", "a b\r\n  c\n", [ONE, Prompt(2, "mine", ("  c",))]),
        ("mine.txt", "\na\n b\n \n\nc", [Prompt(1, "mine", ("a\n b",)), Prompt(2, "mine", ("c",))]),
        (
            "mine.csv",
            'prompt,category,other\n"a\n""b""",x,1\nc,y,2\n',
            [Prompt(2, "x", ('a\n"b"',)), Prompt(4, "y", ("c",))],
        ),
        ("mine.tsv", "text\tquestion_id\na b\tq\n", [Prompt("q", "mine", ("a b",))]),
    ],
)
def test_prompts_load_as_people_have_them(tmp_path, name, content, expected) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert load(tmp_path / name) == expected


def test_parquet_prompts_load(tmp_path: Path) -> None:
    table = pandas.DataFrame({"prompt": ["a b", "c"], "category": ["x", "y"], "n": [1.5, 2]})
    table.to_parquet(tmp_path / "mine.parquet")
    expected = [Prompt(1, "x", ("a b",)), Prompt(2, "y", ("c",))]
    assert load(tmp_path / "mine.parquet") == expected
    (tmp_path / "mine.parquet").write_bytes(b"prompt\na\n")
    with pytest.raises(UserError, match=r"mine\.parquet: not Parquet"):
        load(tmp_path / "mine.parquet")


def test_folder_of_texts_loads(tmp_path: Path) -> None:
    for name, text in (("b.txt", "b\n\nb\n"), ("a.txt", "a\n"), ("c.txt", "\n"), ("d.png", "d")):
        (tmp_path / name).write_text(text)
    prompts = load(tmp_path)
    assert [(p.question_id, p.turns) for p in prompts] == [
        ("a.txt", ("a",)),
        ("b.txt", ("b\n\nb",)),
    ]
    source = f"from the .txt files of {tmp_path.name}; 1 empty file skipped"
    assert str(prompts) == f"2 prompts {source}"
    assert str(load(tmp_path, limit=1)) == f"1 prompt (of 2) {source}"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "mine.txt",
            b"a\ncaf\xe9\n",
            "mine.txt: line 2: not UTF-8 at byte 4; save the file as UTF",
        ),
        ("mine.txt", b"a\r\xe9\r\n", "mine.txt: line 2: not UTF-8 at byte 1"),
        ("mine.csv", b"question,x\na,b\n", "line 1: no text: give one of 'turns', .*'question'"),
        ("mine.csv", b"prompt\na, b\n", "line 2: more fields than the 1 of line 1: put quotes"),
        ("mine.csv", b'prompt\n"a\n', "line 2: not CSV"),
        ("mine.csv", b"id,prompt\n1\n", "line 2: 'prompt' is empty"),
        ("mine.md", b"Hello\n", "texts that are no JSON end in .txt, not '.md'"),
        ("mine.json", b'["a"]', 'item 1: not a JSON object: write {"prompt"'),
        ("mine.csv", b'prompt\n""\n', "line 2: the prompt is empty"),
        ("mine.csv", b'prompt\na\n"' + b"b" * 200_000, "line 3: not CSV"),
        (
            "mine.json",
            b'[{"prompt": "a"},\n]',
            "not JSON .* at (line 2 column 1|column 17).; .*mean",
        ),
        ("mine.json", b'[{"prompt": "a"}, 7]', "item 2: not a JSON object"),
        ("mine.json", b'[{"messages": []}]', "no conversation in which a user speaks"),
        ("mine.csv", b"text,chat\na,yes\n", "line 2: chat must be true or false, not 'yes'"),
        ("mine.jsonl", b'{"text": "a", "chat": 1}', "line 1: chat must be true or false, not 1"),
        ("mine.txt", b"\n", "mine.txt holds no prompt: write at least one"),
    ],
)
def test_unreadable_record_is_named(tmp_path, name, content, words) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as refused:
        load(tmp_path / name)
    assert "\n" not in str(refused.value)


def test_repeated_prompts_are_skipped_and_unused_turns_are_said(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"a\rb\ra\r")
    prompts = load(tmp_path / "mine.txt")
    assert str(prompts) == "2 prompts from mine.txt (one a line); 1 repeat skipped"
    assert [(p.question_id, p.text) for p in prompts] == [(1, "a"), (2, "b")]
    turns = (["a", "b"], ["c"], ["a", "d"])
    prompts = load(write(tmp_path, "".join(line(i, turns=each) for i, each in enumerate(turns))))
    used = "without chat only the first turn of 2 conversations is used; 1 repeat skipped"
    texts = in_chat(prompts, None, 8, chat=False)
    assert str(texts) == f"2 prompts from question.jsonl (field turns); {used}"
    assert [p.text for p in texts] == ["a", "c"]


def test_prompts_say_what_they_were_taken_from(tmp_path: Path) -> None:
    records = [{"conversations": SHARED}, {"prompt": "a"}, {"conversations": SHARED[:1]}]
    path = write(tmp_path, "".join(json.dumps(r) + "\n" for r in records))
    source = (
        "question.jsonl (fields conversations and prompt); 1 line skipped: no user speaks there"
    )
    assert str(load(path)) == f"2 prompts from {source}"
    assert str(load("code", limit=1)) == "1 prompt of code"
    assert str(load("all")) == "80 prompts"


def test_bom_carriage_returns_and_blank_lines_are_tolerated(tmp_path: Path) -> None:
    plain = load(write(tmp_path, line(1) + line(2)))
    assert load(write(tmp_path, "\ufeff" + line(1) + "\n  \n" + line(2).strip())) == plain
    assert load(write(tmp_path, (line(1) + line(2)).replace("\n", "\r\n"))) == plain


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5_000, "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"question": "x"}', "no text: give one of 'turns', 'prompt'"),
        ("{}", "there is none"),
        ('{"prompt": 7}', "prompt must be a string or a list of messages"),
        ('{"text": ["x"]}', "text must be a string"),
        ('{"messages": [{"role": "user"}]}', "a message of messages has no text"),
        ('{"messages": [{"role": "user", "content": [7]}]}', "a message of messages has no text"),
        (line(1.5), "question_id"),
        (line(True), "question_id"),
        (line(None), "question_id"),
        (line(2, category=""), "category"),
        (line(2, category=7), "category"),
        (line(2, turns=[]), "turns"),
        (line(2, turns="text"), "turns"),
        (line(2, turns=[1]), "turns"),
        (line(2, turns=["ok", None]), "turns"),
        (line(2, turns=[" \n"]), "prompt is empty"),
        (line(2, turns=["\ud83d"]), "surrogate"),
        (line("a"), "'a' is also on line 1"),
        (b"\xff\xfe{\x00", "not UTF-8 at byte 1"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, broken: str | bytes, word: str) -> None:
    raw = broken if isinstance(broken, bytes) else broken.encode()
    message = refusal(tmp_path, line("a").encode() + raw)
    assert "question.jsonl: line 2: " in message
    assert word in message
    assert len(message) < 300 + len(str(tmp_path))


def test_long_text_in_a_table_is_read(tmp_path: Path) -> None:
    file, text = tmp_path / "mine.csv", "a" * 200_000
    file.write_text(f"prompt\n{text}\n")
    usual = csv.field_size_limit()
    [prompt] = load(file)
    assert prompt.text == text
    assert csv.field_size_limit() == usual, "that of others"


def test_conversation_ends_where_the_assistant_calls_a_tool(tmp_path: Path) -> None:
    """Its message then has no content."""
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", None), ("tool", "d"),
            ("assistant", "e"), ("user", "f")]  # fmt: skip
    messages = [{"role": role, "content": content} for role, content in said]
    [prompt] = load(write(tmp_path, json.dumps({"messages": messages})))
    assert (prompt.turns, prompt.answers) == (("a", "c"), ("b",))


def test_five_broken_lines_are_named_in_one_message(tmp_path: Path) -> None:
    message = refusal(tmp_path, line(1) + "{\n" * 8)
    assert [f"line {n}:" in message for n in range(1, 10)] == [False] + [True] * 5 + [False] * 3
    assert message.endswith("; and 3 more")


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n \r\n\n"])
def test_empty_prompts_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "holds no prompt" in refusal(tmp_path, content)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("cod", "'code'"),
        ("editting", "'editing'"),
        ("zzzz", "shipped are code, prose"),
        ("no/such/folder/zzzz", "shipped are code, prose"),
    ],
)
def test_missing_prompts_suggest_the_nearest_set(name: str, word: str) -> None:
    with pytest.raises(UserError, match=f"no prompts at {name}.*{word}"):
        load(name)


def test_no_name_is_no_folder_and_says_which_prompts_there_are() -> None:
    with pytest.raises(UserError, match=r"no prompts are named: .*; shipped are code, prose"):
        load("")


def test_missing_prompts_suggest_a_neighbouring_file(tmp_path, monkeypatch) -> None:
    write(tmp_path, line())
    monkeypatch.setenv("HOME", str(tmp_path))
    for missing in (tmp_path / "Questions.jsonl", "~/question.jsonl"):
        with pytest.raises(UserError, match=f"did you mean '{tmp_path}/question.jsonl'"):
            load(missing)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_unreadable_prompts_are_refused(path: str) -> None:
    with pytest.raises(UserError, match="cannot read prompts"):
        load(path)


def test_categories_filter_and_refuse_unknown_ones() -> None:
    chosen = load("all", categories=["messy", "code"])
    both = zip(load("code"), load("messy"), strict=True)
    assert chosen == [prompt for pair in both for prompt in pair]
    with pytest.raises(UserError, match=r"'coding'; there are 'code', 'prose'"):
        load("all", categories=["coding"])


@pytest.mark.parametrize("limit", [1, 4, 5, 7, 23, 80, 200])
def test_limit_takes_evenly_from_each_category(limit: int) -> None:
    chosen = load("all", limit=limit)
    taken = {name: [p for p in chosen if p.category == name] for name in NAMES}
    assert len(chosen) == min(limit, 80)
    assert max(map(len, taken.values())) - min(map(len, taken.values())) <= 1
    for name, prompts in taken.items():
        assert prompts == load(name)[: len(prompts)]
    assert [p.category for p in chosen] == [NAMES[i % 5] for i in range(len(chosen))]


def test_limit_goes_on_after_a_small_category(tmp_path: Path) -> None:
    path = write(tmp_path, line(1, "a") + "".join(line(n, "b", [f"{n}"]) for n in range(2, 9)))
    assert [p.question_id for p in load(path, limit=4)] == [1, 2, 3, 4]


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="limit"):
        load("all", limit=0)


GOOD = "".join(line(n, category, [f"turn {n} ü"]) for n, category in enumerate("aabbc")).encode()


@settings(max_examples=400)
@example(edits=[(len(GOOD), 0, b"\x1c")])  # white space to Unicode, not to JSON
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(GOOD)), st.integers(0, 8), st.binary(max_size=6)),
        min_size=1,
        max_size=5,
    )
)
def test_any_mutation_loads_or_is_refused_by_line(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int, bytes]]
) -> None:
    content = GOOD
    for start, removed, added in edits:
        content = content[:start] + added + content[start + removed :]
    lines = re.split(rb"\r\n|\r|\n", content.removeprefix(b"\xef\xbb\xbf"))
    try:
        prompts = load(write(tmp_path_factory.getbasetemp(), content))
    except UserError as error:
        named = [n for n in range(1, len(lines) + 1) if f"line {n}: " in str(error)]
        assert named
        assert all(lines[n - 1].strip() for n in named)
    else:
        assert len(prompts) == sum(1 for text in lines if text.strip())
        assert all(prompt.text.strip() and prompt.text.encode() for prompt in prompts)


def test_installed_package_has_no_prompts_and_says_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(prompts_module, "SHIPPED", tmp_path / "none")
    with pytest.raises(UserError, match=r"'all' are in a clone of the repository.*a file of yours"):
        load("all")


def test_notebook_without_prompts_needs_none_in_an_installed_package(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(prompts_module, "SHIPPED", tmp_path / "none")
    params = {"target": "target-10m", "drafter": "ngram", "gamma": 2}
    assert problems_of(params, None, Known()) == []
    [problem] = problems_of(params | {"prompts": "all"}, None, Known())
    assert "are in a clone of the repository" in problem.what
