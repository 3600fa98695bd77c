"""The metrics record: its identities hold for every history, and it counts what happened."""

import pytest
import torch
from conftest import tiny_llama
from hypothesis import given
from hypothesis import strategies as st

from specexp.drafters.model import DraftModel
from specexp.engine import Engine
from specexp.models.load import of_module
from specexp.policy import Fixed
from specexp.sampling import Sampling
from specexp.trace import Acceptance, Round, Step, Trace
from specexp.tree import Tree


@st.composite
def steps(draw, rows: int = 3) -> list[Step]:
    made = []
    for _ in range(draw(st.integers(0, 30))):
        drafted = draw(st.integers(0, 6))
        accepted = draw(st.integers(0, drafted))
        emitted = draw(st.integers(0, accepted + 1))
        made.append(Step(draw(st.integers(0, rows - 1)), drafted, accepted, emitted))
    return made


@given(steps())
def test_acceptance_identities_hold_for_any_history(history):
    record = Acceptance.of(history)
    record.check()
    assert record.drafted == sum(s.drafted for s in history)
    assert record.accepted == sum(s.accepted for s in history)
    assert record.emitted == sum(s.accepted + 1 for s in history) - record.cut
    assert record.passes == len(history)
    for i, marginal in enumerate(record.marginal, 1):
        assert marginal == sum(s.accepted >= i for s in history) / len(history)
    product = 1.0
    for marginal, conditional in zip(record.marginal, record.conditional, strict=True):
        product *= conditional
        assert product == pytest.approx(marginal)


@given(steps())
def test_acceptance_of_rows_adds_up_to_the_whole(history):
    trace = Trace(3, rounds=[Round(1.0, 6, tuple(history))])
    assert Acceptance.pooled(trace.by_row) == trace.acceptance


def test_no_draft_has_rate_zero_and_length_one():
    record = Acceptance.of([Step(0, 0, 0, 1)] * 3)
    record.check()
    assert (record.rate, record.length, record.marginal) == (0.0, 1.0, ())


@pytest.mark.parametrize(
    "record",
    [
        Acceptance(drafted=4, emitted=9, cut=0, histogram=(1, 1)),
        Acceptance(drafted=0, emitted=3, cut=0, histogram=(1, 1)),
        Acceptance(drafted=4, emitted=3, cut=1, histogram=(1, 1)),
    ],
)
def test_check_rejects_counts_that_do_not_add_up(record):
    with pytest.raises(AssertionError):
        record.check()


def test_engine_counts_match_a_recount_of_its_tokens():
    """Recounted from texts alone: a draft token is kept if the greedy text continues with it."""
    target = of_module(tiny_llama(0).double(), "target")
    law = Sampling()
    drafter = DraftModel(of_module(tiny_llama(0, layers=1).double(), "draft"), law)
    engine = Engine(target, drafter, Fixed(Tree.chain(3)), law)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    made = engine.generate(prompts, 21)
    plain = engine.plain().generate(prompts, 21 + 4).tokens
    for row in range(3):
        at = 0
        for step in made.trace.steps(row):
            ahead = plain[row][at : at + 3]
            kept = next((i for i, (g, t) in enumerate(zip(step.draft, ahead)) if g != t), 3)  # noqa: B905
            assert step.accepted == kept
            assert step.drafted == 3
            assert step.emitted == min(kept + 1, 21 - at)
            at += step.emitted
        assert at == 21 == len(made.tokens[row])


def test_times_add_up_to_prefill_and_decoding():
    rounds = [Round(0.3, 3, (Step(0, 3, 2, 3), Step(1, 3, 0, 1))), Round(0.5, 3, (Step(0, 3, 3, 4),))]  # fmt: skip # noqa: E501
    trace = Trace(2, prefill_s=0.1, rounds=rounds)
    assert trace.ttft_s == 0.3
    assert trace.decode_s == pytest.approx(0.4)
    assert trace.emitted == 8
    assert trace.tpot_s == pytest.approx((2 * 0.2 + 0.2) / 8), "row 1 was done after a round"
    assert torch.isnan(torch.tensor(Trace(1).tpot_s))
    assert repr(trace) == f"Trace(2 rows, 2 rounds, 0.5 s: {trace.acceptance})"


@pytest.mark.parametrize(
    ("drafted", "emitted", "cut", "histogram", "words"),
    [
        (24, 21, 1, (2, 1, 2, 3),
         "21 tokens in 8 target passes: 2.62 per pass, 2.75 counting 1 token cut off at the end; "
         "acceptance rate 58%, 14 of 24 draft tokens"),
        (1, 2, 0, (0, 1),
         "2 tokens in 1 target pass: 2.00 per pass; acceptance rate 100%, 1 of 1 draft token"),
        (0, 1, 0, (1,), "1 token in 1 target pass: 1.00 per pass"),
        (0, 0, 0, (0,), "0 tokens in 0 target passes: none"),
    ],
)  # fmt: skip
def test_acceptance_in_words_agrees_with_its_numbers(drafted, emitted, cut, histogram, words):
    assert str(Acceptance(drafted, emitted, cut, histogram)) == words
