"""Specs and their knobs: one declaration each, from which checks, sentences, descriptions and tables follow."""

from __future__ import annotations

import dataclasses
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import ALL

import gradcomp
from gradcomp import knobs
from gradcomp.compressors.dense import Dense
from gradcomp.compressors.orq import Orq
from gradcomp.compressors.topk import TopK
from gradcomp.core.by_host import ByHost
from gradcomp.engine.feedback import Feedback
from gradcomp.knobs import Knob, knob
from gradcomp.spec import KNOB_CLASSES, kind_of

ROOT = Path(__file__).resolve().parents[1]
KINDS = [*map(kind_of, gradcomp.names()), *KNOB_CLASSES]
DECLARED = [(kind, field) for kind in KINDS for field in knobs.knobs_of(kind).values()]
all_knobs = pytest.mark.parametrize(
    "kind,field", DECLARED, ids=lambda value: getattr(value, "name", getattr(value, "__name__", ""))
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_a_declared_knob(kind: Any) -> None:
    assert [field.name for field in dataclasses.fields(kind) if field.name not in {*knobs.knobs_of(kind), "inner"}] == []


@all_knobs
def test_every_knob_has_a_line_of_help_and_a_default_in_its_range(kind: Any, field: dataclasses.Field[Any]) -> None:
    own = knobs.declaration(field)
    assert own.help and "\n" not in own.help and len(own.help) <= 110, field.name
    assert own.allows(field.default)
    assert own.range or isinstance(field.default, bool), f"{field.name} may be anything"


@pytest.mark.parametrize(
    "own,inside,outside,said",
    [
        (Knob(above=0, most=1), [1e-9, 0.5, 1], [0, -1, 1.1, math.nan, math.inf], "in (0, 1]"),
        (Knob(least=0, below=1), [0, 0.999], [1, -1e-9], "in [0, 1)"),
        (Knob(least=32), [32, 10**9], [31, -math.inf, math.inf], "at least 32"),
        (Knob(above=0), [1e-9], [0], "above 0"),
        (Knob(most=3), [3, -9], [4], "at most 3"),
        (Knob(below=3), [2.9], [3], "below 3"),
        (Knob(least=0, multiple=16), [0, 16, 64], [8, -16], "at least 0 and a multiple of 16"),
        (Knob(least=0, below=1, word="auto"), [0, "auto"], [1, -1], "auto or in [0, 1)"),
        (Knob(choices=("a", "b")), ["a"], ["c", ""], "one of a, b"),
        (Knob(choices=(3, 5)), [3], [4], "one of 3, 5"),
        (Knob(), [True, "x"], [math.nan], ""),
    ],
)
def test_a_range_allows_its_values_alone(own: Knob, inside: list[Any], outside: list[Any], said: str) -> None:
    assert all(map(own.allows, inside)) and not any(map(own.allows, outside))
    assert own.range == said


REFUSED = [
    ("topk:ratio=2", "topk: ratio=2 must be in (0, 1]"),
    ("topk:ratio=nan", "topk: ratio=nan must be in (0, 1]"),
    ("topk:wire=compcat", "topk: wire=compcat must be one of compact, exact, coarse (did you mean 'compact'?)"),
    ("topk:momentum=1", "topk: momentum=1 must be auto or in [0, 1)"),
    ("gs_sgd:columns=20", "gs_sgd: columns=20 must be at least 0 and a multiple of 16"),
    ("orq:levels=4", "orq: levels=4 must be one of 3, 5, 9"),
    ("sdagc:flush=-1", "sdagc: flush=-1 must be at least 0"),
    ("orq:sigmas=inf", "orq: sigmas=inf must be at least 0 and finite"),
    ("gs_sgd:compression=0.5", "gs_sgd: compression=0.5 must be above 1, or 0 to leave it unused"),
    (
        "gs_sgd:columns=16,compression=9",
        "gs_sgd:columns=16,compression=9: compression sets the number of columns; remove columns or compression",
    ),
    ("gs_sgd:compression=25", "gs_sgd:compression=25: candidates=4 leave no room for a table; lower ratio=0.01"),
    ("atuo", "there is no compressor 'atuo' (did you mean 'auto'?)"),
    ("topkk", "there is no compressor 'topkk' (did you mean 'topk'?); known: bingrad, blocks, dense"),
    ("", "topk, auto"),
    ("fp16", "there is no compressor 'fp16' (did you mean 'half:form=fp16'?)"),
    ("BF16", "there is no compressor 'BF16' (did you mean 'half'?)"),
    ("none", "there is no compressor 'none' (did you mean 'dense'?)"),
    ("topk:ratoi=1", "topk has no knob 'ratoi' (did you mean 'ratio'?); known: ratio, route, wire, feedback, momentum"),
    ("dense:ratio=1", "dense has no knob 'ratio'; known: feedback, momentum"),
    ("topk:ratio", "'ratio' is not of the form knob=value"),
    ("topk:ratio=", "'ratio=' is not of the form knob=value"),
    ("topk:ratio=a", "'topk:ratio=a': ratio=a must be a number"),
    ("topk:ratio=0.1:momentum=0", "commas separate knobs (did you mean 'topk:ratio=0.1,momentum=0'?)"),
    ("topk; *.bias=topk:ratio=1, wire=exact : momentum = 0", "knobs (did you mean 'topk:ratio=1,wire=exact,momentum=0'?)"),
    ("topk:nesterov=maybe", "'topk:nesterov=maybe': nesterov=maybe must be true or false"),
    ("qsgd:levels=5.5", "'qsgd:levels=5.5': levels=5.5 must be a whole number"),
    ("topk:0.01", "'0.01' is not of the form knob=value; known knobs: ratio, route, wire, feedback"),
    ("TopK", "there is no compressor 'TopK' (did you mean 'topk'?)"),
    ("gs-sgd", "there is no compressor 'gs-sgd' (did you mean 'gs_sgd'?)"),
    ("topk ratio=0.01", "there is no compressor 'topk ratio=0.01' (did you mean 'topk:ratio=0.01'?)"),
    ("TopK(ratio=0.01, momentum=0.9)", "(did you mean 'topk:ratio=0.01,momentum=0.9'?)"),
    ("topk,ratio=0.01", "(did you mean 'topk:ratio=0.01'?)"),
    ("topk ratio=0.01:momentum=0.9", "(did you mean 'topk:ratio=0.01'?)"),
    (
        "topk:ratio=0.01;momentum=0.9",
        "';' begins a rule for layers, but momentum is a knob (did you mean 'topk:ratio=0.01,momentum=0.9'?)",
    ),
    ("topk; ratio=0.01", "but ratio is a knob (did you mean 'topk:ratio=0.01'?)"),
    ("topk;momentum", "but momentum is a knob (did you mean 'topk:momentum'?)"),
    ("topk; *.bias", "'*.bias' is not of the form pattern=spec"),
    ("topk:ratio=1,ratio=1", "the knob 'ratio' is given twice"),
    ("topk:nesterov=true", "nesterov=true needs a momentum above 0"),
    ("topk; =dense", "'=dense' is not of the form pattern=spec"),
    ("topk; *.bias=dens", "there is no compressor 'dens' (did you mean 'dense'?)"),
    (
        "topk; *.bias=dense:clip=1,clip_by=model",
        "needs the whole model in one bucket and cannot be used in rules for layers",
    ),
    ("topk; a=dense; a=sign", "the pattern 'a' is given twice"),
    ("topk:by_host=true,clip=-1", "topk: clip=-1 must be at least 0"),
    ("topk:clip_by=bucket", "topk: clip_by=bucket must be one of layer, model"),
    ("topk:warmup=-1", "topk: warmup=-1 must be at least 0"),
    ("dense:warmup=3", "dense has no gentler form to warm up with"),
    ("lgc:warmup=5", "lgc has no gentler form to warm up with"),
    ("lgc:by_host=true", "lgc cannot use by_host: it treats the first and last layers"),
    ("lgc:max_code_error=0", "lgc: max_code_error=0 must be above 0"),
    ("lgc:max_code_error=nan", "max_code_error=nan must be above 0"),
    ("sdagc:route=ring", "sdagc: route=ring must be one of allgather, tree, split"),
    ("sdagc:feedback=false,sam=0.5", "remove feedback=false or sam=0.5"),
    ("sdagc:feedback=false,flush=5", "remove feedback=false or flush=5"),
    ("sdagc:lam=3,density=0.02", ": density=0.02 steers lam, and lam=3 fixes it; remove lam=3 or density=0.02"),
    ("sdagc:lam=3,lr_revision=density", ": lr_revision=density steers lam, and lam=3 fixes it; remove lam=3 or lr"),
    ("sdagc:cap=0.1", "cap=0.1 bounds bursts"),
    ("sdagc:sam=0.9,momentum=0.9", "momentum=0.9 acts on top of sdagc:sam=0.9's own momentum 0.9"),
    ("sdagc:density=0.01,lr_revision=density,by_host=true", "cannot use by_host: "),
    ("qsgd:feedback=true", "; set norm=max or more levels"),
    *((f"{spec},feedback=true", "would grow without end") for spec in ("orq:levels=3", "qsgd:levels=9", "linear:levels=3")),
    ("terngrad:sigmas=4,feedback=true", "would grow without end"),
    ("blocks:decay=0.9", "decay acts on a residual that is kept; write feedback=true"),
]


@pytest.mark.parametrize("spec,sentence", REFUSED)
def test_a_wrong_spec_gets_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        gradcomp.make(spec)


@pytest.mark.parametrize(
    "spec", ["lgc:max_code_error=inf", "sdagc:lam=auto,density=0.02", "sdagc:lam=3,cap=0.1", "topk:decay=0.95"]
)
def test_what_is_next_to_a_wrong_spec_is_one(spec: str) -> None:
    assert gradcomp.make(spec)


def test_numbers_of_other_libraries_become_pythons() -> None:
    made = TopK(np.float32(0.25)), Orq(levels=np.int64(5)), TopK(1)
    assert [str(compressor) for compressor in made] == ["topk:ratio=0.25", "orq:levels=5", "topk:ratio=1"]
    assert [type(value) for value in (made[0].ratio, made[1].levels, made[2].ratio)] == [float, int, float]
    with pytest.raises(ValueError, match=r"ratio=inf must be in \(0, 1\]"):
        TopK(10**400)
    with pytest.raises(ValueError, match="clip=inf must be at least 0 and finite"):
        Feedback(TopK(), clip=10**400)


@pytest.mark.parametrize("value", ["0.1", None, True])
def test_a_value_of_the_wrong_type_gets_a_sentence(value: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"topk: ratio={value!r} must be a number")):
        TopK(value)


