"""The command line as a user meets it: output, one-line errors, exit codes."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.command_line import ran
from transformers import AutoModelForCausalLM, AutoTokenizer

from specexp import names
from specexp.commands import app, options
from specexp.commands import generate as generating
from specexp.drafters.plain import Plain
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.measure import parameters
from specexp.measure.exactness import verdict
from specexp.terminal import Terminal
from specexp.trace import Trace
from specexp.zoo import drafts


@pytest.fixture
def run(monkeypatch, capsys):
    """run("theory", "--alpha", ".8") -> (exit code, stdout, stderr)."""
    return partial(ran, monkeypatch, capsys)


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "question.jsonl"
    lines = [{"question_id": i, "category": "mine", "turns": [f"text {i}"]} for i in range(3)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


@pytest.mark.parametrize("words", [(), ("generate",), ("grid",), ("grid", "run"), ("lab",)])
def test_h_is_help(run, words):
    code, out, _ = run(*words, "-h")
    assert code == 0
    assert out == run(*words, "--help")[1]


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("generate", "two words"), "did you mean --prompt 'two words'?"),
        (("generate", __file__), f"did you mean --prompts {__file__}?"),
        (("serve", "closed:8"), "did you mean --load closed:8?"),
        (("profile", "target-10m"), "did you mean --target target-10m?"),
        (("zoo", "train", "target-10m"), "did you mean --target target-10m?"),
        (("models", "x"), "leave it out"),
        (("store", "check", "x"), "leave it out"),
    ],
)
def test_word_without_an_option_is_refused_with_the_one_it_was_meant_for(run, words, instead):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert " takes no argument such as " in line
    assert line.endswith(f": {instead}")


def test_a_prompt_that_is_a_file_is_refused_with_the_option_for_files(run):
    code, out, err = run("generate", "--prompt", __file__)
    assert (code, out) == (2, "")
    assert err.endswith(f"is a file, not a text: did you mean --prompts {__file__}?\n")


def test_help_has_examples_and_imports_nothing_heavy():
    code = (
        "import sys; from specexp.commands.app import app; app(['--help'], standalone_mode=False); "
    )
    check = "print(sorted({'torch', 'transformers', 'mlflow', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("generate", "theory", "models", "doctor", "ui", "grid", "zoo"):
        assert command in done.stdout
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (
            "generate",
            "target drafter gamma tree temperature top_k top_p min_p sampling rule max_new_tokens "
            "dtype device seed prompts limit",
        ),
        ("serve", "target drafter prompts rows queue chunk ttft_ms tpot_ms sampling dtype"),
        (
            "bench",
            "target drafter gamma temperature sampling batches prompts max_new_tokens device",
        ),
        ("profile", "target drafter temperature batches contexts dtype device"),
    ],
)
def test_option_help_is_that_of_the_parameter(command, names, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    page = " ".join(run(command, "--help")[1].split())
    for name in names.split():
        assert parameters.help_of(name) in page, name


def test_options_stand_in_groups_and_types_are_not_pythons(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    page = run("generate", "-h")[1]
    panels = {panel.partition(" ")[0]: panel for panel in page.split("╭─ ")[1:]}
    assert {"Options", *options.PANELS} == {*panels}
    for panel, named in options.PANELS.items():
        flags = [f"--{name.replace('_', '-')}" for name in named if name != "policy"]
        assert all(flag in panels[panel] for flag in flags), panel
    for words in ((), ("generate",), ("serve",), ("ui",), ("zoo", "train"), ("grid", "run")):
        assert not re.search(r"<\w|\[1<=", run(*words, "-h")[1]), words


def test_the_first_page_groups_commands_and_shows_the_way_in(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    page = run("-h")[1]
    assert 'specexp generate --prompt "def mean(values):"' in page
    assert "specexp grid run notebooks/grids/acceptance.yaml" in page
    assert re.findall(r"╭─ ([\w ]+) ─", page) == ["Options", *app.PANELS]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("version",), "specexp has no command 'version': specexp --version"),
        (("help",), "specexp has no command 'help': specexp -h"),
        (("generat",), "specexp has no command 'generat'; did you mean 'generate'?"),
        (("zoo", "trian"), "specexp zoo has no command 'trian'; did you mean 'train'?"),
        (("grid", "list"), "specexp grid has no command 'list' (there are validate, run, status)"),
        (("generate", "--temperature", "warm"), "--temperature 'warm' is not a number"),
        (("generate", "--gamma=two"), "--gamma 'two' is not a whole number"),
        (("generate", "--promt", "a"), "No such option: --promt"),
        (("theory",), "Missing option '--alpha'"),
        (("lab", "x"), "specexp lab takes JupyterLab's options, such as --no-browser, but no x"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line(run, words, line):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {line}")
    assert len(err.splitlines()) == 1


def test_python_m_specexp_is_the_command_line_beside_any_file(tmp_path):
    (tmp_path / "random.py").touch()
    command = [sys.executable, "-m", "specexp", "theory", "--alpha", "0.5", "--gamma", "2"]
    env = os.environ | {"PYTHONPATH": str(Path(names.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert "tokens per target pass" in done.stdout, done.stderr


def test_theory_prints_the_four_figures(run):
    code, out, _ = run("theory", "--alpha", "0.75", "--gamma", "4", "--cost", "0", "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found) == {"tokens_per_pass", "speedup", "operations", "best_gamma"}
    assert found["tokens_per_pass"] == pytest.approx(3.05, abs=0.005)
    _, out, _ = run("theory", "--alpha", "0.75", "--gamma", "4")
    assert "tokens per target pass" in out
    assert "3.05" in out


def test_theory_refuses_impossible_numbers(run):
    code, _, err = run("theory", "--alpha", "1.5", "--gamma", "4")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert "alpha" in err


def test_generate_json_has_tokens_rounds_acceptance_exactness(run, tiny_folders):
    target, draft = tiny_folders
    code, out, err = run(
        "generate", "--target", target, "--drafter", f"model:{draft}", "--gamma", "3",
        "--max-new-tokens", "12", "--prompt", "def mean(values):", "--json",
    )  # fmt: skip
    assert code == 0, err
    made = json.loads(out)
    whole = "prompts prompt tokens text rounds acceptance exact followed speed"
    assert set(made) == set(whole.split())
    speed = made["speed"]
    assert speed["speedup"] == pytest.approx(speed["tokens_per_s"] / speed["plain_tokens_per_s"])
    assert len(made["tokens"]) == 12 == sum(r["emitted"] for r in made["rounds"])
    record = made["acceptance"]
    assert record["accepted"] == sum(r["accepted"] for r in made["rounds"])
    assert record["rate"] == pytest.approx(record["accepted"] / record["drafted"])
    assert record["length"] == pytest.approx(1 + sum(record["marginal"]))
    counts = {"rows": 1, "tokens": 12, "alone": 12}
    exact = {name: value for name, value in made["exact"].items() if value}
    assert exact == counts | {"pass": True}
    assert made["exact"]["detectable_tv"] is None, "greedy: no draw was looked at"


def test_generate_json_knows_no_rate_where_nothing_was_drafted_and_the_trees_of_drafts(
    run, tiny_folders
):
    head = ("generate", "--target", tiny_folders[0], "--prompt", "a b a b a", "--json")
    plain = json.loads(run(*head, "--drafter", "plain", "--max-new-tokens", "3")[1])
    assert plain["acceptance"]["rate"] is None
    tree = ("--drafter", "early_exit:1", "--tree", "grown:4", "--gamma", "2", "--rounds")
    for draft in json.loads(run(*head, *tree, "--max-new-tokens", "6")[1])["rounds"]:
        assert len(draft["parents"]) == 1 + len(draft["draft"])
        assert draft["parents"][0] == -1


def test_json_has_null_for_what_is_no_number(capsys):
    options.print_json({"a": [float("nan"), 1]})
    assert capsys.readouterr().out == '{"a": [null, 1]}\n'


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_generate_under_match_ignores_the_drafter(run, tiny_folders, drafter, temperature):
    options = ("generate", "--target", tiny_folders[0], "--temperature", temperature, "--json")
    tail = ("--rule", "match", "--max-new-tokens", "10", "--prompt", "a b a b a")
    texts = {
        json.loads(run(*options, "--drafter", d, *tail)[1])["text"] for d in ("plain", drafter)
    }  # fmt: skip
    assert len(texts) == 1


@pytest.mark.parametrize("rule", ["reject", "block", "lenient:0.5"])
def test_generate_under_a_rule_that_weighs_q_is_compared_with_plain_decoding(
    run, tiny_folders, rule
):
    pair = ("--target", tiny_folders[0], "--drafter", tiny_folders[1])
    how = ("--temperature", "1", "--rule", rule, "--max-new-tokens", "8", "--prompt", "a b a b a")
    code, out, err = run("generate", *pair, *how)
    assert (code, err) == (0, "")
    assert re.search("(x|no clear difference from) plain decoding", out)


def test_messages_show_their_kind_in_red_and_the_rest_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    options.complain("error", "no such file")
    assert capsys.readouterr().err == "\x1b[1;31merror\x1b[0m: no such file\n"


def test_generate_draws_grown_trees(run, tiny_folders):
    tree = ("--drafter", "early_exit:1", "--tree", "grown:4", "--gamma", "2", "--rounds")
    _, out, _ = run(
        "generate", "--target", tiny_folders[0], *tree, "--max-new-tokens", "6", "--prompt", "a b",
    )  # fmt: skip
    assert "          └─ " in out, "a token below another"


def test_generate_shows_colours_rounds_and_a_summary(run, tiny_folders):
    _, out, _ = run(
        "generate", "--target", tiny_folders[0], "--drafter", "ngram", "--rounds",
        "--max-new-tokens", "16", "--prompt", "x y x y x y",
    )  # fmt: skip
    assert "16 tokens in" in out
    assert "accepted/drafted" in out
    assert "identical" in out
    assert "[draft token accepted]  <target's token where none was accepted>  +tar" in out
    assert "~draft token rejected~" in out, "no colours, no marks"


@pytest.mark.parametrize("plain", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_without_colours_has_marks(run, tiny_folders, monkeypatch, plain):
    shown = io.StringIO()
    environment = {"TERM": "xterm"} | plain
    terminal = Terminal(file=shown, force_terminal=True, markup=False, _environ=environment)
    monkeypatch.setattr(options, "console", terminal)
    words = ("generate", "--target", tiny_folders[0], "--drafter", "ngram", "--prompt", "x y x y x")
    assert run(*words, "--max-new-tokens", "8")[0] == 0
    first, *_ = shown.getvalue().splitlines()
    assert first == "x y x y x", "the prompt has a line of its own"
    assert "[draft token accepted]  <target's token where none was accepted>" in shown.getvalue()
    assert "rejected~" not in shown.getvalue(), "they are shown by round only"


def test_several_prompts_are_separated_by_a_rule_and_counted_together(run, tiny_folders, questions):
    words = ("generate", "--target", tiny_folders[0], "--drafter", "plain", "--max-new-tokens", "2")
    out = run(*words, "--prompts", questions, "--limit", "2")[1]
    lines = out.splitlines()
    rules = [i for i, line in enumerate(lines) if line.startswith("──")]
    kept = Path(questions).read_text().splitlines()[:2]
    numbers = [json.loads(line)["question_id"] for line in kept]
    assert [lines[i].strip("─ ") for i in rules] == [*(f"prompt {n}" for n in numbers), ""]
    assert (lines[rules[0] + 1], lines[rules[1] + 1]) == ("text 0", "text 1")
    assert out.count("[draft token accepted]") == 1, "the legend"
    last = rules[-1]
    assert lines[last + 1] == "all 2 prompts: 4 tokens in 4 target passes: 1.00 per pass"
    assert re.match(r"speedup [\d.]+ \[[\d.]+, [\d.]+\]: \w", lines[last + 2])


@pytest.mark.parametrize("doubtful", [1, 2])
def test_prompts_have_no_verdict_if_most_timings_are_doubtful(
    run, tiny_folders, questions, monkeypatch, doubtful
):
    time, sure = generating._timed, iter([False] * doubtful + [True] * 3)

    def timed(*args):
        speed, output = time(*args)
        return speed | {"credible": next(sure), "spread": 2.0}, output

    monkeypatch.setattr(generating, "_timed", timed)
    words = ("generate", "--target", tiny_folders[0], "--drafter", "ngram", "--prompts", questions)
    *_, said = run(*words, "--limit", "3", "--max-new-tokens", "8")[1].splitlines()
    prompts = "1 prompt" if doubtful == 1 else "2 prompts"
    assert said.endswith(f"timings of {prompts} are doubtful")
    assert ("too few prompts" in said) == (doubtful == 1)


def test_generate_follows_the_generation_config_of_the_target(run, tiny_folders, tmp_path):
    folder = shutil.copytree(tiny_folders[0], tmp_path / "target")
    config = {"repetition_penalty": 1.3, "do_sample": True, "temperature": 0.7}
    (folder / "generation_config.json").write_text(json.dumps(config))
    own = "--target", str(folder), "--drafter", "ngram", "--prompt", "def", "--sampling", "model"
    code, out, _ = run("generate", *own, "--max-new-tokens", "8")
    assert (code, "as its generation config says: repetition_penalty" in out) == (0, True)
    code, _, err = run("generate", *own, "--top-k", "3")
    assert (code, err.count("\n")) == (2, 1)
    assert "leave them out" in err


def test_generate_with_a_draft_of_fewer_special_tokens_drafts_as_without(
    run, tiny_folders, tmp_path, caplog
):
    """`crossed` maps tokens by their text, and says how many are shared."""
    target = shutil.copytree(tiny_folders[0], tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
    model = AutoModelForCausalLM.from_pretrained(target)
    vocab = model.config.vocab_size
    model.resize_token_embeddings(vocab + 2)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    prompt, counts = ("--prompt", "def mean(values):", "--json"), []
    for pair in ((tiny_folders[0], tiny_folders[0]), (target, f"crossed:{tiny_folders[0]}")):
        code, out, _ = run("generate", "--target", str(pair[0]), "--drafter", pair[1], *prompt)
        assert code == 0
        counts.append(json.loads(out)["acceptance"]["rate"])
    assert counts == [1.0, 1.0]
    assert f"chat shares {vocab} of its {vocab + 2} tokens with " in caplog.text


def test_generate_with_a_draft_that_reads_less_than_the_prompt_says_so(
    run, tiny_folders, tmp_path, caplog
):
    short = shutil.copytree(tiny_folders[1], tmp_path / "of eight tokens")
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 8}
    (short / "config.json").write_text(json.dumps(config))
    words = ("--prompt", "def mean(values): return " * 4, "--json")
    code, out, _ = run("generate", "--target", tiny_folders[0], "--drafter", str(short), *words)
    shown = json.loads(out)
    assert (code, shown["exact"]["pass"], shown["acceptance"]["drafted"]) == (0, True, 0)
    assert "of eight tokens reads at most 8 tokens: nothing is drafted" in caplog.text


@pytest.mark.parametrize(
    ("plain_s", "accepts", "speed"),
    [
        ((0.02, 0.02, 0.08), True, "2.00x plain decoding (50 tokens/s)"),
        ((0.01, 0.02, 0.04), True, "no clear difference from plain decoding (100 tokens/s)"),
        ((0.02, 0.02, 0.08), False, "no clear difference from plain decoding (50 tokens/s)"),
    ],
)
def test_generate_reports_speed_of_a_warm_engine(
    run, tiny_folders, monkeypatch, plain_s, accepts, speed
):
    """Plain decoding and speculation take turns; the first of each warms up and is not timed."""
    generate, seconds, sides = Engine.generate, {}, []
    paces = {True: iter([2.0, *plain_s]), False: iter([1.0, *[0.01] * 99])}

    def timed(engine, *given):
        output = generate(engine, *given)
        sides.append(isinstance(engine.drafter, Plain))
        seconds[id(output.trace)] = output.trace, next(paces[sides[-1]], 0.01)
        return output

    monkeypatch.setattr(Engine, "generate", timed)
    monkeypatch.setattr(Trace, "tpot_s", property(lambda trace: seconds[id(trace)][1]))
    drafter = tiny_folders[0] if accepts else "ngram"
    options = ("generate", "--target", tiny_folders[0], "--drafter", drafter, "--prompt", "x y x")
    out = run(*options, "--max-new-tokens", "6")[1]
    assert sides[:6] == [True, False, False, True, True, False], "in turns, as `bench` does"
    assert f"100 tokens/s, {speed}; the fastest of 3 runs each" in out
    assert "doubtful: runs differ by 4.0x, is the machine busy?" in out
    assert out.count("x y x") == 1


def test_generate_calls_the_speed_of_a_drafter_that_remembers_doubtful(
    run, tiny_folders, monkeypatch
):
    """Its fastest run is not its first: that has shown it the text."""
    monkeypatch.setattr(verdict, "remembers", lambda *_: "1.00 tokens per pass on new text, ...")
    target, draft = tiny_folders
    words = ["generate", "--target", target, "--drafter", draft, "--max-new-tokens", "8"]
    code, out, _ = run(*words, "--prompt", "def mean")
    assert code == 0
    assert "doubtful: its drafter remembers text" in " ".join(out.split())
    shown = json.loads(run(*words, "--prompt", "def mean", "--json")[1])
    assert (shown["speed"]["credible"], shown["exact"]["pass"]) == (False, True)


def test_generate_reads_prompts_file_and_writes_json_lines(run, tiny_folders, questions):
    _, out, _ = run(
        "generate", "--target", tiny_folders[0], "--drafter", "plain", "--prompts", questions,
        "--limit", "2", "--max-new-tokens", "4", "--json",
    )  # fmt: skip
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["text 0", "text 1"]


BAD = {  # beside what `test_light.REFUSED` lists
    "--prompt a --limit 3": "--limit",
    "--prompt a --prompts code": "--prompt",
    "--prompt a --drafter null": "did you mean 'plain'?",
    "--prompt a --drafter draft-model": "draft model is model:NAME",
    "--prompt a": "name one",
    "--prompt a --drafter plain --gamma -1": "gamma is -1",
    "--prompt a --drafter ngram --gamma 999": "exceeds the 128",
    "--prompt a --drafter plain --top-p 0": "(0, 1]",
    "--prompt a --drafter plain --top-p 2": "(0, 1]",
    "--prompt a --drafter plain --top-k -1": "top_k",
    "--prompt a --drafter plain --rule tipical": "match, reject",
    "--prompt a --drafter plain --tree 99x99": "at most 1024",
    "--prompt a --drafter ngram --tree 999": "wider than the",
    "--prompt a --drafter ngram --tree grown:3 --gamma 4": "cannot be 4 deep",
    "--prompt a --drafter early_exit --tree 2x2 --rule block": "works on chains",
    "--prompt a --drafter ngram --rule block --temperature 1": "use rule match",
    "--prompt a --drafter suffix --rule reject --temperature 1": "use rule match",
    "--prompt a --drafter ngram:x": "such as ngram:3",
    "--prompt a --drafter plain:3": "takes no argument",
    "--prompt a --drafter early_exit:3": "leave before the last",
    "--target target-10m --prompt a --drafter medusa --gamma 4": "use gamma 3 or less",
    "--prompt a --drafter medusa": "no medusa heads",
    "--prompt a --drafter eagle:nowhere": "nowhere",
    "--prompt a --drafter planted:2": "from 0 to 1",
    "--prompt a --drafter crossed": "crossed:NAME",
    "--prompt a --drafter recycle:2 --tree 4": "use recycle:4",
    "--prompt a --drafter lookahead:5": "did you mean 'recycle'?",
    "--target ./test --prompt a": "did you mean 'tests'?",
    "--prompt '' --drafter plain": "a prompt is empty",
    f"--prompt {'a' * 100} --drafter plain": "prompt 1 with 64 new tokens",
    "--prompt a --drafter plain --max-new-tokens 0": "1 or more",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_and_exit_code_2(run, tiny_folders, words):
    code, out, err = run("generate", "--target", tiny_folders[0], *shlex.split(words))
    assert code == 2
    assert BAD[words] in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err + out


@pytest.mark.parametrize(
    "drafter",
    ["early_exit:1", "suffix", "recycle", "planted:0.6,DRAFT", "model:DRAFT",
     "crossed:DRAFT", "model:TARGET"],
)  # fmt: skip
def test_generate_is_exact_with_every_drafter(run, tiny_folders, drafter):
    target, draft = tiny_folders
    named = drafter.replace("DRAFT", draft).replace("TARGET", target)
    options = ("generate", "--target", target, "--prompt", "def mean(values):", "--json")
    made, alone = (
        json.loads(run(*options, "--max-new-tokens", "12", "--drafter", d)[1])
        for d in (named, "plain")
    )
    assert made["text"] == alone["text"]
    assert made["exact"]["pass"] is True


@pytest.mark.parametrize("drafter", ["model", "eagle", "medusa", "early_exit", "planted"])
def test_shipped_drafters_need_no_other_option(run, drafter):
    options = ("generate", "--drafter", drafter, "--prompt", "def f(x):", "--json")
    made = json.loads(run(*options, "--max-new-tokens", "8")[1])
    assert made["exact"]["pass"] is True
    assert made["exact"]["lossy"] == ""


def test_folder_named_like_a_method_is_a_draft_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft-model").mkdir()
    for name in ("draft-model", "./my-model", "models/ft", "me/my-model"):
        assert names.parse_drafter(name) == ("model", name, None)
    with pytest.raises(UserError, match="did you mean 'eagle'"):
        names.parse_drafter("eagl:me/heads")


def test_lossy_rule_is_not_reported_as_exact(run):
    options = ("generate", "--rule", "typical", "--temperature", "1", "--prompt", "def f(x):")
    made = json.loads(run(*options, "--max-new-tokens", "8", "--json")[1])
    assert made["exact"]["pass"] is False
    assert made["exact"]["lossy"] == "typical (lossy)"
    assert made["exact"]["bugs"] == 0


@pytest.mark.parametrize("command", ["generate --limit 0", "bench --gamma 0", "serve --rows 0"])
def test_command_reports_every_problem_at_once(run, tiny_folders, command):
    wrong = ("--temperature", "-1", "--max-new-tokens", "0", "--prompts", "nowhere.txt")
    _, _, err = run(*command.split(), "--target", tiny_folders[0], "--drafter", "ngram", *wrong)
    assert len(err.strip().splitlines()) == 4, err


def test_models_lists_zoo_and_drafts_of_each_target(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
    _, out, _ = run("models", "--json")
    found = {m["name"]: m for m in json.loads(out)}
    assert found["target-10m"]["drafts"] == ["sibling-3m", "sibling-1m"]
    assert {"name", "path", "parameters", "role", "drafts"} <= set(found["random-tiny"])
    _, table, _ = run("models")
    assert "sibling-3m" in table
    assert "`early_exit:K`: exit after K layers" in " ".join(table.split())


def test_doctor_reports_machine_and_missing_packages(run, monkeypatch):
    code, out, _ = run("doctor")
    assert code == 0
    for word in (
        "python",
        "torch",
        "device",
        "free memory",
        "the time for 1 token, the rate at which it reads the weights, and the time for n tokens",
        "bfloat16",
        "kernels",
        "zoo",
        "ready",
    ):
        assert word in " ".join(out.split())
    from specexp.commands import doctor

    monkeypatch.setattr(doctor, "missing", lambda: ["papermill: pip install papermill"])
    monkeypatch.setattr(doctor, "speeds", lambda device: "")
    code, out, _ = run("doctor")
    assert code == 1
    assert "pip install papermill" in out


def test_doctor_calls_unwritable_store_not_writable(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr("specexp.commands.doctor.speeds", lambda device: "")
    code, out, _ = run("doctor")
    assert code == 1
    assert "not writable" in out
    assert "missing" not in out


def test_brackets_in_paths_are_not_read_as_markup(run, tiny_folders, tmp_path, monkeypatch):
    folder = tmp_path / "[bold]a:cat:"
    folder.mkdir()
    monkeypatch.setattr("making.train.train_zoo", lambda *_, **__: [folder])
    assert run("zoo", "train")[1].split() == ["wrote", str(folder)]
    monkeypatch.setenv("SPECEXP_MLRUNS", str(folder))
    monkeypatch.setattr("specexp.commands.doctor.missing", lambda: ["x: pip install 'x[all]>=1'"])
    monkeypatch.setattr("specexp.commands.doctor.speeds", lambda device: "")
    said = run("doctor")[1].replace("\n", "")
    assert "pip install 'x[all]>=1'" in said


def test_zoo_train_resolves_device_auto(run, monkeypatch):
    asked = []
    monkeypatch.setattr("specexp.api.resolve_device", lambda device: f"for {device}")

    def train(*_, device, **__):
        asked.append(device)
        return []

    monkeypatch.setattr("making.train.train_zoo", train)
    monkeypatch.setattr("specexp.commands.zoo._train_heads", lambda *args: asked.append(args[3]))
    run("zoo", "train")
    run("zoo", "train", "--heads", "medusa")
    assert asked == ["for auto", "for auto"]


@pytest.mark.parametrize("option", ["--target", "--text"])
def test_zoo_train_rejects_options_of_heads(run, option):
    code, _, err = run("zoo", "train", option, "given")
    assert code == 2
    assert f"{option} belongs to --heads" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layers", "2"], "--layers and --minutes belong to --draft"),
        (["--layers", "0"], "--layers and --minutes belong to --draft"),
        (["--minutes", "2", "--heads", "eagle"], "--layers and --minutes belong to --draft"),
        (["--draft", "--minutes", "nan"], "--minutes is nan; it must be positive and finite"),
        (["--draft", "--minutes", "-5"], "--minutes is -5; it must be positive and finite"),
        (["--draft", "--quick", "--minutes", "9"], "--quick and --minutes both say how long"),
        (["--draft", "--heads", "eagle"], "--heads and --draft train different things"),
        (["--draft", "--layers", "12"], "a target of 12 layers keeps 1 to 11 of them"),
    ],
)
def test_zoo_train_rejects_options_that_do_not_go_together(run, options, said):
    code, _, err = run("zoo", "train", *options)
    assert code == 2
    assert said in " ".join(err.split())


def test_trained_draft_says_what_it_replaces(run, tiny_folders, tmp_path, monkeypatch):
    made = tmp_path / f"{Path(tiny_folders[0]).name}-draft-1"
    made.mkdir()
    (made / "zoo.json").write_text('{"held_out": {"answers": {"agreement": 0.29}}}')
    (tmp_path / "asked.txt").write_text("def mean\n")
    monkeypatch.setattr("specexp.zoo.drafts.train", lambda *_, **__: made)
    asked = ("--text", str(tmp_path / "asked.txt"), "--out", str(tmp_path), "--layers", "1")
    code, out, err = run("zoo", "train", "--draft", "--target", tiny_folders[0], *asked)
    assert code == 0, err
    said = "draft-1: in 29% of places the target's most likely token; --out DIR keeps both"
    assert said in " ".join(out.split())


def test_draft_trained_with_the_same_options_is_there_already(
    run, tiny_folders, tmp_path, monkeypatch
):
    def train(engine, _, name, prompts, layers, minutes, out, **__):
        trained.append(minutes)
        digest = drafts.digest_of(engine.target.module, prompts, minutes)
        card = {"held_out": {"answers": {"agreement": 0.29}}, "digest": digest}
        folder = drafts.folder_of(name, layers, out)
        folder.mkdir(exist_ok=True)
        (folder / "zoo.json").write_text(json.dumps(card))
        return folder

    trained, there = [], []
    monkeypatch.setattr("specexp.zoo.drafts.train", train)
    (tmp_path / "asked.txt").write_text("def mean\n")
    asked = ("--text", str(tmp_path / "asked.txt"), "--out", str(tmp_path), "--layers", "1")
    for minutes in ("1", "1", "2"):
        options = ("--draft", "--target", tiny_folders[0], *asked, "--minutes", minutes)
        code, out, err = run("zoo", "train", *options)
        assert code == 0, err
        there.append("is there already: in 29% of places the target's" in " ".join(out.split()))
    assert (there, trained) == ([False, True, False], [1, 2])


def test_full_disk_is_one_line_and_exit_code_5(run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "steps.csv")

    monkeypatch.setattr("specexp.theory.predict", full)
    code, _, err = run("theory", "--alpha", "0.5", "--gamma", "1")
    assert (code, err.strip()) == (5, "disk full: No space left on device: steps.csv")


def test_place_that_may_not_be_used_is_one_line(run, monkeypatch):
    def denied(*_):
        raise OSError(errno.EACCES, "Permission denied", *named)

    monkeypatch.setattr("specexp.theory.predict", denied)
    named = ["result.json"]
    code, _, err = run("theory", "--alpha", "0.5", "--gamma", "1")
    assert (code, err) == (2, "error: cannot read or write result.json: Permission denied\n")
    named = []
    with pytest.raises(OSError, match="denied"):
        run("theory", "--alpha", "0.5", "--gamma", "1")


OOM = "CUDA out of memory. Tried to allocate 20 GiB. GPU 0 has a capacity of 79 GiB. Of these ..."


@pytest.mark.parametrize("said", [OOM, "CUDA error: out of memory", "no such stride"])
def test_memory_that_runs_out_takes_more_than_a_line(run, monkeypatch, said):
    def out(*_):
        raise RuntimeError(said)

    monkeypatch.setattr("specexp.theory.predict", out)
    if "memory" not in said:
        with pytest.raises(RuntimeError):
            run("theory", "--alpha", "0.5", "--gamma", "1")
        return
    code, _, err = run("theory", "--alpha", "0.5", "--gamma", "1")
    [line] = err.strip().splitlines()
    assert code == 1
    assert line.startswith(f"out of memory: {'. '.join(said.split('. ')[:2])}: use a smaller batch")


def test_relative_store_is_made_absolute(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECEXP_MLRUNS", "mine")
    assert run("theory", "--alpha", "0.5", "--gamma", "1")[0] == 0
    assert os.environ["SPECEXP_MLRUNS"] == str(tmp_path / "mine")


@pytest.mark.parametrize("port", ["0", "65536"])
def test_ui_rejects_port_out_of_range(run, port):
    code, _, err = run("ui", "--port", port)
    assert code == 2
    assert "--port" in err


def test_serve_answers_same_requests_under_every_policy(run, tiny_folders, tmp_path, questions):
    target, draft = tiny_folders
    steps = tmp_path / "new" / "steps.csv"
    code, out, err = run(
        "serve", "--target", target, "--drafter", draft, "--prompts", questions, "--count", "5",
        "--load", "poisson:50", "--policy", "plain", "--policy", "always:2", "--rows", "2",
        "--max-new-tokens", "6", "--out", str(steps), "--json",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    plain, always = report["policies"]
    assert report["notes"] == []
    assert (plain["policy"], always["policy"]) == ("plain", "always:2")
    assert plain["load/speculated"] == 0
    assert 0.5 < always["load/speculated"] < 1  # a text's first round is plain
    for figures in (plain, always):
        assert figures["throughput/req_s"] > 0
        assert figures["latency/e2e_p50_ms"] >= figures["latency/ttft_p50_ms"] > 0
    header, *rows = steps.read_text().splitlines()
    emitted = header.split(",").index("emitted")
    assert sum(int(row.split(",")[emitted]) for row in rows) == 2 * 5 * 6
    assert steps.with_suffix(".png").stat().st_size > 0


def test_serve_shows_a_table_and_why_requests_were_refused_in_json_too(
    run, tiny_folders, questions, monkeypatch
):
    busy = "specexp.measure.hardware.machine.doubts"
    monkeypatch.setattr(busy, lambda device: ["3 other programs run"])
    crowded = (
        "serve", "--target", tiny_folders[0], "--drafter", "ngram", "--prompts", questions,
        "--load", "poisson:100000", "--policy", "never", "--rows", "1", "--queue", "1",
        "--count", "6", "--max-new-tokens", "6",
    )  # fmt: skip
    code, out, err = run(*crowded)
    assert code == 0, err
    assert "warning: 3 other programs run\n" in err
    limits = "limits: TTFT 1000 ms, TPOT 50 ms; - where requests are too few"
    about = "with ngram, greedy, 6 requests"  # a narrow table breaks its title
    for said in (about, "TTFT p95, ms", "rows speculated", limits, "the queue is full: 1"):
        assert said in out
    notes = json.loads(run(*crowded, "--json")[1])["notes"]
    assert notes
    assert all("the queue is full: 1" in note for note in notes)


def test_a_path_behind_an_equals_sign_knows_the_home_folder(run, tmp_path, monkeypatch):
    """Most shells expand `--out ~/x` but not `--out=~/x`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, err = run("serve", "--out=~/steps.png")
    assert code == 2
    assert f"{tmp_path}/steps.png would be overwritten" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "alwys:3"], "policy 'alwys:3' is unknown"),
        (["--policy", "table:1=x"], "policy 'table:1=x' is not well formed"),
        (["--load", "closed"], "load 'closed' is not well formed"),
        (["--load", "poisson:-1"], "rate is -1.0"),
        (["--load", "trace:nowhere.csv"], "there is no trace 'nowhere.csv'"),
        (["--chunk", "0"], "chunk is 0"),
        (["--queue", "-1"], "queue is -1"),
        (["--count", "0"], "count is 0"),
        (["--ttft-ms", "0"], "ttft_ms is 0"),
        (["--out", "x.png"], "x.png would be overwritten"),
        (["--out", "/proc/x/steps.csv"], "cannot write /proc/x/steps.csv"),
        (
            ["--target", "target-10m", "--drafter", "medusa", "--policy", "always:5"],
            "policy 'always:5' drafts 5 tokens; use 0 to 3 here",
        ),
    ],
)
def test_serve_rejects_bad_options_before_loading_a_model(
    run, tiny_folders, questions, options, says
):
    target, draft = tiny_folders
    models = ("--target", target, "--drafter", draft, "--prompts", questions)
    code, _, err = run("serve", *models, *options)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
