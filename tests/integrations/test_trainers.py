"""Trainers with their real packages, on two real ranks: they train, go on to the same losses, and equal DDP with dense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import run

from laboratory import machine
from laboratory.report import write

pytestmark = pytest.mark.long

PACKAGES = ("accelerate", "lightning", "transformers")
SPEC = "topk:ratio=0.1"
RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "trainers.json"
# The checkpoint in mid-training, and the files of the ranks' states that lie in it or beside it.
CHECKPOINTS = {"accelerate": "half", "lightning": "whole/epoch=0.ckpt", "transformers": "whole/checkpoint-6"}
STEMS = {"accelerate": "half/gradcomp-rank", "lightning": "whole/epoch=0.ckpt.gradcomp-rank"}
STEMS["transformers"] = "whole/checkpoint-6/gradcomp-rank"


@pytest.fixture(scope="module", params=PACKAGES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[dict[str, Any]]]:
    """All trainings by one package, its folder, and what the ranks found. The first rank's losses are recorded."""
    folder = tmp_path_factory.mktemp(request.param)
    found = run(program(request.param), 2, folder, SPEC, "-")
    record(request.param, found[0])
    return request.param, folder, found


def record(package: str, found: dict[str, Any]) -> None:
    """Write the last run of a package into the record, beside those of the others."""
    own = {"package": package, "version": found.pop("version"), "spec": SPEC, "ranks": 2}
    own |= {"losses": {name: [round(loss, 4) for loss in losses(each)] for name, each in found.items()}}
    others = json.loads(RECORD.read_text())["packages"] if RECORD.exists() else []
    packages = sorted([own, *(each for each in others if each["package"] != package)], key=lambda each: each["package"])
    write(RECORD, {"what": "trainers", **machine.origin("scripts/check --long"), "packages": packages})


def program(package: str) -> Path:
    return Path(__file__).with_name(f"by_{package}.py")


def losses(found: dict[str, Any]) -> list[float]:
    return found["losses"] if "losses" in found else [each["loss"] for each in found["logs"]]


def test_dense_is_the_stock_training_to_the_bit(trained: Any) -> None:
    """With clips, accumulated passes, and a GradScaler where a package takes one on CPUs."""
    package, _, ranks = trained
    pairs = [name for name in ranks[0] if name.startswith("stock")]
    assert len(pairs) == {"accelerate": 4, "lightning": 4, "transformers": 2}[package]
    for own in ranks:
        for stock in pairs:
            dense = own[stock.replace("stock", "dense")]
            assert torch.equal(own[stock]["weights"], dense["weights"]), stock
            assert losses(own[stock]) == losses(dense), stock


def test_a_compressed_training_learns_and_its_ranks_stay_equal(trained: Any) -> None:
    _, _, ranks = trained
    compressed = [name for name in ranks[0] if not name.startswith(("stock", "dense"))]
    for name in compressed:
        assert torch.equal(ranks[0][name]["weights"], ranks[1][name]["weights"]), name
        if name != "RAdam":
            assert ranks[0][name]["exchanges"] == "updates", name
    own = losses(ranks[0]["accumulated" if "accumulated" in ranks[0] else "whole"])  # twice as many
    assert sum(own[-3:]) < 0.95 * sum(own[:3])


def test_a_resumed_training_has_the_losses_of_one_that_was_not_interrupted(trained: Any) -> None:
    _, _, ranks = trained
    for own in ranks:
        for resumed, whole in (("resumed", "whole"), ("clipped resumed", "clipped")):
            rest = losses(own[resumed])
            assert len(rest) == 6 and rest == losses(own[whole])[-6:], whole
            assert torch.equal(own[resumed]["weights"], own[whole]["weights"]), whole
        assert not torch.equal(own["clipped"]["weights"], own["whole"]["weights"])


def test_another_number_of_ranks_goes_on_with_the_same_residuals(trained: Any, tmp_path: Path) -> None:
    """The sum of the residuals is the mean that will arrive, times the ranks."""
    package, folder, before = trained
    shares = [torch.load(folder / f"{STEMS[package]}{rank}.pt", weights_only=True)["of_rank"][str(rank)] for rank in range(2)]
    saved = [share["layers"]["feedback"]["residual"] for share in shares]
    three = run(program(package), 3, tmp_path, SPEC, str(folder / CHECKPOINTS[package]))
    for name, first in saved[0].items():
        wanted = (first + saved[1][name]).double() / 2
        came = sum(own["resumed"]["residual"][name].double().flatten() for own in three) / 3
        torch.testing.assert_close(came, wanted.flatten(), rtol=1e-5, atol=1e-6)
        assert wanted.any() or first.numel() < 10
    assert len(losses(three[0]["resumed"])) == 6
    assert losses(three[0]["resumed"])[-1] < losses(before[0]["whole"])[0]


def test_logs_have_figures(trained: Any) -> None:
    package, _, ranks = trained
    found = ranks[0]["whole"]
    logged = {"accelerate": "figures", "lightning": "logged"}.get(package)
    figures = found["logs"][-1] if logged is None else found[logged]
    assert figures["gradcomp/compression"] > 20 and figures["gradcomp/bytes_sent"] > 0
    assert package == "accelerate" or 0 < figures["gradcomp/grad_norm"] < 10


def test_the_trainers_log_has_the_norm_of_gradients_from_its_first_line_on(trained: Any) -> None:
    """With a clip, too, and with a rate that falls to 0. At first all trainings have equal weights and gradients."""
    package, _, ranks = trained
    if package != "transformers":
        return
    for name in ("whole", "clipped"):
        logs = ranks[0][name]["logs"]
        assert all(0.1 < each["gradcomp/grad_norm"] < 10 for each in logs), (name, logs)
        own = [each["gradcomp/grad_norm"] for each in logs]
        assert [each["grad_norm"] for each in logs] == pytest.approx(own, rel=1e-4), (name, logs)


def test_the_scaler_is_found(trained: Any) -> None:
    _, _, ranks = trained
    for name, found in ranks[0].items():
        assert found.get("knows scaler", "scaled" in name) == ("scaled" in name), name