@pytest.mark.parametrize("spec", ALL)
def test_the_canonical_spec_means_the_same(spec: str) -> None:
    made = gradcomp.make(spec)
    assert gradcomp.make(str(made)) == made
    assert str(gradcomp.make(str(made))) == str(made)


@pytest.mark.parametrize(
    "one,other",
    [
        ("topk", "topk:ratio=0.01"),
        ("topk:ratio=0.01,momentum=0.9", " topk : momentum=0.90 , ratio=1e-2"),
        ("orq", "orq:feedback=false"),
        ("sdagc; *.bias=dense", "sdagc:lam=auto ;*.bias = dense:feedback=no"),
        ("dense", "dense:by_host=false"),
        ("sign", "sign:feedback=true"),
        ("sdagc:lam=0", "sdagc:lam=-0.0"),
        ("dense", "dense:nesterov=false,feedback=false"),
        ("topk", "topk;"),
    ],
)
def test_specs_that_mean_the_same_are_the_same(one: str, other: str) -> None:
    assert gradcomp.make(one) == gradcomp.make(other)
    assert str(gradcomp.make(one)) == str(gradcomp.make(other))


@pytest.mark.parametrize(
    "spec",
    [
        "orq:levels=9,feedback=true",
        "dense:momentum=0.9",
        "dense:feedback=true,momentum=0.9",
        "topk:ratio=0.1,momentum=0.5,by_host=true",
        "dense:by_host=true",
        "sdagc:by_host=true; b*=topk:by_host=true",
    ],
)
def test_wrappers_are_in_the_canonical_spec(spec: str) -> None:
    made = gradcomp.make(spec)
    assert gradcomp.make(str(made)) == made
    assert sorted(re.split("[:,;= ]+", str(made))) == sorted(re.split("[:,;= ]+", spec))


