"""Errors when a policy is wrong."""

import pytest

from support.policy_files import BASE, errors
from tagc.policy import Policy, PolicyError

HUGE = {"kind": "matrix", "bits": 10**5000}
OWNED = {"when": {}, "codec": {"kind": "sketch", "density": 0.1, "support": "shared"}}

AT = "gradients[0]."
DENSE = "{kind: dense}"
GATHERED = "{kind: dense}\nparameters: [{when: {}, codec: {kind: %s}}]"
INVALID = [
    # old text, new text, start of the only error line, its end or a part of it
    ("density", "densty", f"7:7: {AT}codec.densty: unknown key;", "did you mean 'density'?"),
    ("attention", "[mlp, HEAD]", f"4:24: {AT}when.role[1]: unknown value 'HEAD'", "mean 'head'?"),
    ("kind: dense", "kind: 7", "11:13: gradients[1].codec.kind: unknown value 7;", "matrix, dense"),
    ("0.2", "1.5", f"7:7: {AT}codec.density: must be less than or equal to 1", "not 1.5"),
    ("kind: sketch\n      ", "", f"5:5: {AT}codec.kind: the key is missing", ""),
    ("symbol: int8x4", "density: 1", f"8:7: {AT}codec.density: duplicate key", "first on line 7"),
    ("schema: 1\n", "", "1:1: schema: the key is missing", ""),
    ("about: a", "3: a", "2:1: a key is not a string", ""),
    ("a test", "&a x\n<<: {about: y}", "3:1: '<<': unknown key", ""),
    ("a test", "!!python/name:os.system x", "2:1: about: the YAML tag", "is not supported"),
    ("a test", "\x07", "2:8: invalid YAML: the character U+0007", ""),
    ("role: attention", "name: *.wq", "4:19: invalid YAML", "quote a glob that starts with '*'"),
    ("role: attention", "name: *wq", f"4:12: {AT}when.name: YAML aliases", "quote a glob"),
    ("role: attention", "min_numel: 2.0", f"4:12: {AT}when.min_numel: must be a valid int", ""),
    ("role: attention", "min_numel: 2, max_numel: 1", f"4:5: {AT}when: min_numel 2 is above", ""),
    ("{kind: dense}", "{kind: dense}\n    feedback: {}", "12:5: gradients[1].feedback: kind", ""),
    # Every codec has its own values, and their neighbours.
    (DENSE, "{kind: quantized, bits: 3}", "11:30: gradients[1].codec.bits: unknown", "mean 4? ava"),
    (DENSE, "{kind: quantized, block: '128'}", "11:30: ", "did you mean 128, without quotes?"),
    (DENSE, GATHERED % "sketch", "12:33: parameters[0].codec.kind: unknown value 'sketch'", ""),
    (DENSE, GATHERED % "quantized, keep_for_backward: 1", "12:50: ", "true or false, not 1"),
    # Feedback must go with the codec.
    (
        DENSE,
        "{kind: quantized, rounding: stochastic}\n    feedback: {kind: residual}",
        "12:5: ",
        "rounding 'stochastic'; choose none",
    ),
    ("residual", "average", f"9:5: {AT}feedback: kind 'average' would forget most", ""),
    ("residual", "residual, beta: 0.5", f"9:5: {AT}feedback: ", "only for the kind 'average'"),
    (DENSE, "{kind: dense}\n    feedback: {kind: residual}", "12:5: ", "has no effect"),
    *(
        ("role: attention", f"layers: {layers}", f"4:12: {AT}when.layers: must be a range", "")
        for layers in ("3-1", "[0, true]", "[0, 10000000000]")
    ),
]


@pytest.mark.parametrize(("old", "new", "start", "part"), INVALID)
def test_error_names_place_key_and_nearest_value(old, new, start, part, tmp_path):
    assert old in BASE
    [line] = errors(BASE.replace(old, new, 1), tmp_path)
    assert line.startswith(f"p.yaml:{start}")
    assert part in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", "p.yaml:1:1: must be a mapping, not int"),
        (b"schema: 1\nabout: \xff", "p.yaml:2:8: not UTF-8 text"),
        ("a: b\n---\nc: d", "p.yaml:2:1: invalid YAML: expected a single document"),
        pytest.param("[" * 1200, "p.yaml:1:", id="deep"),
        ("# only a comment\n", "p.yaml: the file is empty"),
        ("schema: 1\ngradients: []", "p.yaml:2:1: gradients: must be a non-empty list of rules"),
        ("schema: 1\ngradients: &x [*x]", "p.yaml:2:16: gradients[0]: YAML aliases"),
    ],
)
def test_error_in_the_whole_file(text, expected, tmp_path):
    [line] = errors(text, tmp_path)
    assert line.startswith(expected)


def test_all_errors_are_listed_by_line(tmp_path):
    text = BASE
    for old, new in (
        ("about: a test", "abot: x\nschema: 1"),
        *(("attention", "attenton"), ("0.2", "7"), ("int8x4", "*alias"), ("bfloat16", "bf16")),
    ):
        text = text.replace(old, new)
    found = [line.partition(": ")[0].removeprefix("p.yaml:") for line in errors(text, tmp_path)]
    assert found == ["2:1", "3:1", "5:12", "8:7", "9:7", "10:32"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("attn_only", "did you mean 'attn-only'? available: attn-only, auto, dense, exact"),
        ("missing/p", "missing/p: cannot be read: No such file"),
        (5, "not int"),
        (
            {"schema": 1, "gradients": [OWNED | {"feedback": {"kind": "none"}}]},
            "<dict>: gradients[0].feedback: support 'shared' is chosen from residuals",
        ),
        ({1: 2}, "<dict>: [1]: a key must be a string, not 1"),
        (  # an error that tagc has no words for
            {"schema": 1, "extends": "dense", "replicas": [{"when": {}, "codec": HUGE}]},
            ", not <int>",
        ),
    ],
)
def test_error_in_the_source(source, message):
    with pytest.raises(PolicyError) as caught:
        Policy.load(source)
    assert message in str(caught.value)


def test_a_mapping_nested_too_deeply():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for source in (deep, {"schema": 1, "gradients": deep}, {"schema": 1, "gradients": [deep]}):
        with pytest.raises(PolicyError):
            Policy.load(source)
