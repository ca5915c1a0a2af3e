"""What a user is told when a policy is wrong."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from support.policy_files import BASE, NO_DENSE, errors, load_text
from tagc.policy import Policy, PolicyError
from tagc.policy.problems import translate

HUGE = {"kind": "matrix", "bits": 10**5000}
NEW = """\
schema: 1
gradients:
  - when: {}
    codec: {kind: %s}
parameters:
  - when: {}
    codec: {kind: %s}
"""


@pytest.mark.parametrize(
    ("gradient", "parameter", "message"),
    [
        ("quantised, bits: 4", "dense", "4:13: gradients[0].codec.kind: unknown value 'quantised'; "
         "did you mean 'quantized'?"),
        ("quantized, bit: 4", "dense", "4:30: gradients[0].codec.bit: unknown key; did you mean"),
        ("quantized, bits: 3", "dense", "4:30: gradients[0].codec.bits: unknown value 3; "
         "did you mean 4? available: 4, 8"),
        ("quantized, block: 48", "dense", "gradients[0].codec.block: unknown value 48; did you "
         "mean 64 or 32?"),
        ("quantized, block: 100", "dense", "unknown value 100; did you mean 128 or 64?"),
        ("quantized, block: '128'", "dense", "value '128'; did you mean 128, without quotes?"),
        ("quantized, block: 0", "dense", "unknown value 0; did you mean 32?"),
        ("quantized, block: -2", "dense", "unknown value -2; did you mean 32?"),
        ("quantized, block: 9999", "dense", "unknown value 9999; did you mean 4096?"),
        ("quantized, block: big", "dense", "unknown value 'big'; available: 32, 64,"),
        ("quantized, block: .nan", "dense", "unknown value nan; available: 32, 64,"),
        ("quantized, block: true", "dense", "unknown value True; available: 32, 64,"),
        ("sketch, density: 0", "dense", "gradients[0].codec.density: must be greater than 0"),
        ("sketch, density: 1, warmup_steps: 2147483648", "dense", "less than or equal to "
         "2147483647, not 2147483648"),
        ("matrix, level: 0.4", "dense", "codec.level: must be greater than or equal to 0.5"),
        ("dense, wire: bf16", "dense", "gradients[0].codec.wire: unknown value 'bf16'; "
         "did you mean 'bfloat16'?"),
        ("dense", "sketch", "7:13: parameters[0].codec.kind: unknown value 'sketch'; "
         "available: quantized, delta, dense"),
        ("dense", "quantized, keep: true", "parameters[0].codec.keep: unknown key"),
        ("dense", "quantized, keep_for_backward: 1", "must be true or false, not 1"),
        ("dense", "auto, min_bits: 9", "parameters[0].codec.min_bits: unknown value 9; "
         "did you mean 8 or 16? available: 4, 8, 16, 32"),
    ],
)  # fmt: skip
def test_errors_of_every_codec(gradient: str, parameter: str, message: str, tmp_path):
    [line] = errors(NEW % (gradient, parameter), tmp_path)
    assert message in line


@pytest.mark.parametrize(
    ("codec", "feedback", "message"),
    [
        ({"kind": "sketch", "density": 0.1}, {"kind": "average"}, "would forget most"),
        ({"kind": "sketch", "density": 0.1}, {"beta": 0.5}, "only for the kind 'average'"),
        ({"kind": "sketch", "density": 0.1, "support": "shared"}, {"kind": "none"}, "residuals"),
        ({"kind": "dense", "wire": "bfloat16"}, {"kind": "residual"}, "has no effect"),
        ({"kind": "quantized"}, {"kind": "average", "beta": 1.0}, "less than 1"),
    ],
)
def test_feedback_must_go_with_the_codec(codec: dict, feedback: dict, message: str):
    rule = {"when": {}, "codec": codec, "feedback": feedback}
    with pytest.raises(PolicyError, match=message):
        Policy.load({"schema": 1, "gradients": [rule]})


def test_replicas_have_no_owner_who_could_choose_for_all():
    own = {"when": {}, "codec": {"kind": "sketch", "density": 0.1}}
    shared = {"when": {}, "codec": {**own["codec"], "support": "shared"}}
    with pytest.raises(PolicyError) as caught:
        Policy.load({"schema": 1, "gradients": [shared], "replicas": [own, shared]})
    [line] = str(caught.value).splitlines()
    assert "replicas[1]: codec.support 'shared' is chosen by a shard's owner" in line
    Policy.load({"schema": 1, "gradients": [shared], "replicas": [own]})


def test_a_measured_lead_is_one_ranks_own():
    measured = {
        "codec": {"kind": "quantized"},
        "feedback": {"kind": "residual", "lead": "measured"},
    }
    rule = {"when": {}, **measured}
    with pytest.raises(PolicyError) as caught:
        Policy.load({"schema": 1, "gradients": [rule], "replicas": [rule]})
    [line] = str(caught.value).splitlines()
    assert "replicas[0]: feedback.lead 'measured' differs from rank to rank" in line
    with pytest.raises(PolicyError, match="lead"):
        Policy.load({"schema": 1, "gradients": [{**rule, "feedback": {"lead": "guessed"}}]})


# Errors

AT = "gradients[0]."
INVALID = [
    # old text, new text, start of the only error line, its end or a part of it
    ("density", "densty", f"7:7: {AT}codec.densty: unknown key;", "did you mean 'density'?"),
    ("about:", "abuot:", "2:1: abuot: unknown key;", "did you mean 'about'?"),
    ("{role:", "{rôle:", f"4:12: {AT}when.rôle: unknown key;", "did you mean 'role'?"),
    ("feedback:", "feedbck:", f"9:5: {AT}feedbck: unknown key;", "did you mean 'feedback'?"),
    (", dtype:", ", type:", f"9:32: {AT}feedback.type: unknown key;", "did you mean 'dtype'?"),
    ("role: att", "role: at", f"4:12: {AT}when.role: unknown value 'atention'", "'attention'?"),
    ("attention", "[mlp, HEAD]", f"4:24: {AT}when.role[1]: unknown value 'HEAD'", "mean 'head'?"),
    ("sketch", "skech", f"6:7: {AT}codec.kind: unknown value 'skech'", "did you mean 'sketch'?"),
    ("int8x4", "int8", f"8:7: {AT}codec.symbol: unknown value 'int8'", "did you mean 'int8x4'?"),
    ("residual", "resid", f"9:16: {AT}feedback.kind: unknown value 'resid'", "mean 'residual'?"),
    ("bfloat16", "bf16", f"9:32: {AT}feedback.dtype: unknown value 'bf16'", "mean 'bfloat16'?"),
    ("kind: dense", "kind: 7", "11:13: gradients[1].codec.kind: unknown value 7;", "matrix, dense"),
    ("0.2", "0", f"7:7: {AT}codec.density: must be greater than 0", "not 0"),
    ("0.2", "1.5", f"7:7: {AT}codec.density: must be less than or equal to 1", "not 1.5"),
    ("0.2", "true", f"7:7: {AT}codec.density: must be a valid number", "not True"),
    ("0.2", "'0.2'", f"7:7: {AT}codec.density: must be a valid number", "not '0.2'"),
    ("0.2", ".nan", f"7:7: {AT}codec.density: must be a finite number", "not nan"),
    ("0.2", ".inf", f"7:7: {AT}codec.density: must be a finite number", "not inf"),
    ("0.2", "-.inf", f"7:7: {AT}codec.density: must be a finite number", "not -inf"),
    ("0.2", "!!float x", f"7:7: {AT}codec.density: 'x' is not a valid float", ""),
    ("kind: sketch\n      ", "", f"5:5: {AT}codec.kind: the key is missing", ""),
    ("symbol: int8x4", "density: 1", f"8:7: {AT}codec.density: duplicate key", "first on line 7"),
    ("density: 0.2\n      ", "", f"5:5: {AT}codec.density: the key is missing", ""),
    ("when: {role: attention}\n    ", "", "4:5: gradients[0].when: the key is missing", ""),
    ("schema: 1", "schema: true", "1:1: schema: must be 1", "not True"),
    ("schema: 1", "schema: 1.0", "1:1: schema: must be 1", "not 1.0"),
    ("schema: 1", "schema: 2", "1:1: schema: must be 1", "not 2"),
    (
        "schema",
        "schme",
        "1:1: schme: unknown key; did you mean 'schema'?",
        "schema, about, gradients",
    ),
    ("schema: 1\n", "", "1:1: schema: the key is missing", ""),
    ("schema: 1", "schema: 1\nschema: 1", "2:1: schema: duplicate key", "first on line 1"),
    ("about: a", "3: a", "2:1: a key is not a string", ""),
    ("about: a", "? [a]\n: a", "2:3: a key is not a string", ""),
    ("a test", "&a x\n<<: {about: y}", "3:1: '<<': unknown key", ""),
    ("a test", "!!python/name:os.system x", "2:1: about: the YAML tag", "is not supported"),
    ("a test", "!!python/object/apply:os.abort []", "2:1: about: the YAML tag", "is not supported"),
    ("{}", "!mine {}", "10:5: gradients[1].when: the YAML tag '!mine' is not supported", ""),
    ("a test", "!mine x", "2:1: about: the YAML tag '!mine' is not supported", ""),
    ("a test", '"\\ud800"', "2:1: about: '\\ud800' is not a valid str", ""),
    ("a test", '"\\UFFFFFFFF"', "2:11: invalid YAML", ""),
    ("a test", "\x07", "2:8: invalid YAML: the character U+0007", ""),
    ("a test", "[1, 2", "3:10: invalid YAML", "flow sequence"),
    ("a test", "5", "2:1: about: must be a valid string", "not 5"),
    ("role: attention", "role: []", f"4:12: {AT}when.role: must be a string or", "not []"),
    ("role: attention", "role: 5", f"4:12: {AT}when.role: must be a string or", "not 5"),
    ("role: attention", "name: ''", f"4:12: {AT}when.name: must have at least 1", ""),
    ("role: attention", "name: *.wq", "4:19: invalid YAML", "quote a glob that starts with '*'"),
    ("role: attention", "name: *wq", f"4:12: {AT}when.name: YAML aliases", "quote a glob"),
    ("role: attention", "min_numel: true", f"4:12: {AT}when.min_numel: must be a valid int", ""),
    ("role: attention", "min_numel: 2.0", f"4:12: {AT}when.min_numel: must be a valid int", ""),
    ("role: attention", "max_numel: -1", f"4:12: {AT}when.max_numel: must be greater", "not -1"),
    ("role: attention", "min_numel: 2, max_numel: 1", f"4:5: {AT}when: min_numel 2 is above", ""),
    ("{kind: dense}", "dense", "11:5: gradients[1].codec: must be a mapping", "not 'dense'"),
    ("{}", "", "10:5: gradients[1].when: must be a mapping", "not None"),
    ("residual", "none", f"9:5: {AT}feedback: dtype 'bfloat16' has no effect", ""),
    ("{kind: dense}", "{kind: dense}\n    feedback: {}", "12:5: gradients[1].feedback: kind", ""),
    *(
        ("role: attention", f"layers: {layers}", f"4:12: {AT}when.layers: must be a range", "")
        for layers in (
            "3-1",
            "1 2-30",
            "a-b",
            "[1]",
            "[1, 2, 3]",
            "[0, true]",
            "true",
            "-1",
            "1.5",
            "[0, 10000000000]",
            "[]",
        )
    ),
]


def test_the_base_of_the_error_cases_is_valid(tmp_path):
    assert len(load_text(BASE, tmp_path).gradients) == 2


@pytest.mark.parametrize(("old", "new", "start", "part"), INVALID)
def test_error_names_place_key_and_nearest_spelling(old, new, start, part, tmp_path):
    assert old in BASE
    [line] = errors(BASE.replace(old, new, 1), tmp_path)
    assert line.startswith(f"p.yaml:{start}")
    assert part in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 1", "p.yaml:1:1: must be a mapping, not list"),
        ("5", "p.yaml:1:1: must be a mapping, not int"),
        (b"schema: 1\nabout: \xff", "p.yaml:2:8: not UTF-8 text"),
        ("a: b\n---\nc: d", "p.yaml:2:1: invalid YAML: expected a single document"),
        ("[" * 5000, "p.yaml:1:"),
        ("schema: 1\ngradients: []", "p.yaml:2:1: gradients: must be a non-empty list of rules"),
        ("schema: 1\ngradients: {}", "p.yaml:2:1: gradients: must be a non-empty list of rules"),
        ("schema: 1\ngradients: &x [*x]", "p.yaml:2:16: gradients[0]: YAML aliases"),
        ("schema: 1\ngradients: [5]", "p.yaml:2:13: gradients[0]: must be a mapping, not 5"),
    ],
)
def test_error_in_the_whole_file(text, expected, tmp_path):
    [line] = errors(text, tmp_path)
    assert line.startswith(expected)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_empty_file(text, tmp_path):
    with pytest.raises(PolicyError, match="the file is empty"):
        load_text(text, tmp_path)


def test_all_errors_are_listed_by_line(tmp_path):
    text = BASE
    for old, new in [
        ("about: a test", "abot: x\nschema: 1"),
        ("attention", "attenton"),
        ("0.2", "7"),
        ("int8x4", "*alias"),
        ("bfloat16", "bf16"),
    ]:
        text = text.replace(old, new)
    assert [line.split(": ")[:2] for line in errors(text, tmp_path)] == [
        ["p.yaml:2:1", "abot"],
        ["p.yaml:3:1", "schema"],
        ["p.yaml:5:12", "gradients[0].when.role"],
        ["p.yaml:8:7", "gradients[0].codec.density"],
        ["p.yaml:9:7", "gradients[0].codec.symbol"],
        ["p.yaml:10:32", "gradients[0].feedback.dtype"],
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "attn_only",
            "did you mean 'attn-only'? available: attn-only, auto, dense, half-bit",
        ),
        ("zzz", "no built-in policy 'zzz'; available: attn-only, auto"),
        ("", "no built-in policy ''; available"),
        ("missing/p", "missing/p: cannot be read: No such file"),
        ("missing.yml", "missing.yml: cannot be read: No such file"),
        (Path("missing"), "missing: cannot be read: No such file"),
        ("a\0b.yaml", "cannot be read"),
        (Path(), ".: cannot be read: Is a directory"),
        (5, "not int"),
        ({}, "<dict>: schema: the key is missing\n<dict>: gradients: the key is missing"),
        ({1: 2}, "<dict>: [1]: a key must be a string, not 1"),
        ({"\ud800": 1, "schema": 1}, "<dict>: must be a valid string"),
        (
            {"schema": 1, "extends": "dense", "roles": {"mpl": "x"}},
            "<dict>: roles.mpl: unknown key; did you mean 'mlp'? available: attention, mlp,",
        ),
        ({"schema": 1, "extends": "dense", "roles": []}, "<dict>: roles: must be a mapping"),
        ({"schema": 10**5000, "gradients": [{}]}, "<dict>: schema: "),
        (
            {"schema": 1, "gradients": [{"when": {"role": [10**5000]}, "codec": NO_DENSE}]},
            "<dict>: gradients[0].when.role[0]: unknown value <int>",
        ),
        (  # an error that tagc has no words for
            {"schema": 1, "extends": "dense", "replicas": [{"when": {}, "codec": HUGE}]},
            ", not <int>",
        ),
        (
            {"schema": 1, "gradients": [{"when": {"rol": "x"}, "codec": NO_DENSE}]},
            "<dict>: gradients[0].when.rol: unknown key; did you mean 'role'?",
        ),
    ],
)
def test_error_in_the_source(source, message):
    with pytest.raises(PolicyError) as caught:
        Policy.load(source)
    assert message in str(caught.value)


# Mutations

SNIPPETS = [
    *("*a", "&a ", "<<: ", "!!python/name:os ", "!!int ", "- ", "? ", ": ", "---\n", "%YAML 9\n"),
    *("{", "}", "[", "]", '"', "'", "\\x", "\n", "\t", " ", "#", "|", ">", "0x1", "null", "true"),
    *(".nan", "-1", "9" * 30, "1e999", "\ud7ff", "\x00", "\u2028", "schema: 1", "role: ", '"\\U'),
]
EDITS = st.lists(
    st.tuples(
        st.integers(0, len(BASE)),
        st.integers(0, 12),
        st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=4)),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(edits=EDITS)
def test_mutated_files_give_a_policy_or_a_policy_error(edits, tmp_path_factory):
    text = BASE
    for start, length, new in edits:
        text = text[:start] + new + text[start + length :]
    try:
        outcome = load_text(text, tmp_path_factory.getbasetemp())
    except PolicyError as error:
        outcome = str(error)
    if isinstance(outcome, Policy):
        assert outcome.hash
    else:
        assert all(re.match(r".*p\.yaml(:[0-9]+:[0-9]+)?: ", line) for line in outcome.splitlines())


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=40))
def test_binary_files_give_a_policy_error(raw, tmp_path_factory):
    with pytest.raises(PolicyError):
        load_text(raw, tmp_path_factory.getbasetemp())


def test_a_mapping_nested_too_deeply():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for source in (deep, {"schema": 1, "gradients": deep}, {"schema": 1, "gradients": [deep]}):
        with pytest.raises(PolicyError):
            Policy.load(source)


def test_every_one_of_many_errors_is_listed():
    """In a time that grows with them, not with their square."""
    wrong = {"when": {"nam": "x"}, "codec": {"kind": "dense"}}
    with pytest.raises(PolicyError) as caught:
        Policy.load({"schema": 1, "gradients": [wrong] * 10_000})
    assert len(str(caught.value).splitlines()) == 10_000


def silent(error: ValidationError) -> Any:
    """Pydantic's findings without its English, which may change with its version."""
    found = error.errors(include_url=False)
    for one in found:
        one["msg"] = ""
        for words in ("expected", "expected_tags", "discriminator"):
            one.get("ctx", {}).pop(words, None)
    return SimpleNamespace(errors=lambda **options: found)


def test_no_error_depends_on_pydantics_english(monkeypatch, tmp_path):
    texts = [BASE.replace(old, new, 1) for old, new, *_ in INVALID]
    said = [errors(text, tmp_path) for text in texts]
    monkeypatch.setattr(
        "tagc.policy.policy.translate", lambda error, *rest: translate(silent(error), *rest)
    )
    assert [errors(text, tmp_path) for text in texts] == said
