"""Measurements add up, arms take turns, and figures say what the numbers say."""

import gc
import shutil
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.questions import PROMPTS

from specexp import api
from specexp.drafters import Drafter
from specexp.errors import UserError
from specexp.measure import interleave, one_pairing, statistics, summaries
from specexp.measure.exactness import certify, remembers
from specexp.measure.prompts import Prompt
from specexp.trace import Acceptance
from specexp.tracking import mlflow_view
from specexp.tree import Tree


def test_acceptance_counts_agree_in_every_row(pairing, acceptance):
    assert len(acceptance) == 2 * len(PROMPTS)
    assert set(acceptance["pairing"]) == {pairing.drafter, "ngram"}
    for _, row in acceptance.iterrows():
        assert row["record"].accepted == row["accepted"]
        assert row["emitted"] == row["accepted"] + row["passes"] - row["cut"]
        assert sum(r[-1] for r in row["rounds"]) == row["emitted"]


def test_arms_have_the_shortest_names_that_tell_them_apart(pairing, tiny_folders, tmp_path):
    draft = tiny_folders[1]
    other = shutil.copytree(draft, tmp_path / "other" / "draft")
    own = Path(draft).parent.name
    assert pairing.drafter == "draft"
    arms = one_pairing.arms(pairing, ["ngram", f"model:{other}", draft])
    assert list(arms) == [f"{own}/draft", "ngram", "other/draft"]
    assert [arm.named for arm in arms.values()] == [draft, "ngram", str(other)]
    warm = [arm.with_(temperature=1.0) for arm in arms.values()]
    samples = one_pairing.acceptance(warm, PROMPTS[:1], 2)
    assert list(samples["pairing"]) == list(arms)


def test_metrics_are_pooled_not_averaged(acceptance):
    own = acceptance[acceptance["pairing"] != "ngram"]
    metrics, series = summaries.acceptance_metrics(own)
    assert metrics["acceptance/rate"] == own["accepted"].sum() / own["drafted"].sum()
    assert metrics["counts/rounds"] == own["passes"].sum()
    code = own[own["category"] == "code"]
    assert metrics["category/code"] == code["accepted"].sum() / code["drafted"].sum()
    ends = [metrics[f"category_ci/code_{end}"] for end in ("low", "high")]
    assert 0 <= ends[0] < metrics["category/code"] < ends[1] <= 1
    assert metrics["acceptance/length"] == pytest.approx(1 + sum(series["acceptance/at_position"]))


def test_any_category_has_a_metric_of_its_own_that_mlflow_takes():
    kinds = ["my prompts", "C++", "C#", "C_", "数学", "物理", "..", "a\nb", "x" * 300]
    half = Acceptance(drafted=2, emitted=2, cut=0, histogram=(0, 1))
    samples = pd.DataFrame(
        {"category": kind, "question_id": kind, "record": half, "accepted": 1, "drafted": 2,
         "passes": 1, "gamma": 2} for kind in kinds
    )  # fmt: skip
    metrics, _ = summaries.acceptance_metrics(samples)
    assert not mlflow_view.problems_of({"metrics": metrics, "series": {}})
    assert [name for name in metrics if name.startswith("category/")] == [
        "category/..1", "category/C_1", "category/C_2", "category/C_", "category/a_b",
        "category/my_prompts", f"category/{'x' * 200}", "category/_1", "category/_2",
    ]  # fmt: skip
    assert len([name for name in metrics if name.startswith("category_ci/")]) == 2 * len(kinds)


def test_no_rate_is_logged_where_nothing_was_drafted(acceptance):
    counts = ["accepted", "drafted"]
    silent = acceptance[acceptance["category"] == "messy"].assign(**dict.fromkeys(counts, 0))
    rest = acceptance[acceptance["category"] == "code"]
    names = summaries.acceptance_metrics(pd.concat([rest, silent]))[0]
    assert [n for n in names if "category" in n] == [
        "category/code", "category_ci/code_low", "category_ci/code_high"
    ]  # fmt: skip
    assert not [n for n in summaries.acceptance_metrics(silent)[0] if n.startswith("acceptance/r")]


def test_positions_that_a_prompt_never_reached_count_as_none_accepted():
    deep, none = Acceptance(4, 4, 0, (1, 0, 1)), Acceptance(8, 4, 0, (4,))
    samples = pd.DataFrame({"question_id": [1, 2], "gamma": [2, 2], "record": [deep, none]})
    assert summaries.positions(samples)["value"].tolist() == pytest.approx([1 / 6, 1 / 6])
    assert summaries.positions(samples, given=True)["value"].tolist() == pytest.approx([1 / 6, 1])


