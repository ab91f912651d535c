"""Knobs: one declaration each, from which checks, specs, descriptions and tables follow."""

from __future__ import annotations

import dataclasses
import math
import re
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


@pytest.mark.parametrize(
    "spec,sentence",
    [
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
    ],
)
def test_a_value_out_of_range_gets_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        gradcomp.make(spec)


def test_numbers_of_other_libraries_become_pythons() -> None:
    made = TopK(np.float32(0.25)), Orq(levels=np.int64(5)), TopK(1)
    assert [str(compressor) for compressor in made] == ["topk:ratio=0.25", "orq:levels=5", "topk:ratio=1"]
    assert [type(value) for value in (made[0].ratio, made[1].levels, made[2].ratio)] == [float, int, float]
    with pytest.raises(ValueError, match=r"ratio=inf must be in \(0, 1\]"):
        TopK(10**400)
    with pytest.raises(ValueError, match="clip=inf must be at least 0 and finite"):
        Feedback(TopK(), clip=10**400)


def test_an_infinite_bound_is_one_only_where_it_is_declared() -> None:
    assert str(gradcomp.make("lgc:max_code_error=inf")) == "lgc:max_code_error=inf"
    with pytest.raises(ValueError, match="max_code_error=nan must be above 0"):
        gradcomp.make("lgc:max_code_error=nan")


@pytest.mark.parametrize("old,new", [("lgc:bound=0.5", "lgc:max_code_error=0.5"), ("sdagc:per=layer", "sdagc:scope=layer")])
def test_an_older_name_of_a_knob_stands_for_the_new_one(old: str, new: str) -> None:
    assert str(gradcomp.make(old)) == new
    with pytest.raises(ValueError, match="is given twice"):
        gradcomp.make(f"{new},{old.partition(':')[2]}")


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
    with pytest.raises(ValueError, match="is no pattern of layers' names"):
        gradcomp.by_layer({pattern: "dense"}, "topk")


def test_a_pattern_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="the pattern 'a' is given twice"):
        gradcomp.make("topk; a=dense; a=sign")


def test_wrappers_go_around_once() -> None:
    with pytest.raises(ValueError, match="ByHost cannot wrap topk, which must be outermost"):
        ByHost(Feedback(TopK()))
    assert gradcomp.make(Feedback(Dense(), feedback=False)) == Dense()


@pytest.mark.parametrize("knob_", ["sam=0.5", "flush=5"])
def test_knobs_that_act_on_the_residual_need_one(knob_: str) -> None:
    with pytest.raises(ValueError, match=f"{knob_} cannot work with feedback=false.* remove feedback=false or {knob_}"):
        gradcomp.make(f"sdagc:feedback=false,{knob_}")


@pytest.mark.parametrize("setting", ["density=0.02", "lr_revision=density"])
def test_a_fixed_lam_is_not_steered(setting: str) -> None:
    message = f": {setting} steers lam, and lam=3 fixes it; remove lam=3 or {setting}"
    with pytest.raises(ValueError, match=re.escape(message)):
        gradcomp.make(f"sdagc:lam=3,{setting}")
    gradcomp.make(f"sdagc:lam=auto,{setting}")


def test_a_bound_of_bursts_needs_a_threshold_that_is_fixed() -> None:
    with pytest.raises(ValueError, match=r"cap=0\.1 bounds bursts .* remove it, or set lam"):
        gradcomp.make("sdagc:cap=0.1")
    gradcomp.make("sdagc:cap=0.1,lam=3")


def test_messages_name_the_algorithm_through_wrappers() -> None:
    with pytest.raises(ValueError, match=r"^topk: clip=-1 must be at least 0$"):
        gradcomp.make("topk:by_host=true,clip=-1")
    with pytest.raises(ValueError, match="; set norm=max or more levels"):
        gradcomp.make("qsgd:feedback=true")


def test_help_shows_the_knobs() -> None:
    assert "ratio: share of entries sent" in (TopK.__doc__ or "")
    assert "sigmas: standard deviations from 0" in (kind_of("terngrad").__doc__ or ""), "also those of a base"
    assert "momentum: momentum that the residual stands for; auto: the optimizer's, which is hidden" in (Feedback.__doc__ or "")


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


def test_the_tables_in_the_documentation_are_the_declarations() -> None:
    made = subprocess.run([sys.executable, ROOT / "scripts" / "knobs"], capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "knobs.md").read_text() == made, "run: scripts/knobs > docs/knobs.md"