@given(value=st.floats(min_value=1e-300, max_value=1, allow_nan=False))
def test_a_value_survives_its_canonical_form(value: float) -> None:
    assert gradcomp.make(str(gradcomp.make(TopK(value)))) == gradcomp.make(TopK(value))


@pytest.mark.parametrize("name", gradcomp.names())
def test_a_description_has_every_knob_with_default_range_and_help(name: str) -> None:
    text = " ".join(gradcomp.describe(name).split())
    made = gradcomp.make(name)
    for kind in (kind_of(name), *KNOB_CLASSES):
        for knob_, default, range_, help_ in knobs.rows(made if type(made) is kind else kind):
            assert f"{knob_}={default} {help_} [{range_}]" in text


def test_no_knob_of_an_algorithm_has_a_common_ones_name() -> None:
    common = {name for kind in KNOB_CLASSES for name in knobs.knobs_of(kind)}
    assert all(common.isdisjoint(knobs.knobs_of(kind_of(name))) for name in gradcomp.names())


@dataclasses.dataclass(frozen=True)
class Own(TopK):
    """No spec can name it."""

    weights: tuple[int, ...] = (1, 2)


def test_compressors_that_no_spec_names_are_told_apart() -> None:
    texts = {str(gradcomp.make(own)) for own in (TopK(0.5), Own(0.5), Own(0.25), Own(0.5, weights=(3,)))}
    assert len(texts) == 4
    assert f"{__name__}.Own:ratio=0.5,route='allgather',wire='compact',weights=(1, 2)" in texts