def test_interval_of_a_position_expects_no_more_rounds_than_tokens_allow():
    """A round that reaches position i emits i tokens or more, so an unseen prompt, of as many
    tokens, has at most a share 1/i of them as rounds."""
    rounds = [(3, 4, 5), (2, 9, 1), (6, 1, 3), (1, 8, 9)]  # by the number of tokens accepted
    records = [Acceptance(0, 0, 0, counts) for counts in rounds]
    samples = pd.DataFrame({"question_id": range(4), "gamma": 2, "record": records})
    none, one, two = np.array(rounds).T
    tokens = none + 2 * one + 3 * two
    for given, whole, least in ((False, none + one + two, 1), (True, one + two, 2)):
        right = statistics.share(two, whole, tokens / least)
        assert right != statistics.share(two, whole, tokens / (3 - least))
        columns = ["value", "low", "high"]
        assert summaries.positions(samples, given)[columns].loc[1].tolist() == [*right[:3]]


def test_no_acceptance_length_is_above_what_gamma_allows():
    samples = {"question_id": [1, 2], "accepted": [9, 6], "passes": [3, 3], "gamma": 3}
    value, low, high, _ = summaries.length(pd.DataFrame(samples))
    assert 1 <= low < value < high == 4


def test_where_nothing_was_accepted_the_next_round_may_accept():
    samples = pd.DataFrame({"question_id": range(20), "accepted": 0, "passes": 2, "gamma": 3})
    value, low, high, _ = summaries.length(samples)
    assert value == low == 1
    assert high - 1 == pytest.approx(statistics.share([0] * 20, [2] * 20).high)
    assert high > 1.05


@pytest.mark.parametrize("deep", [{"tree": "2x1x1x1"}, {"policy": "always:4"}], ids=str)
def test_acceptance_by_position_is_of_the_draft_that_was_made(tiny_folders, deep):
    """Not of the draft length that the pairing's chains would have."""
    target, _ = tiny_folders
    deeper = api.load(target, target, gamma=2, **deep)
    samples = one_pairing.acceptance([deeper], PROMPTS, 14)
    assert set(samples["gamma"]) == {4}
    record = summaries.pooled(samples)
    assert len(record.marginal) == 4
    assert summaries.positions(samples)["value"].tolist() == pytest.approx(record.marginal)
    value, _, high, _ = summaries.length(samples)
    assert (value, high) == (pytest.approx(record.length), 5)


def test_latency_pairs_each_gamma_with_plain_decoding(latency):
    assert len(latency) == 2 * 2 * len(PROMPTS)
    assert (latency["tokens"] == latency["plain_tokens"]).all()
    assert (latency[["s", "plain_s", "ttft_s"]] > 0).all().all()
    by_gamma = summaries.speedups(latency, "gamma").set_index("gamma")
    part = latency[latency["gamma"] == 3]
    plain = part["plain_s"].sum() / part["plain_tokens"].sum()
    fast = part["s"].sum() / part["tokens"].sum()
    assert by_gamma.loc[3, "speedup"] == pytest.approx(plain / fast)
    assert by_gamma.loc[3, "low"] <= by_gamma.loc[3, "speedup"] <= by_gamma.loc[3, "high"]


class Remembers(Drafter):
    """Drafts what followed the same two tokens in any request that it has seen."""

    on_host = True

    def __init__(self):
        self.seen = {}

    def propose(self, seqs, tree, rng):
        lines = []
        for tokens, length in zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True):
            self.seen.update({tuple(tokens[i - 2 : i]): tokens[i] for i in range(2, length)})
            line = tokens[max(0, length - 2) : length]
            for _ in range(len(tree) - 1):
                line.append(self.seen.get(tuple(line[-2:]), 0))
            lines.append(line[len(line) - len(tree) + 1 :])
        return seqs.draft(tree.nodes("cpu"), torch.tensor(lines, dtype=torch.int64))


def test_repeats_of_a_drafter_that_remembers_are_not_pooled(pairing, caplog):
    arms = {"remembers": pairing.with_(drafter=Remembers()), "model": pairing}
    samples = one_pairing.latency_by_arm(arms, PROMPTS, 10, repeats=3)
    assert samples.groupby("arm")["repeat"].nunique().to_dict() == {"remembers": 1, "model": 3}
    [line] = [r.message for r in caplog.records if "remembers" in r.message]
    assert "tokens per pass on new text" in line


