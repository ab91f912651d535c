"""The figures of the pages are those of the records: steps on clusters, and what a choice rests on."""

from __future__ import annotations

import math
import re
import statistics
from itertools import product
from typing import Any

import pytest
from documents import RECORDS, ROOT, lost_by, record, study

from documentation import local_steps, results, scale, step_times, usual_loops
from laboratory.commands import steps, strangers, trainers
from laboratory.loops.trainers import TRAINERS
from laboratory.stats import lower_bound

WHICH = (ROOT / "docs" / "which-spec.md").read_text()
README = (ROOT / "README.md").read_text()
FLAT_WHICH, FLAT_README, FLAT_RESULTS = (" ".join(text.split()) for text in (WHICH, README, results.PAGE.read_text()))
RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit"}


def line(task: str, hosts: int, rate: str, way: str) -> Any:
    lines = steps.launched(task, "ddp")[hosts, rate]["lines"]
    return next(each for each in lines if each["way"] == way)


def over(task: str, rate: str, way: str, hosts: int = 4, other: str = "stock") -> str:
    return f"{line(task, hosts, rate, way)['over'][other]['median']:.2f}"


def at_most(task: str, rate: str, way: str, hosts: int = 4, other: str = "stock") -> str:
    return f"{line(task, hosts, rate, way)['over'][other]['at_most']:.2f}"


def test_the_results_are_those_of_the_records() -> None:
    page = step_times.PAGE.read_text()
    assert page == step_times.written(page), "run PYTHONPATH=scripts python -m documentation.step_times"
    assert page == step_times.written(page.replace("1,593", "1,594")), "a page with other figures is written anew"


def test_the_tables_of_usual_loops_are_those_of_the_records() -> None:
    page = usual_loops.PAGE.read_text()
    assert page == usual_loops.written(page), "run PYTHONPATH=scripts python -m documentation.usual_loops"
    assert "\n| base | " in page and "worse |" not in page


def test_what_is_said_of_usual_loops_under_horovod() -> None:
    by_ddp, by_horovod = usual_loops.cells("ddp"), usual_loops.cells("horovod")
    both = by_ddp.keys() & by_horovod.keys()
    refused = [{key for key in both if of[key]["verdict"] == "refused"} for of in (by_ddp, by_horovod)]
    assert refused[0] == refused[1] and refused[0]
    assert {line["verdict"] for line in by_horovod.values()} == {"ok", "late", "warned", "refused"}
    shown = [line for (_, _, spec), line in by_horovod.items() if spec in usual_loops.SPECS]
    assert sum(line["verdict"] == "late" for line in shown) == 3 and "LBFGS" not in {name for name, *_ in by_horovod}
    assert {name for name, *_ in by_horovod} - {name for name, *_ in by_ddp} == {"unused layers, num_groups=1"}
    assert len({name for name, *_ in {*by_ddp, *by_horovod}}) == 35
    assert record("loops-ddp")["seeds"] == 3


def test_the_tables_of_local_steps_are_those_of_the_records() -> None:
    page = local_steps.PAGE.read_text()
    assert page == local_steps.written(page), "run PYTHONPATH=scripts python -m documentation.local_steps"
    assert local_steps.CHART.read_text() == local_steps.chart(), "run PYTHONPATH=scripts python -m documentation.local_steps"


TRIALS = " ".join((ROOT / "benchmarks" / "local-steps.md").read_text().split())


def gaps_of(name: str, spec: str) -> list[float]:
    """Return by how much a spec's loss is above DDP's, for each of three seeds or more."""
    found = study(f"local-{name}")
    assert len(found[spec]["seeds"]) >= 3
    pairs = zip(found[spec]["scores"], found["dense"]["scores"], strict=True)
    return [math.log(own) / math.log(theirs) - 1 for own, theirs in pairs]


