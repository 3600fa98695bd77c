"""Tables of the suites of `specexp bench`."""

from rich.console import Console

from specexp.figures import hardware


def test_peers_table_shows_missing_and_differing():
    odd = {"share": 0.9, "ties": 1, "others": 2}
    same = {"value": 2.0, "low": 1.5, "high": 2.5}
    row = {"work": "plain", "batch": 1, "tok_s": 20.0, "their_tok_s": 10.0, "ratio": same,
           "missing": None, "equal": odd}  # fmt: skip
    gone = row | {"work": "draft", "their_tok_s": None, "ratio": None, "equal": None,
                  "missing": "because"}  # fmt: skip
    report = {"drafter": "d", "gamma": 2, "new_tokens": 4, "prompts": 5, "repeats": 1,
             "rows": [row, gone]}  # fmt: skip
    shown, notes = hardware.tables("peers", report)
    console = Console(width=100, record=True, quiet=True)
    with console.capture() as printed:
        console.quiet = False
        console.print(*shown)
    assert "2.00x [1.50, 2.50]" in printed.get()
    assert "90.0%, ties: 1, unexplained: 2" in printed.get()
    assert notes[0] == "draft model: because"
    assert notes[-1] == "intervals: timing noise alone, over repeats of the same 5 prompts"


def test_pass_faster_than_torchs_products_is_explained():
    """Such as one of 6 tokens by compiled kernels, whatever a pass of one token takes."""
    ratio, fast = ({"value": v, "low": v, "high": v} for v in (2.0, 0.3))
    row = {"model": "m", "tokens": 1, "ms": 1.0, "bytes": 1, "gb_s": 1.0, "of_copy": fast,
           "bare_ms": 0.5, "over_bare": ratio, "over_step": ratio}  # fmt: skip
    wide = row | {"tokens": 6, "over_bare": fast}
    report = {"copy": {"gb_s": 1.0, "bytes": 2}, "turns": 3, "rows": [row, wide]}
    assert "below: compiled kernels beat" in hardware.tables("roofline", report)[1][0]
