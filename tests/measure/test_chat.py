"""A chat template gives each turn the text that the model was trained on, answers included."""

import pytest
from conftest import tiny_llama, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

import specexp
from specexp.errors import UserError
from specexp.measure import parameters
from specexp.measure.prompts import Prompt, in_chat, longest

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
