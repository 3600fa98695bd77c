"""No measured number stands on a page that data/measurements does not hold."""

import re

import pytest
from support import measured_pages
from support.measured_pages import BLOCK, PAGES, ROOT, TEXTS, written

CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
NUMBER = re.compile(
    r"\d[\d.,]*(?:x\b| ?(?:%|[mµ]?s\b|min(?:utes)?\b|GB/s|tokens/s|kills|plain pass))"
)
SETTINGS = {"95 %", "20 s"}  # of intervals, of a closed loop
COMPUTED = {ROOT / "specexp" / "models" / "README.md"}  # sizes, from configs


def name(page) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_says_what_was_measured(page):
    assert page.read_text() == written(page.read_text()), (
        "run: PYTHONPATH=tests python -m support.measured_pages"
    )


def test_every_text_is_on_a_page():
    used = [block[2] for page in PAGES for block in BLOCK.finditer(page.read_text())]
    assert sorted(used) == sorted(TEXTS)


@pytest.mark.parametrize("page", [p for p in PAGES if p not in COMPUTED], ids=name)
def test_no_measured_number_stands_elsewhere(page):
    prose = CODE.sub("", BLOCK.sub("", page.read_text()))
    assert not set(NUMBER.findall(prose)) - SETTINGS


@pytest.mark.parametrize("text", ["gains 1.04x", "costs 14 %", "in 8 min", "2.5 plain passes"])
def test_a_measured_number_is_seen(text):
    assert NUMBER.search(text)


def test_a_changed_number_is_seen():
    page = (ROOT / "README.md").read_text()
    block = BLOCK.search(page)
    other = page.replace(block[3], re.sub(r"\d", "0", block[3]))
    assert other != page == written(other)


def test_a_policy_faster_than_the_best_fixed_one_is_said_to_be(monkeypatch):
    file = measured_pages.load("load_aware")
    faster = [row | {"regret": -0.117} for row in file["closed_loop"]]
    monkeypatch.setattr(measured_pages, "load", lambda _: file | {"closed_loop": faster})
    assert "`goodput` is at least 11.7 % faster than the best fixed" in measured_pages.under_load()