def test_what_is_said_of_local_steps() -> None:
    page = " ".join(local_steps.PAGE.read_text().split())

    def above(name: str, spec: str, other: str = "dense") -> float:
        found = {line["spec"]: line for line in local_steps.lines(name)}
        return local_steps.over(found[spec], found[other])

    dense, often, rarely = (f"local:{way}" for way in ("30/0.9/0.7/dense", "10/0.9/0.7/sign", "32/0.9/0.7/sign"))
    assert f"are {above('steps', dense):.0f} to {above('steps', rarely):.0f} % larger," in page
    at_best = [above("best-rate", way) for way in (often, dense, rarely)]
    found = {line["spec"]: statistics.fmean(line["scores"]) for line in local_steps.lines("steps")}
    more = [100 * (found[way] / found["dense"] - 1) for way in (often, dense, rarely)]
    said = f"perplexities {min(more):.0f} to {max(more):.0f} % (losses {min(at_best):.0f} to {max(at_best):.0f} at [0.016]"
    assert said in page
    rates = [results.best([name])["dense"] for name in results.OF_TEXT]
    assert min(rates, key=lambda line: line["losses"][-1])["rate"] == 0.016
    assert f"ends {above('steps', rarely, dense):.1f} % above `dense` with `every=30`" in page
    assert f"With `every=10` it ends {above('steps', often, dense):.1f} % above that" in page
    of_every = [above("every", f"local:{way}") for way in ("15/0.9/0.7/dense", "60/0.9/0.7/dense", "30/0.9/0.7/topk")]
    said = (
        "`dense` ends {:.1f} % above DDP with `every=15`, [{:.1f}](results/study-local-steps.json) with 30 and {:.1f} with 60."
    )
    assert said.format(of_every[0], above("steps", dense), of_every[1]) in TRIALS
    assert f"in the same training, ends {of_every[2]:.1f} % above DDP" in TRIALS and f"ends [{of_every[2]:.1f} %]" in page
    sparse = above("periods", "local:30/1/0/topk:ratio=0.0156,wire=coarse,decay=0.95")
    assert f"{sparse:.1f} % above DDP." in TRIALS and f"[{sparse:.1f} % above DDP](../benchmarks/local-steps.md)" in page
    wider = min((above(name, dense), name) for name in ("width-128-rate-4e3", "width-128"))
    said = f"is [{above('short', dense):.1f} %](results/study-local-short.json) above DDP. This gap is"
    said = f"{said} {above('batch-8', dense):.1f} %"
    assert said in TRIALS and f"it is {wider[0]:.1f} with 0.47 million parameters" in TRIALS
    assert f"it is {above('width-256', dense):.1f} with [1.7 million parameters]" in TRIALS
    assert f"the gap is {above('rate-16e3', dense):.1f} % at 0.016." in TRIALS
    gaps = {name: gaps_of(name, dense) for name in ("steps", "short", "batch-8", wider[1])}
    shorter = gaps_of("every", "local:15/0.9/0.7/dense")
    for less, more in ((shorter, "steps"), (gaps["batch-8"], "short"), (gaps["steps"], "short"), (gaps["short"], wider[1])):
        assert lower_bound([b - a for a, b in zip(less, gaps[more], strict=True)]) > 0, more
    sent = {line["spec"]: line["compression"] for line in local_steps.lines("steps")}
    assert f"for a payload {sent[rarely] / sent[dense]:.0f} times smaller" in page
    assert f"for one {sent[often] / sent[dense]:.0f} times smaller" in page
    tuned = study("fine-tuned")
    for spec, said in (
        (dense, "is {1:.1f} % above DDP (before: {0:.1f})"),
        (rarely, "`sign` with `every=32` {1:.1f} % ({0:.1f})"),
    ):
        scores = ("first_scores", "scores")
        gaps = [local_steps.over(*({**tuned[each], "scores": tuned[each][of]} for each in (spec, "dense"))) for of in scores]
        assert len(tuned[spec]["seeds"]) == 3 and said.format(*gaps) in page
    rates = {name: local_steps.lines(name) for name in ("outer", "rate-2e3", "rate-4e3", "rate-16e3")}
    assert min(rates, key=lambda name: local_steps.nats(rates[name][0])) == "outer"
    outer = sorted(local_steps.lines("outer")[1:], key=local_steps.nats)
    assert len(outer) == 5 and "local:30/0.9/0.7/dense" in [line["spec"] for line in outer[:2]]


def test_what_local_steps_lose_on_pictures_at_the_best_rates() -> None:
    best: dict[str, float] = {}
    for name in ("cifar", "cifar-rate-0-05", "cifar-rate-0-2"):
        for line in local_steps.lines(name):
            best[line["spec"]] = max(best.get(line["spec"], 0.0), line["scores"][line["seeds"].index(0)])
    dense, sign = (best["dense"] - best[f"local:{way}"] for way in ("30/0.9/0.7/dense", "10/0.9/0.7/sign"))
    assert f"`dense` with `every=30` is {dense:.1f} points below DDP, `sign` with `every=10` {sign:.1f}." in TRIALS


