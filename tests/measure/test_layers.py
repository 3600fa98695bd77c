"""The bench of layers with windows and states against full attention (`support.layers`)."""

import json

import pytest
from support import layers

from specexp.models import memory
from specexp.models.load import of_module


@pytest.mark.parametrize("name", layers.FAMILIES)
def test_counterpart_differs_in_more_than_its_attention(name):
    own, full = layers.pair(layers.FAMILIES[name], 64, 2)
    kinds = [memory.layers(module.config, 2048) for module in (own, full)]
    assert all(layer.has_state or layer.window == layers.WINDOW for layer in kinds[0])
    assert kinds[1] == (memory.Layer(),) * 2
    step = 2 * 3 * 64 * layers.MULTIPLE  # layers, matrices, width, rows
    weights = [of_module(module).parameters for module in (own, full)]
    assert abs(weights[0] - weights[1]) <= step / 2


def test_bench_of_layers_lacks_a_ratio(tmp_path):
    tiny = ["--width", "64", "--layers", "2", "--turns", "1", "--dtypes", "float32"]
    layers.main(["--out", str(tmp_path), "--families", "Mistral", "Granite 4", *tiny])
    families = json.loads((tmp_path / "layers.json").read_text())["families"]
    rows = [(name, row) for name, part in families.items() for row in part["rows"]]
    cases = [("Mistral", 64), ("Mistral", 1024), ("Granite 4", 64)]
    assert [(name, row["context"], row["nodes"]) for name, row in rows] == [
        (*case, nodes) for case in cases for nodes in layers.DRAFTS
    ]
    for _, row in rows:
        assert row["ratio"]["value"] == pytest.approx(row["ms"][0] / row["ms"][1])
    assert families["Mistral"]["params"]["width"] == 64
    assert families["Mistral"]["about"]["versions"]["torch"]
