"""The page of results holds the charts, tables, figures and verdicts of the committed records."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

import pytest
from documents import ROOT, lost_by, record, study

from documentation import results
from laboratory.stats import lower_bound, upper_bound

PAGE = results.PAGE.read_text()
FLAT = " ".join(PAGE.split())


def said(lines: dict[str, Any], spec: str, digits: int = 2) -> tuple[str, str]:
    """Write how much worse a spec ends than dense, and the bound of that."""
    return f"{lines[spec]['worse_than_dense']:.{digits}f}", f"{lines[spec]['worse_at_most']:.{digits}f}"


def is_certain(lines: dict[str, Any], spec: str) -> bool:
    """Return True if a spec's scores are surely not dense's, in either direction."""
    worse = lost_by(lines, spec)
    return not lower_bound(worse) <= 0 <= upper_bound(worse)


def row(claim: str) -> str:
    (found,) = re.findall(rf"^\| \*\*{re.escape(claim)}.* \| (.+) \|$", PAGE, re.MULTILINE)
    return str(found)


def test_the_page_has_the_tables_of_the_records() -> None:
    assert results.written(PAGE) == PAGE, "run PYTHONPATH=scripts python -m documentation.results"


@pytest.mark.parametrize("name", ["scores", "steps", "seconds"])
def test_a_chart_is_that_of_the_records(name: str) -> None:
    made = dict(results.charts())
    assert (results.CHARTS / f"{name}.svg").read_text() == made[name], "run PYTHONPATH=scripts python -m documentation.results"
    assert f"](charts/{name}.svg)" in PAGE and len(made) == 3
    assert "prefers-color-scheme: dark" in made[name] and not re.search(r'<script|href="', made[name])


def test_a_chart_shows_what_loses() -> None:
    """A difference to dense that is large has a row, and so has a way that needs longer than stock."""
    made = dict(results.charts())
    assert "6.97 (\N{LESS-THAN OR EQUAL TO} 8.99)" in made["scores"]
    last = made["seconds"][made["seconds"].rindex(">4 hosts, 10 Gbit/s<") :]
    stock, levels = (int(re.findall(rf">{name}<.*?>(\d+)[ <]", last, re.DOTALL)[0]) for name in ("stock", "orq, 9 levels"))
    assert stock < levels
    left = [float(x) for x in re.findall(r'<(?:rect|line)[^>]* x1?="([\d.]+)"', "".join(made.values()))]
    assert min(left) >= 0 and max(left) <= 400


def test_the_caveat_comes_first() -> None:
    assert FLAT.index("emulated hosts that share two cores") < PAGE.index("![") < PAGE.index("|---")
    ratio = study("cifar-best")["topk:ratio=0.01"]["compression"]
    on_links = [f"{2 * ratio / hosts:.0f}" for hosts in (4, 8, 16)]
    assert f"{ratio:.0f} x is {on_links[0]}, {on_links[1]} and {on_links[2]} x for 4, 8 and 16 hosts" in FLAT


def test_what_the_page_says_of_scores() -> None:
    few = study("cifar")
    (some, most), (more, at_most) = (said(few, f"sdagc:density={density}", 1) for density in (0.0042, 0.0016))
    ratios = [f"{few[f'sdagc:density={density}']['compression']:,.0f} x" for density in (0.0042, 0.0016)]
    assert f"{ratios[0]} and {ratios[1]} cost `sdagc` {some} and {more} points (at most {most} and {at_most})" in FLAT
    peaks = [few[f"topk:ratio={ratio}"] for ratio in (0.0046, 0.0018)]
    ratios = [f"{each['compression']:,.0f} x" for each in peaks]
    (some, most), (more, at_most) = (said(few, each["spec"], 1) for each in peaks)
    assert f"{ratios[0]} and {ratios[1]} cost it {some} and {more} (at most {most} and {at_most})" in FLAT
    best = study("cifar-best")
    assert f"loses nothing certain (at most {said(best, 'topk:ratio=0.01', 1)[1]} points)" in FLAT
    assert [is_certain(best, "topk:ratio=0.01"), *(is_certain(few, each["spec"]) for each in peaks)] == [False, True, True]
    assert [is_certain(few, f"sdagc:density={density}") for density in (0.0042, 0.0016)] == [False, True]
    peers = results.best(results.OF_PEERS)
    gained = -statistics.fmean(lost_by(peers, "bf16"))
    assert f"bf16 lost {said(few, 'bf16', 1)[0]} in one study, and gained {gained:.1f} in another." in FLAT
    ranks = [f"powersgd:rank={rank},start=80" for rank in (1, 2, 4, 8)]
    lost, most = zip(*(said(peers, way, 1) for way in ranks[:3]), strict=True)
    added = "costs {} ({}) at the best of four rates, dense's.".format(*said(peers, "bf16:steps=4", 1))
    text = f"loses {lost[0]}, {lost[1]} and {lost[2]} points with ranks 1, 2 and 4 (at most {most[0]}, {most[1]} and {most[2]})"
    assert f"{text}, and with 8 nothing certain. Adding up four batches before bf16 {added}" in FLAT
    assert [way for way in peers if lower_bound(lost_by(peers, way, "stock")) > 0] == ["bf16:steps=4", *ranks[:3]]
    assert all(line["rate"] == 0.1 for line in peers.values())
    assert sorted(map(rate_of, results.OF_PEERS)) == [0.05, 0.1, 0.2, 0.4]
    spread = statistics.stdev(study("cifar-best")["dense"]["scores"])
    assert f"One seed's accuracy has a standard deviation of {spread:.1f}." in FLAT


def rate_of(name: str) -> float:
    (task,) = record(name)["tasks"].values()
    return float(task["settings"]["lr"])


def test_what_the_page_says_of_tuned_rates() -> None:
    """Dense and each spec have the rate with their least training loss; each of these is between two that are worse."""
    best = results.best(results.OF_TEXT)
    dense = best["dense"]
    sdagc = best["sdagc:density=0.0042"]
    share, most = (f"{100 * sdagc[key] / dense['score']:.1f}" for key in ("worse_than_dense", "worse_at_most"))
    said = f"ends at a perplexity of {dense['score']:.2f}. Only `sdagc`'s loss is certain: {share} % (at most {most})"
    assert f"{said} at {sdagc['compression']:.0f} x." in FLAT
    specs = ("blocks", "orq", "topk:ratio=0.01", "sdagc:density=0.0042")
    assert [is_certain(best, spec) for spec in specs] == [False, False, False, True]
    assert {len(line["scores"]) for line in best.values()} == {3}
    at_denses = study(next(name.removeprefix("study-") for name in results.OF_TEXT if dense["rate"] == rate_of(name)))
    three, one = (at_denses[f"topk:ratio={ratio}"]["worse_than_dense"] for ratio in (0.03, 0.01))
    assert three > one and "seems to [lose more]" in FLAT
    lost = [at_denses["topk:ratio=0.01"][key] for key in ("worse_than_dense", "worse_at_most")]
    share, most = (f"{100 * each / at_denses['dense']['score']:.1f}" for each in lost)
    own = " ".join((ROOT / "docs" / "algorithms" / "topk.md").read_text().split())
    assert f"ends [{share} % above](../results.md#scores-and-bytes) (at most {most}) at dense's best rate" in own
    assert f"At dense's best rate, `topk` loses {share} % ({most})," in FLAT and is_certain(at_denses, "topk:ratio=0.01")
    tried = sorted(rate_of(name) for name in results.OF_TEXT)
    assert all(line["rate"] in tried[1:-1] for line in best.values())


def test_no_difference_on_pictures_at_tuned_rates_is_certain() -> None:
    assert "for each, by training loss: no difference is certain." in FLAT
    best = results.best(results.OF_PICTURES)
    assert not any(is_certain(best, spec) for spec in best) and best["dense"]["rate"] == 0.1
    half = study("cifar-rate-05")
    (topk, most), (orq, orq_most) = (said(half, spec, 1) for spec in ("topk:ratio=0.01", "orq"))
    twice = study("cifar-rate-2")
    blocks, blocks_most = said(twice, "blocks", 1)
    text = f"With both at half of dense's best, `topk` loses {topk} points (at most {most}), and `orq` {orq} ({orq_most}); with"
    assert f"{text} both at twice it, `blocks` {blocks} ({blocks_most})." in FLAT and is_certain(twice, "blocks")
    others = [(study(name.removeprefix("study-")), spec) for name in results.OF_PICTURES for spec in best if spec != "dense"]
    assert sum(is_certain(lines, spec) for lines, spec in others) == 3
    assert is_certain(half, "topk:ratio=0.01") and is_certain(half, "orq")


def test_what_the_page_says_of_the_larger_text() -> None:
    lines, of_blocks = study("shakespeare-best-rate"), study("blocks-text-best-rate")
    seeds = "{:.2f}, {:.2f} and {:.2f}".format(*sorted(lines["dense"]["scores"]))
    assert f"dense's seeds end at {seeds}. No difference is certain, nor that of [`blocks`]" in FLAT
    assert not any(is_certain(lines, spec) for spec in lines) and not is_certain(of_blocks, "blocks")


def test_what_the_page_says_of_replicas_under_fsdp2() -> None:
    for door in ("hsdp", "replicate"):
        for run in record(f"train-blocks-{door}")["runs"]:
            (blocks,) = (line for line in run["lines"] if line["way"] == "blocks")
            assert blocks["over"]["bf16"]["at_most"] > 1
    every = [line for run in record("train-blocks-fsdp")["runs"] for line in run["lines"]]
    shards = [line["over"]["bf16"] for line in every if line["way"] == "blocks"]
    both = " and ".join(f"{over['median']:.2f} ({over['at_most']:.2f})" for over in shards)
    assert f"Over `bf16`, `blocks` takes {both}." in FLAT


def test_the_verdict_of_sdagc() -> None:
    text, digits, conv, cifar = row("SDAGC**: 433"), study("mlp"), study("conv"), study("cifar-best")
    low, high = (said(digits, f"sdagc:density={density},small=pool") for density in ("0.002", "0.00043"))
    assert f"{low[0]} and {high[0]} points (at most {low[1]} and {high[1]}," in text
    worse, most = said(conv, "sdagc:density=0.002,small=pool")
    assert f"{worse} points ({most}) at 435 x" in text
    lstm = study("text")["sdagc:density=0.002,small=pool,momentum=0.9"]
    assert lstm["worse_at_most"] < 0 and f"{lstm['compression']:.0f} x" in text
    assert lstm["steps_to_loss"] is None and digits["sdagc:density=0.00043,small=pool"]["steps_to_loss"] is None
    assert f"At 2,041 and {lstm['compression']:.0f} x the training loss stays above dense's." in text
    own = cifar["sdagc:density=0.01"]
    said_of = f"({own['worse_than_dense']:.1f} points, at most {own['worse_at_most']:.1f})"
    few = study("cifar")["sdagc:density=0.0016"]
    more = f"{few['worse_than_dense']:.1f} at {few['compression']:,.0f} x"
    assert f"loses nothing certain at {own['compression']:.0f} x {said_of}, {more};" in text
    late, spec = study("cifar-converged"), "sdagc:density=0.0042"
    worse, most = said(late, spec, 1)
    assert f"in 30 epochs {worse} points ({most}) at {late[spec]['compression']:.0f} x, not certain" in text
    assert not is_certain(late, spec)


def test_the_verdicts_of_sketches() -> None:
    models = record("compare-sketches")["models"]
    over: dict[str, dict[str, list[float]]] = {"gtopk": {}, "sketched_sgd": {}}
    for cluster in (of for model in models for of in model["clusters"]):
        (own,) = (line for line in cluster["lines"] if line["spec"] == "gs_sgd:ratio=0.001,momentum=0.9")
        for other, by_rate in over.items():
            by_rate.setdefault(cluster["rate"], []).append(own["throughput_over"][other]["median"])
    every = [ratio for found in over["gtopk"].values() for ratio in found]
    assert f"{min(every):.2f} to {max(every):.2f} x" in row("gs-SGD**: 1.3")
    lines = [(of["rate"], line) for model in models for of in model["clusters"] for line in of["lines"]]
    on_four = [line for model in models for of in model["clusters"] if of["hosts"] == 4 for line in of["lines"]]
    alike = [line["throughput_over"]["gtopk"]["median"] for line in on_four if "compression=250" in line["spec"]]
    assert f"bytes, on 4 hosts, {min(alike):.2f} to {max(alike):.2f} x" in row("gs-SGD**: 1.3")
    k = math.ceil(models[0]["parameters"] / 1000)
    bytes_of = {
        (of["hosts"], line["spec"].partition(":")[0]): line["bytes_per_step"]
        for of in models[0]["clusters"]
        for line in of["lines"]
        if "compression" not in line["spec"]
    }
    table, *sent = (round(bytes_of[each] / 4 / k) for each in ((4, "gs_sgd"), (4, "gtopk"), (8, "gtopk")))
    assert f"with {table} numbers for each entry" in row("gs-SGD**: 1.3") and sent == [4, 6]
    smaller = [line for rate, line in lines if rate == "1gbit" and "gs_sgd" in line["spec"] and "compression" in line["spec"]]
    tables = [line["throughput_over"]["sketched_sgd"]["median"] for line in smaller]
    assert f"and {min(tables):.2f} to {max(tables):.2f} with smaller tables" in row("gs-SGD**: 1.1")
    fast, slow = (over["sketched_sgd"][rate] for rate in ("1gbit", "100mbit"))
    assert f"{min(slow):.1f} to {max(slow):.1f} x. At 1 Gbit/s {min(fast):.2f} to {max(fast):.2f} x" in row("gs-SGD**: 1.1")
    scores = {line["spec"]: line for line in models[0]["training"]}
    own, theirs, dense = (
        scores[f"{spec}"]["score"] for spec in ("gs_sgd:ratio=0.001,momentum=0.9", "gtopk:ratio=0.001,momentum=0.9", "dense")
    )
    equal = scores["gs_sgd:ratio=0.001,rows=3,candidates=1,compression=250,momentum=0.9"]["score"]
    said = f"{own:.1f} % where gTop-k ends at {theirs:.1f} and dense at {dense:.1f}; at gTop-k's 250 x {equal:.1f} %"
    assert said in row("gs-SGD**: conv") and f"{own:.1f} % where dense ends at {dense:.1f}" in row("Sketched-SGD**")


def test_the_verdicts_of_codes_and_levels() -> None:
    codes = study("lgc")
    worse, most = said(codes, "lgc:ratio=0.01")
    ratio = codes["lgc:ratio=0.01"]["compression"]
    assert f"{worse} points below dense (at most {most}), {ratio:.1f} x in all" in row("LGC**")
    found = study("quantisers-conv")
    ratios = [
        f"{found[f'{spec}route=allgather']['compression']:.1f}"
        for spec in ("bingrad:", "orq:", "orq:levels=5,", "orq:levels=9,")
    ]
    assert f"{', '.join(ratios[:3])} and {ratios[3]}" in row("BinGrad, ORQ**")
    lost = lost_by(found, "bingrad:form=pb,route=allgather", "terngrad:route=allgather")
    below = f"BinGrad-pb's {statistics.fmean(lost):.2f} points below TernGrad's (at most {upper_bound(lost):.2f})"
    assert below in row("BinGrad, ORQ**") and lower_bound(lost) > 0
    others = [spec for spec in found if spec.startswith(("terngrad", "qsgd", "linear", "dense"))]
    orqs = [spec for spec in found if spec.startswith("orq")]
    assert all(lower_bound(lost_by(found, own, other)) <= 0 for own in orqs for other in others)
    for task in ("conv", "mlp", "text"):
        lines = study(f"quantisers-{task}")
        for levels in (5, 9):
            errors = {spec: line["squared_error"] for spec, line in lines.items() if f"levels={levels}," in spec}
            assert min(errors, key=lambda spec: errors[spec]).startswith("orq") and len(errors) == 4
    (short, most), late = said(study("cifar"), "topk:ratio=0.0046", 1), study("cifar-converged-rest")
    plain, warm = (late[spec] for spec in ("topk:ratio=0.0046", "topk:ratio=0.0046,warmup=312"))
    (less, at_most), (other, bound) = (said(late, line["spec"], 1) for line in (plain, warm))
    text = f"loses {less} points (at most {at_most}) at {plain['compression']:.0f} x, and {other} ({bound}), not certain,"
    assert f"{text} with DGC's warm-up of ratios, {warm['compression']:.0f} x in all" in row("DGC**")
    assert f"in 800 steps {short} ({most}) at 437 x" in row("DGC**")
    assert is_certain(late, plain["spec"]) and not is_certain(late, warm["spec"])


def test_the_verdict_of_gtopk_and_the_speed_of_a_copy() -> None:
    runs = record("traffic-amd-epyc")["runs"]
    by_ranks = {run["ranks"]: {line["spec"]: line["of_ranks"] for line in run["lines"]} for run in runs}
    sent = {hosts: max(of["gtopk:ratio=0.001"]["payload"]) for hosts, of in by_ranks.items()}
    assert sent[4] / sent[2] < 2.05 and sent[8] / sent[2] < 3.05  # log2 P
    (of_eight,) = ({line["spec"]: line["wire"] / 1000 for line in run["lines"]} for run in runs if run["ranks"] == 8)
    gtopk, topk = (of_eight[f"{name}:ratio=0.001"] for name in ("gtopk", "topk"))
    assert f"a host of 8 sends {gtopk:.0f} KB, with `topk` {topk:.0f}" in row("gTop-k**")
    kernels = {line["name"]: line for line in record("kernels-cpu-amd-epyc")["lines"]}
    assert f"{100 * kernels['torch add_']['share_of_copy']:.0f} % of a copy's" in FLAT


def test_how_much_rounds_differ() -> None:
    """Those of one way on one link, on four hosts."""
    ratios: dict[str, float] = {}
    for task in results.CLUSTERS:
        for (hosts, rate), launch in results.launched(task, "horovod").items():
            for line in launch["lines"] if hosts == 4 and rate in results.LINKS else ():
                of_rounds = line["ms_of_rounds"]
                ratios[line["way"]] = max(ratios.get(line["way"], 0.0), max(of_rounds) / min(of_rounds))
    assert f"differ up to {max(ratios.values()):.1f} times under Horovod with stock, fp16 or DGC" in FLAT
    assert max(ratio for way, ratio in ratios.items() if way.startswith(("topk", "sdagc", "orq"))) < 1.9


def test_where_fewer_steps_win_more_than_faster_ones() -> None:
    for task, (records, racers) in results.RACES.items():
        lines = {line["spec"]: line for name in records for line in record(name)["tasks"][task]["lines"]}
        ms = {line["way"]: line["ms"]["median"] for line in results.launched(task, "ddp")[4, "10gbit"]["lines"]}
        for spec, way, _ in (racers["topk"], racers["sdagc"]):
            assert lines[spec]["steps_to_loss"] / lines["dense"]["steps_to_loss"] < ms[way] / ms["stock"] < 1, (task, way)
