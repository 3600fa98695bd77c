"""A chat template gives each turn the text that the model was trained on, answers included."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import tiny_llama, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

import specexp
from specexp.commands import app
from specexp.errors import UserError
from specexp.measure import parameters
from specexp.measure.prompts import Prompt, in_chat, longest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
TWO = Prompt("q", "math", ("1+1?", "2+2?"), system="Brief")


@pytest.fixture(scope="module", params=["bos added", "bos of the template"])
def pairing(request):
    tokenizer = tiny_tokenizer("user: 1+1? assistant: 2\n" * 9)
    if request.param == "bos added":
        bos = (tokenizer.bos_token, tokenizer.bos_token_id)
        single = f"{bos[0]} $A"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[bos]
        )
    tokenizer.chat_template = TEMPLATE
    return specexp.load(tiny_llama(0, vocab=len(tokenizer)), "ngram", 2, tokenizer=tokenizer)


def test_turn_has_the_tokens_of_the_template(pairing):
    first, second = in_chat([TWO], pairing, 4)
    assert (first.question_id, second.question_id) == ("q.1", "q.2")
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


def test_only_marked_prompts_are_chats_without_the_option(pairing):
    one, other = Prompt(1, "a", ("x",)), Prompt(2, "a", ("x",), chat=True)
    texts = in_chat([one, other], pairing, 4, chat=False)
    assert texts[0] == one
    assert texts[1].text.endswith("user: x\nassistant:")


def test_tokenizer_without_chat_template_is_refused(tiny_folders):
    params = {"target": tiny_folders[0], "drafter": "ngram", "max_new_tokens": 4, "chat": True}
    [problem] = parameters.check(params, [Prompt(1, "a", ("x",))])
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
    uses = "texts = measure.prompts.in_chat(texts, pairing, max_new_tokens, chat)"
    sources = {path.stem: path.read_text() for path in NOTEBOOKS.glob("*.ipynb")}
    chats = {name for name, source in sources.items() if "chat: bool = False" in source}
    assert chats == {name for name, source in sources.items() if uses in source}
    assert len(chats) >= 7