def test_the_time_of_local_steps_on_a_slow_link() -> None:
    page = " ".join(local_steps.PAGE.read_text().split())
    (run,) = record("train-local-10mbit")["runs"]
    over = {each["way"]: each["over"]["stock"]["median"] for each in run["lines"] if each["way"] != "stock"}
    ways = ("topk", "local:30/0.9/0.7/sign", "local:30/0.9/0.7/dense")
    assert run["rate"] == "10mbit" and run["hosts"] == 4
    said = "takes {:.3f} of DDP's with it, {:.3f} with `every=30` and `sign`, and {:.3f} with `dense`"
    assert said.format(*(over[way] for way in ways)) in page


def test_the_bytes_as_hosts_are_added_are_those_of_the_record() -> None:
    page, lines = scale.PAGE.read_text(), scale.by_spec()
    assert page == scale.written(page), "run PYTHONPATH=scripts python -m documentation.scale"
    assert scale.CHART.read_text() == scale.chart(), "run PYTHONPATH=scripts python -m documentation.scale"
    on = {spec: of[1024]["interface_bytes"] for spec, of in lines.items()}
    assert on["topk"] > on["stock"] > on["bf16"] > 3 * on["blocks"] and on["topk:route=split"] < on["topk"] / 100


@pytest.mark.parametrize("link", RATES)
def test_the_links_of_which_spec_and_of_readme(link: str) -> None:
    nets, rate = ("cifar-large", "shakespeare"), RATES[link]
    both = [f"{over(net, rate, 'topk')}, {over(net, rate, 'sdagc')}" for net in nets]
    hooks = [f"{over(net, rate, 'bf16')}, {over(net, rate, 'powersgd:rank=4')}" for net in nets]
    records = [record(f"train-blocks-ddp-{name}") for name in ("cifar-large", "10gbit")]
    lines = [each for record in records for run in record["runs"] if run["rate"] == rate for each in run["lines"]]
    (blocks,) = (f"{each['over']['stock']['median']:.2f}" for each in lines if each["way"] == "blocks")
    page = f"(algorithms/blocks.md#results) | {blocks} | |\n| | torch's hooks: bf16, PowerSGD of rank 4 |"
    assert f"| {link} | `topk`, `sdagc` | {both[0]} | {both[1]} |\n| | [`blocks`]{page} {hooks[0]} | {hooks[1]} |" in WHICH
    topk = [over(net, rate, "topk") for net in nets]
    assert f"| {link} | {topk[0]}, {blocks}, {hooks[0]} | {topk[1]}, {hooks[1]} |" in README


def costs(name: str, spec: str) -> tuple[float, float, float]:
    """Return dense's score in a study of three seeds or more, how much worse a spec ends, and the bound of that."""
    lines = study(name)
    assert len(lines[spec]["seeds"]) >= 3
    return lines["dense"]["score"], lines[spec]["worse_than_dense"], lines[spec]["worse_at_most"]


def costs_of_seeds(name: str, spec: str) -> list[float]:
    """Return how much lower a spec's score is than dense's, seed by seed."""
    return lost_by(study(name), spec)


def certain_of(spec: str) -> tuple[set[str], set[str]]:
    """Return the studies in which a spec surely ends worse than dense, and those in which it surely ends better."""
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for path in RECORDS.glob("study-*.json"):
        for task in record(path.stem)["tasks"].values():
            lines = {line["spec"]: line for line in task["lines"]}
            if spec in lines and len(lines[spec]["seeds"]) >= 3:
                for lower in (False, True):
                    if lower_bound([x if lower else -x for x in lost_by(lines, spec)]) > 0:
                        found[lower != ("accuracy" in task["score"])].add(path.stem)
    return found[False], found[True]


