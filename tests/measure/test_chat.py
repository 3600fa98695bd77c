"""A chat template gives each turn the text that the model was trained on, answers included."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from conftest import tiny_llama, tiny_tokenizer
from support.problems import problems
from tokenizers.processors import TemplateProcessing

import specexp
from specexp.commands import app
from specexp.errors import UserError
from specexp.measure import one_pairing, statistics, summaries
from specexp.measure.prompts import Prompt, in_chat, longest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
TWO = Prompt("q", "math", ("1+1?", "2+2?"), system="Brief")


@pytest.fixture(scope="module", params=["bos added", "bos of the template", "bos for texts"])
def pairing(request):
    tokenizer = tiny_tokenizer("user: 1+1? assistant: 2\n" * 9)
    if request.param != "bos of the template":
        bos = (tokenizer.bos_token, tokenizer.bos_token_id)
        single = f"{bos[0]} $A"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[bos]
        )
    tokenizer.chat_template = TEMPLATE
    if request.param == "bos for texts":
        tokenizer.chat_template = TEMPLATE.removeprefix("{{ bos_token }}")
    return specexp.load(tiny_llama(0, vocab=len(tokenizer)), "ngram", 2, tokenizer=tokenizer)


def test_turn_has_the_tokens_of_the_template(pairing):
    first, second = in_chat([TWO], pairing, 4)
    assert [(t.question_id, t.turn) for t in (first, second)] == [("q", 1), ("q", 2)]
    messages = [{"role": "system", "content": "Brief"}, {"role": "user", "content": "1+1?"}]
    [ids] = pairing.encode([first.text])
    template = pairing.tokenizer.apply_chat_template
    assert ids == template(messages, add_generation_prompt=True, return_dict=False)
    answer = pairing.decode(pairing.engine.plain().generate([ids], 4).tokens[0])
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "2+2?"}]
    expected = template(messages, add_generation_prompt=True, return_dict=False)
    assert pairing.encode([second.text]) == [expected]


def test_recorded_answer_stands_before_the_next_turn(pairing):
    recorded = Prompt(1, "math", TWO.turns, ("two",))
    _, second = in_chat([recorded], pairing, 4)
    assert second.text.endswith("user: 1+1?\nassistant: two\nuser: 2+2?\nassistant:")
    assert longest(recorded, pairing.tokenizer) == (second.text, 0)
    assert longest(TWO, pairing.tokenizer)[1] == 1


def test_turns_of_a_conversation_are_one_unit_of_an_interval(pairing):
    single, double = (
        [Prompt(i, "math", tuple(f"{i}+{j}?" for j in range(turns))) for i in range(3)]
        for turns in (1, 2)
    )
    texts = in_chat(double, pairing, 4)
    assert str(texts) == "6 prompts, turns of 3 conversations"
    assert str(in_chat(single, pairing, 4)) == "3 prompts"
    samples = one_pairing.latency(pairing, texts, [2], 4, repeats=2)
    samples["plain_s"] = samples["s"] * (1 + samples.index / 100)
    measured = summaries.speedups(samples, "gamma").iloc[0]
    assert measured["doubt"] == "too few conversations: at least 14 more"
    twice = samples.groupby("question_id")[[*summaries.TIMED, "accepted", "passes", "drafted"]]
    as_one = twice.sum().reset_index().assign(gamma=2, record=samples["record"].iloc[0])
    columns = ["speedup", "low", "high"]
    assert (measured[columns] == summaries.speedups(as_one, "gamma").iloc[0][columns]).all()
    assert summaries.rate(samples) == summaries.rate(as_one)
    assert summaries.length(samples) == summaries.length(as_one)


def test_turns_are_paired_with_their_own(pairing):
    """With those of another arm or rule, not each with each of the conversation."""
    texts = in_chat([TWO, Prompt("r", "math", ("3?",))], pairing, 4)
    arms = {"a": pairing, "b": pairing.with_(gamma=1)}
    timed = one_pairing.latency_by_arm(arms, texts, 4)
    total = timed.groupby("arm")[["s", "tokens"]].sum()
    pace = total["s"] / total["tokens"]
    [lead] = summaries.lead_over_others(timed).to_dict("records")
    assert lead["times"] == pytest.approx(pace.max() / pace.min())
    rules = [pairing.with_(rule=rule, temperature=1.0) for rule in ("match", "typical")]
    samples = one_pairing.acceptance(rules, texts, 4)
    match, typical = (rule.engine.rule.name for rule in rules)
    lengths = {rule: summaries.length(part).value for rule, part in samples.groupby("rule")}
    [gain] = summaries.gains(samples, match).to_dict("records")
    assert gain["gain"] == pytest.approx(lengths[typical] - lengths[match])
    bias = pd.Series([0.1, 0.3, 0.2], index=[text.question_id for text in texts])
    table = summaries.length_and_bias(samples, {match: bias, typical: bias})
    columns = ["bias", "bias_low", "bias_high"]
    assert table[columns].iloc[0].tolist() == [*statistics.ratio([0.4, 0.2], [2, 1])[:3]]


def test_only_marked_prompts_are_chats_without_the_option(pairing):
    one, other = Prompt(1, "a", ("x",)), Prompt(2, "a", ("x",), chat=True)
    texts = in_chat([one, other], pairing, 4, chat=False)
    assert texts[0] == one
    assert texts[1].text.endswith("user: x\nassistant:")


def test_tokenizer_without_chat_template_is_refused(tiny_folders):
    params = {"target": tiny_folders[0], "drafter": "ngram", "max_new_tokens": 4, "chat": True}
    [problem] = problems(params, [Prompt(1, "a", ("x",))])
    assert problem == "the target's tokenizer has no chat template; leave chat out"


def test_template_that_refuses_a_conversation_is_one_line(pairing):
    template = pairing.tokenizer.chat_template
    pairing.tokenizer.chat_template = "{{ raise_exception('no system\nmessage') }}"
    try:
        with pytest.raises(UserError, match=r"chat template fails: no system$"):
            in_chat([TWO], pairing, 4)
    finally:
        pairing.tokenizer.chat_template = template


@pytest.fixture
def templated(pairing):
    """The text of a chat by another template."""
    kept = pairing.tokenizer.chat_template

    def text(template):
        pairing.tokenizer.chat_template = template
        return in_chat([Prompt(1, "a", (" x y \n",))], pairing, 4)[0].text

    yield text
    pairing.tokenizer.chat_template = kept


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
        "hi",
        "{{ messages[0].content[:2] }}",
    ],
)
def test_template_that_leaves_out_what_the_user_says_is_refused(templated, template):
    with pytest.raises(UserError, match="chat template leaves out what the user says, 'x y': "):
        templated("{{ bos_token }}user:" + template)


def test_a_chat_is_the_same_on_every_day(templated):
    today = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    text = templated(
        "{{ bos_token }}\n  {% if true %}" + today + " {{ messages[0].content | trim }}{% endif %}"
    )
    assert text.endswith("\n26 Jul 2024 x y")


def test_command_continues_a_prompt_in_the_chat_of_the_target(tiny_folders, tmp_path, capsys):
    folder = shutil.copytree(tiny_folders[0], tmp_path / "target")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = ["generate", "--target", str(folder), "--drafter", "ngram", "--prompt", "x", "--json"]
    prompts = []
    for chat in ([], ["--chat"]):
        with pytest.raises(SystemExit) as stopped:
            app.app([*options, "--max-new-tokens", "4", *chat])
        assert not stopped.value.code
        prompts.append(json.loads(capsys.readouterr().out)["prompt"])
    assert prompts[0] == "x"
    assert prompts[1].endswith("user: x\nassistant:")


def test_every_notebook_that_has_the_parameter_uses_it():
    uses = re.compile(r"texts = measure.prompts.in_chat\(texts, pair(ing)?, max_new_tokens, chat\)")
    sources = {path.stem: path.read_text() for path in NOTEBOOKS.glob("*.ipynb")}
    chats = {name for name, source in sources.items() if "chat: bool = False" in source}
    assert chats == {name for name, source in sources.items() if uses.search(source)}
    assert len(chats) >= 7
