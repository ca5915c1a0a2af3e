"""Policies: loading, matching, hashing, and what a user is told when one is wrong."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tagc.policy import SMALL, Policy, PolicyError, Rule, policies
from tagc.policy_codecs import DenseCodec, Feedback
from tagc.roles import ROLES, ParamInfo

BASE = """\
schema: 1
about: a test
gradients:
  - when: {role: attention}
    codec:
      kind: sketch
      density: 0.2
      symbol: int8x4
    feedback: {kind: residual, dtype: bfloat16}
  - when: {}
    codec: {kind: dense}
"""
BIG = (512, 512)
NO_DENSE = {"kind": "sketch", "density": 0.1}


def load_text(text: str | bytes, folder: Path) -> Policy:
    file = folder / "p.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Policy.load(file)


def one_rule(when: dict, **rest) -> Policy:
    return Policy.load({"schema": 1, "gradients": [{"when": when, "codec": NO_DENSE, **rest}]})


def errors(text: str | bytes, folder: Path) -> list[str]:
    """The lines of the error, each without the folder: `p.yaml:3: key: ...`."""
    with pytest.raises(PolicyError) as caught:
        load_text(text, folder)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{folder}/p.yaml:") for line in lines)
    return [line.removeprefix(f"{folder}/") for line in lines]


# Sources


def test_load_from_every_source(tmp_path, monkeypatch):
    file = tmp_path / "p.yaml"
    policy = load_text(BASE, tmp_path)
    assert policy.name == str(file)
    assert policy.about == "a test"
    assert Policy.load(str(file)) == policy
    assert Policy.load(policy) is policy
    monkeypatch.chdir(tmp_path)
    assert Policy.load("p.yaml").name == "p.yaml"
    (tmp_path / "attn-only").write_text(BASE)
    assert Policy.load("./attn-only") == policy
    assert Policy.load("attn-only").name == "attn-only"
    data = {"schema": 1, "gradients": [{"when": {}, "codec": {"kind": "dense"}}]}
    assert Policy.load(data).name == "<dict>"
    assert Policy.load(data) == Policy.load("dense")


def test_the_content_of_a_file(tmp_path):
    first, second = load_text(BASE, tmp_path).gradients
    assert first.when.role == ("attention",)
    assert first.codec.model_dump() == {
        "kind": "sketch",
        "density": 0.2,
        "symbol": "int8x4",
        "support": "own",
        "warmup_steps": 0,
    }
    assert first.feedback == Feedback(kind="residual", dtype="bfloat16")
    assert second.codec == DenseCodec()


def test_core_schema_scalars(tmp_path):
    text = BASE.replace("0.2", "1e-3").replace("a test", "1:30").encode("utf-8-sig")
    policy = load_text(text, tmp_path)
    assert policy.gradients[0].codec.model_dump()["density"] == 0.001
    assert policy.about == "1:30"


def test_models_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Policy.load("dense").about = "changed"


# Built-in policies

COMPRESSED = {
    "all": {"attention", "mlp", "embedding", "head", "other"},
    "attn-only": {"attention"},
    "non-attn": {"mlp", "embedding", "head"},
    "mlp-only": {"mlp"},
    "dense": set(),
}
EVERY_ELEMENT = {
    "loco-4bit": "quantized",
    "hybrid": "quantized",
    "packed-20": "packed",
    "two-bit": "matrix",
    "one-bit": "matrix",
    "half-bit": "matrix",
    "fifth-bit": "matrix",
    "auto": "auto",
}


def test_policies_are_sorted_and_say_what_they_do():
    assert list(policies()) == sorted([*COMPRESSED, *EVERY_ELEMENT])
    assert all(about.endswith(".") for about in policies().values())


@pytest.mark.parametrize("name", COMPRESSED)
def test_builtin_compresses_its_roles(name: str):
    policy = Policy.load(name)
    compressed = set()
    for role in ROLES:
        index = policy.match(ParamInfo(name="w", shape=BIG, role=role, layer=0))
        if index is not None and policy.gradients[index].codec.compresses:
            compressed.add(role)
            rule = policy.gradients[index].model_dump()
            assert rule["codec"] == {
                "kind": "sketch",
                "density": 0.2,
                "symbol": "auto",
                "support": "own",
                "warmup_steps": 40,
            }
            assert rule["feedback"]["kind"] == "residual"
            assert rule["feedback"]["dtype"] == "float32"
    assert compressed == COMPRESSED[name]


@pytest.mark.parametrize(("name", "kind"), EVERY_ELEMENT.items())
def test_builtin_takes_every_matrix(name: str, kind: str):
    policy = Policy.load(name)
    for role in ROLES:
        index = policy.match(ParamInfo(name="w", shape=BIG, role=role, layer=0))
        if role in COMPRESSED["all"]:
            assert index is not None
            assert policy.gradients[index].codec.kind == kind
        else:
            assert index is None
    assert bool(policy.parameters) == (name in ("hybrid", "auto"))
    if name == "hybrid":
        assert [rule.codec.model_dump() for rule in policy.parameters] == [
            {"kind": "quantized", "bits": 8, "block": 256, "keep_for_backward": True}
        ]


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
        ("quantised, bits: 4", "dense", "4: gradients[0].codec.kind: unknown value 'quantised'; "
         "did you mean 'quantized'?"),
        ("quantized, bit: 4", "dense", "4: gradients[0].codec.bit: unknown key; did you mean"),
        ("quantized, bits: 3", "dense", "4: gradients[0].codec.bits: unknown value 3; "
         "available: 2, 4, 8"),
        ("quantized, block: 48", "dense", "gradients[0].codec.block: unknown value 48"),
        ("packed, density: 0", "dense", "gradients[0].codec.density: must be greater than 0"),
        ("dense, wire: bf16", "dense", "gradients[0].codec.wire: unknown value 'bf16'; "
         "did you mean 'bfloat16'?"),
        ("dense", "sketch", "7: parameters[0].codec.kind: unknown value 'sketch'; "
         "available: quantized, dense"),
        ("dense", "quantized, keep: true", "parameters[0].codec.keep: unknown key"),
    ],
)  # fmt: skip
def test_errors_of_every_codec(gradient: str, parameter: str, message: str, tmp_path):
    [line] = errors(NEW % (gradient, parameter), tmp_path)
    assert message in line


@pytest.mark.parametrize(
    ("codec", "feedback", "message"),
    [
        ({"kind": "packed", "density": 0.1}, {"kind": "average"}, "would forget most"),
        ({"kind": "sketch", "density": 0.1}, {"kind": "average"}, "would forget most"),
        ({"kind": "packed", "density": 0.1}, {"beta": 0.5}, "only the kind 'average' has them"),
        ({"kind": "packed", "density": 0.1, "support": "shared"}, {"kind": "none"}, "residuals"),
        ({"kind": "sketch", "density": 0.1, "support": "shared"}, {"kind": "none"}, "residuals"),
        ({"kind": "dense", "wire": "bfloat16"}, {"kind": "residual"}, "has no effect"),
        ({"kind": "quantized"}, {"kind": "average", "beta": 1.0}, "less than 1"),
    ],
)
def test_feedback_must_go_with_the_codec(codec: dict, feedback: dict, message: str):
    rule = {"when": {}, "codec": codec, "feedback": feedback}
    with pytest.raises(PolicyError, match=message):
        Policy.load({"schema": 1, "gradients": [rule]})


@pytest.mark.parametrize("kind", ["sketch", "packed"])
def test_replicas_have_no_owner_who_could_choose_for_all(kind: str):
    own = {"when": {}, "codec": {"kind": kind, "density": 0.1}}
    shared = {"when": {}, "codec": {**own["codec"], "support": "shared"}}
    with pytest.raises(PolicyError) as caught:
        Policy.load({"schema": 1, "gradients": [shared], "replicas": [own, shared]})
    [line] = str(caught.value).splitlines()
    assert "replicas[1].codec.support: 'shared' is the choice of a shard's owner" in line
    Policy.load({"schema": 1, "gradients": [shared], "replicas": [own]})


@pytest.mark.parametrize(
    ("codec", "kind"),
    [
        ({"kind": "dense"}, "none"),
        ({"kind": "dense", "wire": "bfloat16"}, "none"),
        ({"kind": "sketch", "density": 0.1}, "residual"),
        ({"kind": "packed", "density": 0.1}, "residual"),
        ({"kind": "quantized"}, "average"),
        ({"kind": "auto"}, "average"),
    ],
)
def test_feedback_that_fits_is_the_default(codec: dict, kind: str):
    policy = Policy.load({"schema": 1, "gradients": [{"when": {}, "codec": codec}]})
    assert policy.gradients[0].feedback.kind == kind


# Matching


@pytest.mark.parametrize(
    ("when", "name", "expected"),
    [
        ({}, "layers.0.mlp.w1.weight", True),
        ({"role": "mlp"}, "layers.0.mlp.w1.weight", True),
        ({"role": "mlp"}, "layers.0.attention.wq.weight", False),
        ({"role": ["head", "mlp"]}, "layers.0.mlp.w1.weight", True),
        ({"name": "*.mlp.*"}, "layers.0.mlp.w1.weight", True),
        ({"name": "*.MLP.*"}, "layers.0.mlp.w1.weight", False),
        ({"name": "mlp"}, "layers.0.mlp.w1.weight", False),
        ({"name": ["head.*", "layers.[01].*"]}, "layers.0.mlp.w1.weight", True),
        ({"name": "layers.0.mlp.*"}, "module.layers.0._orig_mod.mlp.w1.weight", True),
        ({"role": "mlp", "name": "*.w2.*"}, "layers.0.mlp.w1.weight", False),
        ({"layers": "1-2"}, "layers.0.mlp.w1.weight", False),
        ({"layers": "1-2"}, "layers.1.mlp.w1.weight", True),
        ({"layers": [1, 2]}, "layers.2.mlp.w1.weight", True),
        ({"layers": "1-2"}, "layers.3.mlp.w1.weight", False),
        ({"layers": 3}, "layers.3.mlp.w1.weight", True),
        ({"layers": "0-99"}, "lm_head.weight", False),
        ({"min_numel": 512 * 512}, "layers.0.mlp.w1.weight", True),
        ({"min_numel": 512 * 512 + 1}, "layers.0.mlp.w1.weight", False),
        ({"min_numel": 512 * 512, "max_numel": 512 * 512}, "layers.0.mlp.w1.weight", True),
        ({"max_numel": 512 * 512}, "layers.0.mlp.w1.weight", True),
        ({"max_numel": 512 * 512 - 1}, "layers.0.mlp.w1.weight", False),
    ],
)
def test_conditions(when: dict, name: str, expected: bool):
    index = one_rule(when).match(ParamInfo.of(name, BIG))
    assert index == (0 if expected else None)


@pytest.mark.parametrize(
    ("when", "shape", "expected"),
    [
        ({}, (SMALL,), False),
        ({}, (1, SMALL), True),
        ({}, (1, SMALL - 1), False),
        ({"role": "mlp"}, (SMALL * 4,), False),
        ({"min_numel": 8}, (1, 8), True),
        ({"min_numel": 8}, (SMALL,), False),
        ({"name": "*"}, (8,), True),
        ({"name": "*", "min_numel": 9}, (8,), False),
    ],
)
def test_small_and_flat_parameters_are_dense_unless_named(when, shape, expected):
    index = one_rule(when).match(ParamInfo.of("layers.0.mlp.w1.bias", shape))
    assert index == (0 if expected else None)


def test_a_dense_rule_matches_small_parameters_too():
    assert Policy.load("dense").match(ParamInfo.of("norm.weight", (8,))) == 0


def test_the_first_matching_rule_wins(tmp_path):
    policy = load_text(BASE, tmp_path)
    assert policy.match(ParamInfo.of("layers.0.attention.wq.weight", BIG)) == 0
    assert policy.match(ParamInfo.of("layers.0.attention.wq.bias", (512,))) == 1
    assert policy.match(ParamInfo.of("layers.0.mlp.w1.weight", BIG)) == 1


# Defaults and hash


def test_feedback_by_default_follows_the_codec():
    assert one_rule({}).gradients[0].feedback == Feedback(kind="residual", dtype="float32")
    assert Policy.load("dense").gradients[0].feedback.kind == "none"
    assert Rule.model_validate({"when": {}, "codec": {"kind": "dense"}}).feedback.kind == "none"


SAME = [
    (one_rule({"layers": "3-3"}), one_rule({"layers": 3})),
    (one_rule({"layers": "0 - 4"}), one_rule({"layers": [0, 4]})),
    (one_rule({"role": "mlp"}), one_rule({"role": ["mlp", "mlp"]})),
    (one_rule({"role": ["mlp", "head"]}), one_rule({"role": ["head", "mlp"]})),
    (one_rule({"name": ["a", "b"]}), one_rule({"name": ("b", "a")})),
    (one_rule({}), one_rule({"role": None}, feedback={"dtype": "float32"})),
]
DIFFERENT = [
    (one_rule({}), one_rule({"layers": 3})),
    (one_rule({}), one_rule({"min_numel": 0})),
    (one_rule({}), one_rule({}, feedback={"dtype": "bfloat16"})),
    (one_rule({}), one_rule({}, feedback={"kind": "none"})),
    (Policy.load("all"), Policy.load("dense")),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_meaning_gives_equal_hash(one: Policy, other: Policy):
    assert one.hash == other.hash
    assert one == other
    assert len({one, other}) == 1


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_meaning_gives_another_hash(one: Policy, other: Policy):
    assert one.hash != other.hash
    assert one != other


def test_alternatives_have_one_order():
    # Python's order of a set of strings differs from process to process.
    assert one_rule({"role": ROLES[::-1]}).gradients[0].when.role == tuple(sorted(ROLES))


def test_the_hash_is_pinned():
    # A new field changes it: a hash stored with a checkpoint no longer names the same policy.
    assert Policy.load("dense").hash == (
        "38317ef07b5f7bfd26fe6b12ee13664fbba689b890a82cb25e592cb41f153492"
    )


def test_about_and_source_are_not_hashed(tmp_path):
    changed = load_text(BASE.replace("a test", "another"), tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", changed.hash)
    assert changed.hash == load_text(BASE, tmp_path).hash


def test_the_order_of_rules_is_hashed(tmp_path):
    policy = load_text(BASE, tmp_path)
    assert policy.hash != policy.model_copy(update={"gradients": policy.gradients[::-1]}).hash


# Errors

AT = "gradients[0]."
INVALID = [
    # old text, new text, start of the only error line, its end or a part of it
    ("density", "densty", f"7: {AT}codec.densty: unknown key;", "did you mean 'density'?"),
    ("about:", "abuot:", "2: abuot: unknown key;", "did you mean 'about'?"),
    ("{role:", "{rôle:", f"4: {AT}when.rôle: unknown key;", "did you mean 'role'?"),
    ("feedback:", "feedbck:", f"9: {AT}feedbck: unknown key;", "did you mean 'feedback'?"),
    (", dtype:", ", type:", f"9: {AT}feedback.type: unknown key;", "did you mean 'dtype'?"),
    ("role: att", "role: at", f"4: {AT}when.role: unknown value 'atention'", "mean 'attention'?"),
    ("attention", "[mlp, HEAD]", f"4: {AT}when.role[1]: unknown value 'HEAD'", "mean 'head'?"),
    ("sketch", "skech", f"6: {AT}codec.kind: unknown value 'skech'", "did you mean 'sketch'?"),
    ("int8x4", "int8", f"8: {AT}codec.symbol: unknown value 'int8'", "did you mean 'int8x4'?"),
    ("residual", "resid", f"9: {AT}feedback.kind: unknown value 'resid'", "mean 'residual'?"),
    ("bfloat16", "bf16", f"9: {AT}feedback.dtype: unknown value 'bf16'", "mean 'bfloat16'?"),
    ("kind: dense", "kind: 7", "11: gradients[1].codec.kind: unknown value 7;", "matrix, dense"),
    ("0.2", "0", f"7: {AT}codec.density: must be greater than 0", "not 0"),
    ("0.2", "1.5", f"7: {AT}codec.density: must be less than or equal to 1", "not 1.5"),
    ("0.2", "true", f"7: {AT}codec.density: must be a valid number", "not True"),
    ("0.2", "'0.2'", f"7: {AT}codec.density: must be a valid number", "not '0.2'"),
    ("0.2", ".nan", f"7: {AT}codec.density: must be a finite number", "not nan"),
    ("0.2", ".inf", f"7: {AT}codec.density: must be a finite number", "not inf"),
    ("0.2", "-.inf", f"7: {AT}codec.density: must be a finite number", "not -inf"),
    ("0.2", "!!float x", f"7: {AT}codec.density: 'x' is not a valid float", ""),
    ("kind: sketch\n      ", "", f"5: {AT}codec.kind: the key is missing", ""),
    ("symbol: int8x4", "density: 1", f"8: {AT}codec.density: duplicate key", "first on line 7"),
    ("density: 0.2\n      ", "", f"5: {AT}codec.density: the key is missing", ""),
    ("when: {role: attention}\n    ", "", "4: gradients[0].when: the key is missing", ""),
    ("schema: 1", "schema: true", "1: schema: must be 1", "not True"),
    ("schema: 1", "schema: 1.0", "1: schema: must be 1", "not 1.0"),
    ("schema: 1", "schema: 2", "1: schema: must be 1", "not 2"),
    (
        "schema",
        "schme",
        "1: schme: unknown key; did you mean 'schema'?",
        "schema, about, gradients",
    ),
    ("schema: 1\n", "", "1: schema: the key is missing", ""),
    ("schema: 1", "schema: 1\nschema: 1", "2: schema: duplicate key", "first on line 1"),
    ("about: a", "3: a", "2: a key is not a string", ""),
    ("about: a", "? [a]\n: a", "2: a key is not a string", ""),
    ("a test", "&a x\n<<: {about: y}", "3: '<<': unknown key", ""),
    ("a test", "!!python/name:os.system x", "2: about: the YAML tag", "is not supported"),
    ("a test", "!!python/object/apply:os.abort []", "2: about: the YAML tag", "is not supported"),
    ("{}", "!mine {}", "10: gradients[1].when: the YAML tag '!mine' is not supported", ""),
    ("a test", "!mine x", "2: about: the YAML tag '!mine' is not supported", ""),
    ("a test", '"\\ud800"', "2: about: '\\ud800' is not a valid str", ""),
    ("a test", '"\\UFFFFFFFF"', "2: invalid YAML", ""),
    ("a test", "\x07", "2: invalid YAML: the character U+0007", ""),
    ("a test", "[1, 2", "3: invalid YAML", "flow sequence"),
    ("a test", "5", "2: about: must be a valid string", "not 5"),
    ("role: attention", "role: []", f"4: {AT}when.role: must be a string or", "not []"),
    ("role: attention", "role: 5", f"4: {AT}when.role: must be a string or", "not 5"),
    ("role: attention", "name: ''", f"4: {AT}when.name: must have at least 1", ""),
    ("role: attention", "name: *.wq", "4: invalid YAML", "quote a glob that starts with '*'"),
    ("role: attention", "name: *wq", f"4: {AT}when.name: YAML aliases", "quote a glob"),
    ("role: attention", "min_numel: true", f"4: {AT}when.min_numel: must be a valid int", ""),
    ("role: attention", "min_numel: 2.0", f"4: {AT}when.min_numel: must be a valid int", ""),
    ("role: attention", "max_numel: -1", f"4: {AT}when.max_numel: must be greater", "not -1"),
    ("role: attention", "min_numel: 2, max_numel: 1", f"4: {AT}when: min_numel 2 is above", ""),
    ("{kind: dense}", "dense", "11: gradients[1].codec: must be a mapping", "not 'dense'"),
    ("{}", "", "10: gradients[1].when: must be a mapping", "not None"),
    ("residual", "none", f"9: {AT}feedback: dtype 'bfloat16' has no effect", ""),
    ("{kind: dense}", "{kind: dense}\n    feedback: {}", "12: gradients[1].feedback: kind", "out"),
    *(
        ("role: attention", f"layers: {layers}", f"4: {AT}when.layers: must be a range", "")
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
            "[]",
        )
    ),
]


def test_the_base_of_the_error_cases_is_valid(tmp_path):
    assert len(load_text(BASE, tmp_path).gradients) == 2


@pytest.mark.parametrize(("old", "new", "start", "part"), INVALID)
def test_error_names_line_key_and_nearest_spelling(old, new, start, part, tmp_path):
    assert old in BASE
    [line] = errors(BASE.replace(old, new, 1), tmp_path)
    assert line.startswith(f"p.yaml:{start}")
    assert part in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 1", "p.yaml:1: must be a mapping, not [1]"),
        ("5", "p.yaml:1: must be a mapping, not 5"),
        (b"schema: 1\nabout: \xff", "p.yaml:2: not UTF-8 text"),
        ("a: b\n---\nc: d", "p.yaml:2: invalid YAML: expected a single document"),
        ("[" * 5000, "p.yaml:1: invalid YAML: nested too deeply"),
        ("schema: 1\ngradients: []", "p.yaml:2: gradients: must be a non-empty list of rules"),
        ("schema: 1\ngradients: {}", "p.yaml:2: gradients: must be a non-empty list of rules"),
        ("schema: 1\ngradients: &x [*x]", "p.yaml:2: gradients[0]: YAML aliases"),
        ("schema: 1\ngradients: [5]", "p.yaml:2: gradients[0]: must be a mapping, not 5"),
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
        ["p.yaml:2", "abot"],
        ["p.yaml:3", "schema"],
        ["p.yaml:5", "gradients[0].when.role"],
        ["p.yaml:8", "gradients[0].codec.density"],
        ["p.yaml:9", "gradients[0].codec.symbol"],
        ["p.yaml:10", "gradients[0].feedback.dtype"],
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "attn_only",
            "did you mean 'attn-only'? available: all, attn-only, auto, dense, fifth-bit",
        ),
        ("zzz", "no built-in policy 'zzz'; available: all, attn-only"),
        ("", "no built-in policy ''; available"),
        ("missing/p", "missing/p: cannot be read: No such file"),
        ("missing.yml", "missing.yml: cannot be read: No such file"),
        (Path("missing"), "missing: cannot be read: No such file"),
        ("a\0b.yaml", "cannot be read"),
        (Path(), ".: cannot be read: Is a directory"),
        (5, "not int"),
        (None, "not NoneType"),
        ({}, "<dict>: schema: the key is missing\n<dict>: gradients: the key is missing"),
        ({1: 2}, "<dict>: [1]: Keys should be strings"),
        ({"\ud800": 1, "schema": 1}, "<dict>: must be a valid string"),
        ({"schema": 10**5000, "gradients": [{}]}, "<dict>: schema: "),
        (
            {"schema": 1, "gradients": [{"when": {"role": [10**5000]}, "codec": NO_DENSE}]},
            "<dict>: gradients[0].when.role[0]: unknown value <int>",
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


@settings(max_examples=200, deadline=None)
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
        assert all(re.match(r".*p\.yaml(:[0-9]+)?: ", line) for line in outcome.splitlines())


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=40))
def test_binary_files_give_a_policy_error(raw, tmp_path_factory):
    with pytest.raises(PolicyError):
        load_text(raw, tmp_path_factory.getbasetemp())