def test_what_is_said_of_thirty_epochs() -> None:
    specs = ("blocks", "orq", "topk:ratio=0.01", "sdagc:density=0.0042", "powersgd:rank=4,start=234")
    (dense, *topk), (_, *powersgd) = (costs("cifar-converged", spec) for spec in (specs[2], specs[4]))
    ratio = study("cifar-converged")[specs[4]]["compression"]
    _, *few = costs("cifar-converged-rest", "topk:ratio=0.0046")
    said = f"only `topk`'s loss is certain: {topk[0]:.1f} points (at most {topk[1]:.1f}), and"
    assert f"ends at {dense:.1f} %, {said} {few[0]:.1f} ({few[1]:.1f}) at 439 x." in FLAT_RESULTS
    peers = f"{powersgd[0]:.1f} ({powersgd[1]:.1f}) at {ratio:.1f} x, beside simulated dense."
    assert f"PowerSGD on real ranks loses {peers}" in FLAT_RESULTS
    certain = [spec for spec in specs if lower_bound(costs_of_seeds("cifar-converged", spec)) > 0]
    assert certain == ["topk:ratio=0.01"]
    row = f"{topk[0]:.2f} points ({dense - topk[0]:.2f} % right; uncompressed: {dense:.2f}) | {topk[1]:.2f} points |"
    net = "a wider net under SGD on CIFAR-10, 30 epochs of 20,000 pictures"
    assert f"| `topk` | {net}, [3](docs/results.md#scores-and-bytes) | {row}" in README
    assert f"in 30 epochs of pictures ({topk[0]:.1f} points, at most {topk[1]:.1f})," in FLAT_WHICH


def test_what_is_said_of_a_fine_tuning() -> None:
    found = {spec: costs("fine-tuned", spec) for spec in ("topk:ratio=0.01", "blocks", "orq")}
    dense, orq, most = found["orq"]
    said = f"nothing certain of dense's perplexity of {dense:.2f}; `orq` has {orq:.2f} (at most {most:.2f})."
    assert said in FLAT_RESULTS
    worse = {spec: lower_bound([-x for x in costs_of_seeds("fine-tuned", spec)]) for spec in found}
    assert worse["orq"] > 0 > max(worse["topk:ratio=0.01"], worse["blocks"])


def test_what_readme_says_of_specs() -> None:
    score, *own = costs("cifar-best", "topk:ratio=0.01")
    row = f"{own[0]:.2f} points ({score - own[0]:.2f} % right; uncompressed: {score:.2f}) | {own[1]:.2f} points |"
    net = "a net under SGD on CIFAR-10, 800 steps on 20,000 pictures"
    assert f"| `topk` | {net}, [12](docs/results.md#scores-and-bytes) | {row}" in README
    of_blocks, of_results = "docs/algorithms/blocks.md#results", "docs/results.md#scores-and-bytes"
    rows = {
        ("blocks-text-best-rate", "blocks"): f"a transformer under AdamW, 500 steps, [{{}}]({of_blocks})",
        ("shakespeare-best-rate", "orq"): f"the same, [{{}}]({of_results})",
        ("shakespeare-best-rate", "topk"): f"the same, [{{}}]({of_results})",
    }
    for (name, label), training in rows.items():
        spec = "topk:ratio=0.01" if label == "topk" else label
        score, *own = costs(name, spec)
        worse, most = (f"{100 * each / score:.1f} %" for each in own)
        said = training.format(len(study(name)[spec]["seeds"]))
        said = f"{said} | {worse}{' of its perplexity' * (label == 'blocks')} | {most} |"
        assert f"| `{label}` | {said}" in README, (name, spec)
    orqs = {name: costs(name, "orq") for name in ("shakespeare-rest", "text-converged-4e3", "fine-tuned")}
    assert all(lower_bound([-x for x in costs_of_seeds(name, "orq")]) > 0 for name in orqs)
    shares = [100 * worse / dense for dense, worse, _ in orqs.values()]
    assert f"`orq` lost {min(shares):.1f} to {max(shares):.1f} % for certain in [two trainings]" in FLAT_README
    tuned = results.best(results.OF_TEXT)
    score, topk = tuned["dense"]["score"], tuned["topk:ratio=0.01"]
    worse, most = (100 * topk[key] / score for key in ("worse_than_dense", "worse_at_most"))
    training = f"a smaller transformer, 3,000 steps, each at its best of four rates, [3]({of_results})"
    assert f"| `topk` | {training} | {worse:.1f} % | {most:.1f} % |" in README
    assert float(at_most("cifar-large", "10gbit", "topk")) > 1 and "10 Gbit/s gain little or nothing" in README