@pytest.mark.parametrize("pattern", ["", " a", "a=b", "a;b", 5])
def test_a_pattern_that_no_spec_can_say_is_refused(pattern: Any) -> None:
    with pytest.raises(ValueError, match="is not a pattern of layers' names"):
        gradcomp.by_layer({pattern: "dense"}, "topk")


def test_wrappers_go_around_once() -> None:
    with pytest.raises(ValueError, match="ByHost cannot wrap topk, which must be outermost"):
        ByHost(Feedback(TopK()))
    assert gradcomp.make(Feedback(Dense(), feedback=False)) == Dense()


def test_help_shows_the_knobs() -> None:
    assert "ratio: share of entries sent" in (TopK.__doc__ or "")
    assert "sigmas: standard deviations from 0" in (kind_of("terngrad").__doc__ or ""), "also those of a base"
    assert "momentum: auto: the residual applies the optimizer's momentum" in (Feedback.__doc__ or "")


def test_a_knob_of_a_users_compressor_is_checked() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(TopK):
        beta: float = knob(0.5, "a share", above=0, below=1)

    assert Own().beta == 0.5
    with pytest.raises(ValueError, match=rf"{__name__}\..*Own: beta=1 must be in \(0, 1\)"):
        Own(beta=1)


def test_the_command_describes() -> None:
    def said(*words: str) -> str:
        return subprocess.run([sys.executable, "-m", "gradcomp", *words], capture_output=True, text=True, check=True).stdout

    assert said("describe", "topk") == gradcomp.describe("topk") + "\n"
    own = said("describe", "topk:ratio=0.25,momentum=0.5,by_host=true")
    assert own == gradcomp.describe("topk:ratio=0.25,momentum=0.5,by_host=true") + "\n"
    for part in ("  ratio=0.25  ", "(default 0.01)", "  momentum=0.5  ", "  by_host=true  ", "  nesterov=false  "):
        assert part in own
    assert own.count("(default ") == 3
    wrong = subprocess.run([sys.executable, "-m", "gradcomp", "describe", "topkk"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "did you mean 'topk'?" in wrong.stderr


def test_the_tables_in_the_documentation_are_the_declarations(tmp_path: Path) -> None:
    pages = [ROOT / "docs" / "which-spec.md", *(ROOT / "docs" / "algorithms").glob("*.md")]
    for page in pages:
        other = tmp_path / page.relative_to(ROOT / "docs")
        other.parent.mkdir(exist_ok=True)
        other.write_text(re.sub(r"(<!-- knobs: \w+ -->).*?(<!-- end of)", r"\1old\2", page.read_text(), flags=re.DOTALL))
    runpy.run_path(str(ROOT / "scripts" / "knobs"))["write"](tmp_path)
    for page in pages:
        assert page.read_text() == (tmp_path / page.relative_to(ROOT / "docs")).read_text(), "run: scripts/knobs"


# --- Specs


def test_specs_make_their_compressors() -> None:
    assert gradcomp.make("topk") == Feedback(TopK())
    assert gradcomp.make(" topk : ratio = 0.5 , nesterov = true , momentum=0.5") == Feedback(
        TopK(ratio=0.5), momentum=0.5, nesterov=True
    )
    assert gradcomp.make("dense:momentum=0.9") == Feedback(Dense(), momentum=0.9, feedback=False)
    assert gradcomp.make(TopK(ratio=0.5)) == Feedback(TopK(ratio=0.5))


@pytest.mark.parametrize("spec", ["topk:ratio=0.25; *.bias=dense", "topk:ratio=0.25;*.bias=dense; embed*=qsgd:levels=5"])
def test_rules_for_layers_are_listed_beside_the_defaults_own_values(spec: str) -> None:
    said = gradcomp.describe(spec)
    opening = said.partition("\n\n")[0]
    default, *rules = (part.strip() for part in spec.split(";"))
    assert opening == default and "\n  ratio=0.25 " in said
    listed = said.partition("Rules for layers; the first that matches decides:\n")[2].splitlines()
    assert listed == ["  " + " = ".join(rule.split("=", 1)) for rule in rules]


def test_rules_may_follow_a_bare_name_or_an_empty_end() -> None:
    said = gradcomp.describe("topk; *.bias=dense")
    assert said.startswith(gradcomp.describe("topk")) and said.endswith("\n  *.bias = dense")
    assert gradcomp.describe("topk;") == gradcomp.describe("topk")


def test_a_rule_that_make_refuses_is_not_described() -> None:
    with pytest.raises(ValueError, match="did you mean 'topk'"):
        gradcomp.describe("topk; *.bias=topkk")


def test_a_layer_may_have_the_name_of_a_knob() -> None:
    assert str(gradcomp.make("topk; ratio=dense; momentum=topk:ratio=0.1")) == "topk; ratio=dense; momentum=topk:ratio=0.1"


@pytest.mark.parametrize(
    "spec,said", [(TopK, "the class TopK; pass a spec such as .*, or a compressor object"), (3, "a int; pass a spec")]
)
def test_an_object_that_is_no_spec_is_refused(spec: object, said: str) -> None:
    with pytest.raises(TypeError, match=f"the spec is {said}"):
        gradcomp.make(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize("name,feedback", [("topk", "true"), ("sign", "true"), ("orq", "false"), ("bingrad", "false")])
def test_the_default_of_feedback_is_the_compressors(name: str, feedback: str) -> None:
    assert f"\n  feedback={feedback} " in gradcomp.describe(name)
    assert str(gradcomp.make(f"{name}:feedback={feedback}")) == name
    other = {"true": "false", "false": "true"}[feedback]
    spec = f"{name}:feedback={other}{',sigmas=1.5' if name == 'orq' else ''}"
    assert f"(default {feedback})" in gradcomp.describe(spec).split(f"feedback={other} ")[1].split("momentum=")[0]


@pytest.mark.parametrize(
    ("spec", "act_on_updates"),
    [
        ("dense", False),
        ("half", False),
        ("blocks", False),
        ("topk:feedback=false", False),
        ("orq:levels=9", False),
        ("orq:levels=3", True),
        ("terngrad", True),
        ("qsgd", True),
        ("topk", True),
        ("sign", True),
        ("blocks:feedback=true", True),
    ],
)
def test_what_is_rounded_finely_travels_as_gradients_and_what_is_late_or_coarse_as_updates(
    spec: str, act_on_updates: bool
) -> None:
    assert gradcomp.make(spec).traits.acts_on_updates is act_on_updates