@pytest.mark.parametrize("repeats", [1, 3])
def test_drafter_that_has_seen_all_before_it_is_timed_is_told(pairing, caplog, repeats):
    """As in 20_latency: the check and the costs show it every prompt before the first repeat."""
    own = pairing.with_(drafter=Remembers())
    exact = certify(own.engine, own.encode([p.text for p in PROMPTS]), 10)
    assert exact.bugs == 0
    assert "tokens per pass on new text" in exact.remembers
    assert "its drafter REMEMBERS text" in str(exact)
    assert exact.metrics["exact/remembers"] == 1
    one_pairing.pass_costs(own, PROMPTS, [1, 3], repeats=3)
    samples = one_pairing.latency(own, PROMPTS, [1, 3], 10, repeats)
    assert set(samples["repeat"]) == {0}
    lines = [r.message for r in caplog.records if "its drafter remembers text" in r.message]
    assert len(lines) == 2
    assert all("tokens per pass on new text" in line for line in lines)
    throughput = one_pairing.throughput(own, PROMPTS, [1], 6, repeats=3)
    assert set(throughput["repeat"]) == {0}


class Answers(Drafter):
    """Keeps the first answer to each prompt, as a cache of responses does: of another text that
    begins so it knows nothing."""

    on_host = True

    def __init__(self):
        self.first, self.last = {}, {}

    def propose(self, seqs, tree, rng):
        lines, most = [], len(tree) - 1
        for tokens, length in zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True):
            text, prompt = tokens[:length], tuple(tokens[:3])
            if len(last := self.last.get(prompt, [])) >= length:  # it begins anew
                self.keep(prompt, last)
            self.last[prompt] = text
            lines.append((self.first.get(prompt, [])[length:] + [0] * most)[:most])
        return seqs.draft(tree.nodes("cpu"), torch.tensor(lines, dtype=torch.int64))

    def keep(self, prompt, answer):
        self.first.setdefault(prompt, answer)


class Confirmed(Answers):
    """Keeps an answer that was given twice."""

    def __init__(self):
        super().__init__()
        self.given = {}

    def keep(self, prompt, answer):
        if self.given.get(prompt) == answer:
            super().keep(prompt, answer)
        self.given[prompt] = answer


@pytest.mark.parametrize("kind", [Answers, Confirmed])
def test_drafter_that_keeps_answers_by_prompt_is_told(pairing, kind):
    own = pairing.with_(drafter=kind())
    prompts = own.encode([p.text for p in PROMPTS])
    for _ in range(2):  # what it holds of these prompts helps with no other text
        assert "tokens per pass on new text" in certify(own.engine, prompts, 10).remembers


class Shares(Remembers):
    """What one of them has seen, all remember."""

    seen: dict[tuple[int, ...], int] = {}  # noqa: RUF012

    def __init__(self):
        pass


def test_arms_that_share_a_memory_are_told(pairing, caplog):
    arms = {"a": pairing.with_(drafter=Shares()), "b": pairing.with_(drafter=Shares)}
    for arm in arms.values():
        certify(arm.engine, arm.encode([p.text for p in PROMPTS]), 10)
    one_pairing.latency_by_arm(arms, PROMPTS, 10)
    for arm in arms:
        assert [r.message for r in caplog.records if f"arm {arm}: its drafter rem" in r.message]


@pytest.mark.parametrize("drafter", ["model", "ngram", "suffix", "recycle", "early_exit:1"])
def test_shipped_drafters_remember_nothing(pairing, drafter):
    name = pairing.options["drafter"] if drafter == "model" else drafter
    for temperature in (0.0, 0.9):
        own = pairing.with_(drafter=name, temperature=temperature)
        assert remembers(own.engine, own.encode([p.text for p in PROMPTS]), 10) == ""


def test_costs_below_a_plain_pass_are_timed_again(pairing, monkeypatch):
    visits, real = [], one_pairing._time_rounds

    def rounds(engine, tree, text, size):
        whole, apart = real(engine, tree, text, size)
        visits.append(tree.depth)
        short = 0.01 if tree.depth and len(visits) <= 4 else 1.0
        return [(n, 3.0) for n, _ in whole], [(n, 1.0, short) for n, *_ in apart]

    monkeypatch.setattr(one_pairing, "_time_rounds", rounds)
    costs = one_pairing.pass_costs(pairing, PROMPTS, [2], repeats=5)
    assert len(visits) == 8
    assert list(costs["verify_s"]) == [1.0, 1.0]


