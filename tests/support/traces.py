"""Traces of arrivals as files."""

import csv

from specexp.serving.arrivals import COLUMNS
from specexp.serving.requests import Request


def triples(arrivals):
    """(at_s, prompt tokens, output tokens) of each request."""
    columns = (arrivals.at_s, arrivals.prompt, arrivals.output)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def requests(lengths):
    """Requests without text, from triples (at_s, prompt tokens, new tokens)."""
    return [Request(range(p), n, at, stream=i) for i, (at, p, n) in enumerate(lengths)]


def write_csv(path, requests):
    """Write triples (at_s, prompt tokens, output tokens) as a trace that `read_csv` reads."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(COLUMNS)
        for at_s, prompt, output in requests:
            row = (f"{at_s:.3f}", "synthetic", prompt, output, prompt + output, "synthetic")
            out.writerow(row)