def test_the_scores_of_which_spec() -> None:
    pictures = {"topk": "topk:ratio=0.01", "sdagc": "sdagc:density=0.01"}
    for row in ("blocks", "orq", "sdagc", "topk"):
        found = [costs("blocks-cifar" if row == "blocks" else "cifar-best", pictures.get(row, row))]
        text = "blocks-text" if row == "blocks" else "shakespeare"
        found.append(costs(f"{text}-best-rate", "topk:ratio=0.01" if row == "topk" else row))
        cells = [f"{worse:.2f} ({most:.2f})" for _, worse, most in found]
        said = rf"\| `{row}` \| [^|]+ \| [0-9. to]+ \| [0-9./ ]+ \| {re.escape(' | '.join(cells))} \|"
        assert re.search(said, WHICH), (row, cells)
    half = costs("half-pictures", "half")
    assert f"| `half` | all, in 16 bits | 2 | 2/2/2/2 | {half[1]:.2f} ({half[2]:.2f}) | |" in WHICH
    three, five = (costs(f"{name}-best-rate", spec)[0] for name, spec in (("shakespeare", "orq"), ("blocks-text", "blocks")))
    assert f"Under `dense` it is {three:.2f} (five seeds: {five:.2f}). None of these is certain: 0.004 is near" in WHICH
    for name, specs in (("shakespeare", ("topk:ratio=0.01", "orq", "sdagc")), ("blocks-text", ("blocks",))):
        assert all(lower_bound([-x for x in costs_of_seeds(f"{name}-best-rate", spec)]) < 0 for spec in specs)
    dense, worse, most = costs("text-converged-16e3", "topk:ratio=0.01")
    shares = f"({100 * worse / dense:.1f} %, at most {100 * most / dense:.1f}; at three other rates nothing certain)"
    assert f"in 3,000 steps of text at 0.016 {shares}, and better in two trainings of 250 and 500 steps." in FLAT_WHICH
    worse, better = certain_of("topk:ratio=0.01")
    assert worse == {"study-cifar-converged", "study-cifar-rate-05", "study-text-converged-16e3"}
    assert better == {"study-cifar-large", "study-shakespeare"}


def test_how_near_predictions_were() -> None:
    lines = record("predictions")["lines"]
    ratios = {
        few: [line["predicted_ms"] / line["ms"] for line in lines if (line["hosts"] < 16) == few] for few in (True, False)
    }
    near = {few: f"{sum(0.8 <= ratio <= 1.2 for ratio in found)} of {len(found)}" for few, found in ratios.items()}
    page, why = (" ".join((ROOT / "docs" / name).read_text().split()) for name in ("predict.md", "decisions/prediction.md"))
    assert f"{near[True]} predictions were [within 20 %]" in page and f"of the measured step; on 16, {near[False]}." in page
    middle, least, most = statistics.median(ratios[True]), min(ratios[True]), max(ratios[True])
    assert f"the median ratio is {middle:.2f}, the extremes {least:.2f} and {most:.2f}" in why


def test_what_which_spec_says_of_ratios() -> None:
    """A gather's link carries 2 / P of the ratio of payloads, and a ratio of the papers costs points."""
    lines = {
        name: {each["spec"]: each for each in record(f"{name}")["tasks"]["cifar"]["lines"]}
        for name in ("study-cifar", "study-cifar-best")
    }
    for spec, name in (("topk", "topk:ratio=0.01"), ("sdagc", "sdagc:density=0.01")):
        ratio = lines["study-cifar-best"][name]["compression"]
        on_links = "/".join(f"{ratio * 2 / hosts:.0f}" for hosts in (4, 8, 16, 32))
        assert re.search(rf"\| `{spec}` \| [^|]+ \| {ratio:.0f} \| {on_links} \|", WHICH), (spec, on_links)
    simulated = scale.by_spec()
    for spec in ("blocks", "orq"):
        (said,) = re.findall(rf"\| `{spec}` \| [^|]+ \| ([0-9.]+) \| \1/\1/\1/\1 \|", WHICH)
        for hosts in (4, 16):
            stock, own = (simulated[each][hosts]["interface_bytes"] for each in ("stock", spec))
            assert float(said) == pytest.approx(stock / own, rel=0.01), (spec, hosts)
    few = costs("cifar-converged-rest", "topk:ratio=0.0046")[1]
    assert f"in 800 steps, and {few:.1f} in 30 epochs |" in WHICH
    assert f"A `ratio` of 0.0046 [lost {lines['study-cifar']['topk:ratio=0.0046']['worse_than_dense']:.1f} points]" in WHICH
    assert "8 x 25 x 3/4 / 1250 = 0.12 s" in WHICH and 8 * 25e6 * 3 / 4 / 1250e6 == 0.12


