"""Specs: their meanings, and the sentences that wrong ones get."""

from __future__ import annotations

import re

import pytest

import gradcomp
from gradcomp.compressors.dense import Dense
from gradcomp.compressors.topk import TopK
from gradcomp.engine.feedback import Feedback


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


@pytest.mark.parametrize(
    "spec,sentence",
    [
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
    ],
)
def test_wrong_specs_get_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        gradcomp.make(spec)


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
