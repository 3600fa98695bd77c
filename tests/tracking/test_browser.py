"""MLflow's pages and a report in a browser, at two sizes: what is asked is answered in sight."""

import pytest
from support.browser import Browser
from support.servers import Mlflow
from support.stores import METRICS, quiet

from specexp.commands.store import print_pdf
from specexp.tracking import mlflow_view, rebuild, report
from specexp.tracking import runs as track

pytestmark = [pytest.mark.slow, pytest.mark.chromium]
NAME = "drafters"
SPEEDS = {"eagle": 1.3, "ngram": 1.5, "medusa": 0.9}
SIZES = pytest.mark.parametrize(("width", "height"), [(1400, 1000), (1000, 700)])


@pytest.fixture
def compared(store):
    """A store with one result of three drafters, each with its interval."""
    each = {
        name: (METRICS | {"speedup/measured": value, "speedup/ci_low": value - 0.1,
                          "speedup/ci_high": value + 0.1}, {})
        for name, value in SPEEDS.items()
    }  # fmt: skip
    metrics, series = each.pop("eagle")
    track.log(NAME, {"drafter": "eagle", "gamma": 3}, metrics, series, rivals=each)
    rebuild.rebuild(quiet())
    return store


def answer() -> str:
    """The best drafter with its interval, as the report says it."""
    text = report.answer(report.of(NAME)).partition(" of plain")[0]
    assert text.startswith("ngram γ=3 by hand: 1.50x [1.")
    return text


@SIZES
def test_one_click_from_the_start_page_to_the_answer_and_one_link_to_all_runs(
    compared, width, height
):
    [experiment] = [e for e in track.backend().experiments() if e.name == NAME]
    with Mlflow(track.backend()) as server, Browser(width, height) as browser:
        browser.open(server.url)
        browser.click(NAME)
        browser.click("Got it")  # MLflow's own hint, which it shows once
        browser.sees(answer())
        browser.open("about:blank")
        browser.open(mlflow_view.url(experiment.experiment_id, server.url))
        browser.sees("Does it pay?")
        for name, value in SPEEDS.items():
            browser.sees(f"{name} γ=3 by hand")
            browser.sees(f"{value:.2f}x [{value - 0.1:.2f}, {value + 0.1:.2f}]")


@SIZES
def test_a_report_opens_offline_with_the_answer_in_sight(compared, width, height):
    page = report.write(report.of(NAME), names=[NAME])
    with Browser(width, height) as browser:
        browser.open(page.as_uri())
        browser.sees(answer())
    assert print_pdf(page).read_bytes().startswith(b"%PDF")


def test_runs_keep_their_names_whole_on_a_phone(compared):
    page = report.write(report.of(NAME), names=[NAME])
    with Browser(420, 900) as browser:
        browser.open(page.as_uri())
        browser.sees("The runs compared", scroll=True)
        assert browser._value("document.querySelector('.runs td').offsetHeight") < 40  # a line