def test_speedup_above_the_acceptance_length_is_marked(latency):
    """Nothing that its tokens explain makes a stream ten times as fast: the machine did."""
    busy = latency.assign(plain_s=10 * latency["s"])
    measured = summaries.speedups(busy, "gamma")
    assert set(measured["doubt"]) == {statistics.NOT_CREDIBLE}
    assert summaries.verdict(measured.iloc[0]).endswith("]: not credible: was the machine busy?")
    predictions = pd.DataFrame({"gamma": measured["gamma"], "speedup": measured["speedup"]})
    assert summaries.latency_metrics(busy, predictions)[0]["speedup/credible"] == 0
    calm = latency.assign(plain_s=latency["s"])
    right, wrong = predictions.assign(speedup=1.0), predictions.assign(speedup=4.0)
    assert summaries.latency_metrics(calm, right)[0]["speedup/credible"] == 1
    assert summaries.latency_metrics(calm, wrong)[0]["speedup/credible"] == 0


def test_repeats_do_not_narrow_intervals(latency, throughput):
    part, names = latency[latency["gamma"] == 3], ["acceptance/rate_ci_low", "acceptance/rate"]
    often = summaries.acceptance_metrics(pd.concat([part] * 20))[0]
    assert [often[n] for n in names] == [summaries.acceptance_metrics(part)[0][n] for n in names]
    of_speed = summaries.speedups(pd.concat([part] * 20), "gamma")
    columns = ["speedup", "low", "high"]
    pd.testing.assert_frame_equal(of_speed[columns], summaries.speedups(part, "gamma")[columns])
    many = pd.concat([throughput[throughput["batch"] == 1]] * 20)
    assert many["number"].nunique() == 3
    of_batches = summaries.speedups(many, "batch")[columns]
    pd.testing.assert_frame_equal(
        of_batches, summaries.speedups(many[: len(many) // 20], "batch")[columns]
    )
    metrics = summaries.throughput_metrics(throughput)[0]
    once = throughput[(throughput["batch"] == 1) & (throughput["repeat"] == 0)]
    assert metrics["acceptance/rate_ci_low"] == summaries.acceptance_metrics(once)[0][names[0]]
    assert metrics["counts/drafted"] == once["drafted"].sum()


def test_repeats_of_texts_of_which_nothing_was_accepted_prove_no_more():
    none = Acceptance(drafted=10, emitted=10, cut=0, histogram=(10,))
    once = pd.DataFrame({"question_id": range(40), "accepted": 0, "drafted": 10, "passes": 10,
                         "gamma": 1, "record": none, "repeat": 0})  # fmt: skip
    thrice = pd.concat(once.assign(repeat=repeat) for repeat in range(3))
    assert summaries.acceptance_metrics(thrice) == summaries.acceptance_metrics(once)
    assert summaries.rate(thrice).high == summaries.rate(once).high > 0.005


def test_throughput_times_full_batches_only(pairing, throughput):
    assert set(throughput["batch"]) == {1, 4}
    trace = pairing.generate([p.text for p in PROMPTS], 10).trace
    full = [r for r in trace.rounds if len(r.steps) == 3]
    assert 0 < len(full) < len(trace.rounds)
    each = (full[-1].end_s - trace.prefill_s) / (3 * len(full))
    assert one_pairing.row_round_s(trace) == pytest.approx(each)
    metrics, series = summaries.throughput_metrics(throughput)
    assert set(series["speedup/at_batch"]) == {1, 4}
    assert metrics["speedup/at_largest_batch"] == series["speedup/at_batch"][4]


def test_a_prompt_has_as_many_tokens_per_pass_in_a_batch_as_alone(throughput):
    """Not only until the first of the batch is done, which would leave out the slow ones' ends."""
    each = throughput.groupby(["batch", "question_id"])[["tokens", "passes", "emitted"]].sum()
    assert (each["tokens"] == each["emitted"]).all()
    pace = each["tokens"] / each["passes"]
    assert pace[1].min() < pace[1].max()
    pd.testing.assert_series_equal(pace[1], pace[4])
    four = throughput[throughput["batch"] == 4]
    shares = (four["s"] / four["passes"]).groupby(four["repeat"])  # of a round's time: equal
    assert shares.max().tolist() == pytest.approx(shares.min().tolist())


def test_every_batch_size_sees_the_same_prompts(pairing, monkeypatch):
    texts = [f"{kind} {i} {'and on ' * i}" for kind in ("code", "prose") for i in range(3)]
    prompts = [Prompt(i, text.split()[0], (text,)) for i, text in enumerate(texts)]
    ids = pairing.encode(texts)
    batches, real = [], interleave.time_in_turns
    monkeypatch.setattr(
        interleave, "time_in_turns", lambda *a, **more: batches.extend(a[1]) or real(*a, **more)
    )
    samples = one_pairing.throughput(pairing, prompts, [1, 2, 4], 6, repeats=2)
    by_size = {b: [ids.index(row) for s in batches for row in s if len(s) == b] for b in (1, 2, 4)}
    once = [0, 1, 2, 3, 4, 5]
    assert by_size == {1: once * 2, 2: once * 2, 4: [*once, 0, 1] * 3}
    assert list(samples["question_id"]) == once * (2 + 2 + 3), "what fills a batch does not count"
    assert list(samples["batch"]) == [1] * 12 + [2] * 12 + [4] * 18
    longest = max(map(len, ids[:4])), max(len(ids[i]) for i in (4, 5, 0, 1))
    assert list(samples["context"][-6:]) == [longest[0] + 6] * 4 + [longest[1] + 6] * 2
    assert not samples.duplicated(["batch", "question_id", "repeat"]).any()


def test_two_prompts_prove_nothing_at_any_batch_size(pairing):
    samples = one_pairing.throughput(pairing, PROMPTS[:2], [1, 4], 6, repeats=9)
    noise = 1 + samples["repeat"] / 100
    fast = samples.assign(plain_s=1.05 * noise * samples["plain_tokens"], s=samples["tokens"])
    for _, row in summaries.speedups(fast, "batch").iterrows():
        assert row["low"] < 1 < row["speedup"]
        assert summaries.verdict(row).endswith("too few prompts: at least 15 more")
    _, series = summaries.throughput_metrics(fast)
    assert max(series["speedup/at_batch_low"].values()) < 1


def test_batch_of_more_than_all_prompts_is_repeated(pairing):
    samples = one_pairing.throughput(pairing, PROMPTS, [1, 4], 6, repeats=1)
    assert list(samples["batch"]) == [1] * 2 * len(PROMPTS) + [4] * 5 * len(PROMPTS)
    assert (samples["emitted"] == 6).all()


def test_throughput_ignores_eos(pairing):
    assert pairing.engine.eos
    samples = one_pairing.throughput(pairing, PROMPTS, [2], 6, repeats=1)
    assert (samples["emitted"] == 6).all()
    assert pairing.engine.eos


def test_text_behind_eos_does_not_count_in_a_batch(pairing, monkeypatch):
    """Rows that end early weigh as much, and accept as often, as in single streams."""
    outputs = pairing.engine.generate(pairing.encode([p.text for p in PROMPTS]), 12).tokens
    monkeypatch.setattr(pairing.engine, "eos", (outputs[0][2], outputs[1][5]))
    alone = one_pairing.latency_by_arm({"own": pairing}, PROMPTS, 12)
    columns = ["tokens", "plain_tokens", "passes", "drafted", "accepted", "emitted", "cut"]
    assert alone["tokens"].min() < alone["tokens"].max()
    for batch, part in one_pairing.throughput(pairing, PROMPTS, [1, 4], 12).groupby("batch"):
        each = part[part["repeat"] == 0][columns]
        assert each.to_numpy().tolist() == alone[columns].to_numpy().tolist(), batch


def test_costs_start_from_the_plain_step(pairing):
    costs = one_pairing.pass_costs(pairing, PROMPTS, [1, 3], repeats=3)
    assert list(costs["gamma"]) == [0, 1, 3]
    assert (costs["verify_s"] > 0).all()


def test_prediction_is_from_the_acceptance_of_each_draft_length_itself():
    """As where a lookup drafts long copies alone: at another length, other tokens are accepted. No
    token counts that the end cut off."""
    costs = pd.DataFrame({"gamma": [0, 2, 4], "draft_s": [0, 0.5, 1], "verify_s": [0.9, 1.1, 1.7],
                          "rest_s": [0.1, 0.2, 0.3]})  # fmt: skip
    short, long = Acceptance(8, 8, 0, (1, 2, 1)), Acceptance(12, 14, 2, (0, 0, 0, 4))
    samples = pd.DataFrame({"gamma": [2, 4], "record": [short, long]})
    predicted = summaries.predicted(samples, "gamma", costs).set_index("gamma")
    assert predicted["tokens"].to_dict() == {2: 2, 4: 3.5}
    assert predicted["speedup"].to_dict() == pytest.approx({2: 2 * 1.0 / 1.8, 4: 3.5 * 1.0 / 3})
    assert predicted["verify"].to_dict() == pytest.approx({2: 1.3, 4: 2.0})


def test_arm_metrics_are_in_plain_steps(latency):
    costs = {"arm": ["x"], "draft_s": 2.0, "verify_s": 5.0, "rest_s": 1.0, "step_s": 4.0,
             "weights_mb": 0.0, "kv_bytes": 0}  # fmt: skip
    metrics, _ = summaries.arm_metrics(latency.assign(arm="x"), pd.DataFrame(costs))
    names = ("cost/draft_steps", "cost/verify_steps", "cost/rest_steps")
    assert [metrics[name] for name in names] == [0.5, 1.25, 0.25]


def test_rounds_of_a_text_that_the_drafter_does_not_read_draft_nothing(pairing):
    """As in the engine: neither a cost nor a bias is of drafts that never run."""
    own = pairing.apart().with_(temperature=1.0, rule="typical")
    engine, texts = own.engine, [p.text for p in PROMPTS]
    short, *_, long = ids = sorted(own.encode(texts), key=len)
    engine.drafter.context = len(short) + 5
    assert len(long) > len(short) + 5
    for row in ids:
        steps = [step for *_, step in one_pairing.in_stages(engine, row, 12, engine.eos)]
        assert steps == engine.generate([row], 12).trace.steps()
    drafted = {n for row in (short, long) for n, _ in
               one_pairing._time_rounds(engine, Tree.chain(3), 90, row)[0]}  # fmt: skip
    assert drafted >= {0, 3}
    timed = one_pairing._time_rounds(engine, Tree.chain(3), 90, long)
    assert {n for n, *_ in (*timed[0], *timed[1])} == {0}
    unread, read = (Prompt(i, "code", (texts[i],)) for i in (1, 0))
    assert one_pairing.bias(own, [unread], 4).tolist() == [0]
    assert one_pairing.bias(own, [read], 4).iloc[0] > 0


def test_typical_round_weighs_draft_sizes_by_frequency():
    """Two rounds in three find nothing; one of those was disturbed."""
    seconds = one_pairing._typical([(0, 1.0, 2.0)] * 5 + [(3, 1.0, 5.0)] * 3 + [(0, 9.0, 90.0)])
    assert seconds == pytest.approx((1.0, 3.0))


@pytest.mark.parametrize("nothing", [{"gamma": 0}, {"drafter": "plain"}])
def test_acceptance_refuses_a_pairing_that_drafts_nothing(pairing, nothing):
    with pytest.raises(UserError, match="gamma is 0 or the drafter plain"):
        one_pairing.acceptance([pairing.with_(**nothing)], PROMPTS, 8)


def test_rounds_table_has_a_row_per_round(latency):
    rounds = summaries.rounds(latency)
    assert len(rounds) == latency["passes"].sum()
    assert rounds["emitted"].sum() == latency["emitted"].sum()
    assert {"question_id", "gamma", "repeat", "end_s", "drafted", "accepted"} <= set(rounds)


def test_numbers_and_names_of_prompts_stand_in_one_table(latency, tmp_path):
    ids = latency["question_id"]
    mixed = latency.assign(question_id=ids.astype(object).where(ids > 1, "first"))
    summaries.rounds(mixed).to_parquet(tmp_path / "rounds.parquet")
    read = pd.read_parquet(tmp_path / "rounds.parquet")
    assert {*read["question_id"]} == {"first", *map(str, {*ids} - {1})}


def test_garbage_collector_frees_models_not_libraries(tiny_folders, tmp_path):
    """The garbage collector would take a fifth of a second for them, in the middle of a round."""
    target = str(shutil.copytree(tiny_folders[0], tmp_path / "target"))  # nobody else holds it
    pairing = api.load(target=target, drafter=tiny_folders[1], gamma=2)
    settled = gc.get_freeze_count()
    assert settled > 10_000
    loaded = weakref.ref(pairing.target.module)
    del pairing
    gc.collect()
    assert loaded() is None
    api.load(target=target, drafter=tiny_folders[1], gamma=2)
    assert gc.get_freeze_count() <= settled
