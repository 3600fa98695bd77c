"""Every figure that is drawn here must be readable."""

import pytest
from support import readable

from specexp.figures import style


@pytest.fixture(autouse=True)
def every_figure_is_readable(monkeypatch):
    drawn, close = [], style.plt.close
    monkeypatch.setattr(style.plt, "close", lambda figure: (drawn.append(figure), close(figure)))
    yield
    for figure in drawn:
        readable.check(figure)