def test_what_the_results_say_of_single_steps() -> None:
    """Sentences of the form: `topk` takes 501 ms, and `stock` 515, for the net on eight hosts at 10 Gbit/s."""
    form = r"`([^`]+)` takes ([\d,]+) ms, and `([^`]+)` ([\d,]+), for the (net|text) on (four|eight) hosts at (\d+ .bit/s)"
    found = re.findall(form, FLAT_RESULTS)
    for way, its, other, others, what, hosts, link in found:
        task = {"net": "cifar-large", "text": "shakespeare"}[what]
        times = [line(task, {"four": 4, "eight": 8}[hosts], RATES[link], each)["ms"]["median"] for each in (way, other)]
        assert [its, others] == [f"{time:,.0f}" for time in times], (way, other, what, hosts, link)
    assert len(found) == 2
    eight = [line(task, 8, "10gbit", "topk")["over"]["stock"] for task in ("cifar-large", "shakespeare")]
    net, text = (f"{each['median']:.2f}" for each in eight)
    most, text_most = (f"{each['at_most']:.2f}" for each in eight)
    said = f"On eight hosts the net takes {net} (at most {most}) of `stock`'s time, the text {text} ({text_most})."
    assert said in FLAT_RESULTS


@pytest.mark.parametrize("door", step_times.FSDP2)
def test_what_the_hosts_interfaces_carry_under_fsdp2(door: str) -> None:
    """In bytes of float32: what four ranks need, by (P - 1) / P over shards and 2 (P - 1) / P over replicas, and gloo moves."""
    needs, gloo = {"fsdp": (3.0, 6.0), "hsdp": (4.0, 6.0), "replicate": (6.0, 6.0)}[door]
    for run in record(f"train-blocks-{door}")["runs"]:
        assert run["ranks"] == 4 and run["parameters"] > 10e6
        found = {way: step_times.gradient_bytes(run, way) for way in run["ways"]}
        assert found["none"] == 0 and found["blocks"] <= 0.18 * needs
        assert 1 < found["stock"] / gloo < 1.01 and 1 < 2 * found["bf16"] / gloo < 1.01
        assert door != "fsdp" or (1 < found["alltoall"] / needs < 1.01 and 1 < 2 * found["half"] / needs < 1.01)


def test_the_losses_of_trainers_are_those_of_their_record() -> None:
    plain, page = record("trainers-plain"), trainers.PAGE.read_text()
    assert page == trainers.written(page, plain), "run scripts/lab trainers --report --name plain"
    every = record("trainers-gpt")["cells"]
    found = {tuple(line["key"]): (line["score"], line["plain"]) for line in every}
    for lines, own in ((plain["cells"], [name for name in TRAINERS if name.startswith("plain")]), (every, TRAINERS)):
        assert {tuple(line["key"][::3]) for line in lines} == set(product(own, trainers.SPECS.split(";")))
        assert len(lines) == 2 * len(own) * len(trainers.SPECS.split(";"))
        worse = [line["key"] for line in lines if line["verdict"] not in ("ok", "refused")]
        assert not worse, "a training that is worse than the trainer alone"
    for (name, _, kind, spec), losses in found.items():  # auto chooses by time
        if not name.startswith("plain") and not spec.startswith("auto"):
            assert losses == found["plain, clip_grad_norm_", "ddp", kind, spec], (name, kind, spec)
    assert {line["seeds"] for line in plain["cells"]} == {3}
    spread = [100 * line["noise"] / line["plain"] for line in plain["cells"]]
    assert f"seeds spread by {min(spread):.1f} to {max(spread):.1f} %." in " ".join(page.split())


def test_the_outcomes_of_others_programs() -> None:
    """Programs that fail without gradcomp in the same way, on CPUs, are named apart."""
    lines = record("strangers")["lines"]
    assert {line["spec"] for line in lines} == {*usual_loops.OF_PROGRAMS}
    stock = {each["program"]: strangers.summary(each) for each in lines if not each["spec"]}
    cannot = [name for name, outcome in stock.items() if outcome.startswith("failed")]
    assert cannot == ["accelerate-comm-hook", "timm-train"]
    assert all("device_ids" in each["error"] for each in lines if each["program"] in cannot)
    ours = next(each["failed"] for each in lines if each["program"] == "horovod-tests" and each["spec"] == "topk")
    others = {name for name, said in ours.items() if "Muon" not in said}
    assert others == {"test_broadcast_state", "test_gradient_clipping"}
