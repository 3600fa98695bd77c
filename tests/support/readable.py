"""What a reader may expect of every figure."""

from itertools import combinations
from unittest.mock import patch

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from specexp.figures import style

NARROW, SMALLEST = 660, 7  # pixels: a figure in a page 700 wide, and its smallest text there
REASONS = ("No intervals: ", "interval", "predicted", "SIMULATED", "n = ")


def title(figure: Figure) -> str:
    above = figure.get_suptitle()
    return above.replace("\n", " ") or figure.axes[0].get_title(loc="left")


def check(figure: Figure) -> None:
    """That all text is in the figure and none upon another, large enough in a narrow page; and that
    what is marked carries its interval, or the figure says why not."""
    width, height = figure.get_size_inches() * figure.dpi
    canvas, boxes = FigureCanvasAgg(figure), {}
    canvas.draw()  # lays it out

    def draw(text, renderer):
        if text.get_visible() and text.get_text().strip():
            boxes[text] = text.get_window_extent(renderer)

    with patch.object(Text, "draw", draw):
        canvas.draw()
    named = {t.get_text(): box for t, box in boxes.items()}
    cut = [n for n, b in named.items() if min(b.x0, b.y0) < -2 or b.x1 > width or b.y1 > height + 2]
    assert not cut, f"beyond the figure's edge: {cut}"
    over = [
        (a.get_text(), b.get_text())
        for a, b in combinations(boxes, 2)
        if boxes[a].padded(-1).overlaps(boxes[b].padded(-1))
    ]
    assert not over, f"one upon the other: {over}"
    least = min(t.get_fontsize() for t in boxes) * NARROW / (72 * figure.get_figwidth())
    assert least > SMALLEST, f"{least:.1f} pixels high in a page of {NARROW}"
    assert figure.get_figwidth() <= style.WIDEST
    bare = [line for axes in figure.axes for line in _bare(axes)]
    assert not bare or any(r in t.get_text() for t in boxes for r in REASONS), bare


def _bare(axes) -> list:
    """Lines with marks that carry no interval."""
    with_interval = [bars.lines[0] for bars in axes.containers if hasattr(bars, "has_yerr")]
    return [
        line for line in axes.lines
        if line.get_marker() not in ("None", "", "|", "_") and len(line.get_xdata())
        and line not in with_interval
    ]  # fmt: skip
