"""The study's tasks with data of their own: nets, schedules, batches, prepared data, refusals, and two steps of each, tiny."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("sklearn", reason="the tasks were NOT tested: scikit-learn is not installed")
pytest.importorskip("PIL", reason="the tasks were NOT tested: Pillow is not installed")

from PIL import Image
from torch import Tensor

from gradcomp.engine.updates.steps import exchanged
from laboratory.harness.measured import Training
from laboratory.harness.simulated import RoundedWeights, Updates, train
from laboratory.main import main
from laboratory.options import Refused
from laboratory.tasks import adapters, cifar, pitch, table, texts
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Settings, optimizer_of
from laboratory.tasks.texts import Transformer

WITH_DATA = [name for name, task in TASKS.items() if task.source is not None]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files like the real ones: 40 pictures of one colour each, ten for the test; a text of 8,000 bytes; a net.

    And a library.
    """
    folder = tmp_path_factory.mktemp("data")
    files = []
    for i in range(40):
        written = io.BytesIO()
        Image.new("RGB", (cifar.SIDE, cifar.SIDE), (5 * i, 100, 255 - 5 * i)).save(written, "JPEG", quality=95)
        files.append(numpy.frombuffer(written.getvalue(), numpy.uint8))
    ends = numpy.cumsum([len(each) for each in files])
    label, test = numpy.arange(40, dtype=numpy.uint8) % 10, numpy.arange(40) >= 30
    numpy.savez(folder / "cifar10-25k.npz", jpeg=numpy.concatenate(files), ends=ends, label=label, test=test)
    (folder / "tinyshakespeare.txt").write_bytes(bytes(i * i % 251 for i in range(8000)))
    torch.save(pitch.Crepe().state_dict(), folder / "tiny.pth")
    for name in ("one.py", "inner/two.py", "inner/same.py", "test/three.py", "site-packages/four.py", "five.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((b"x = 1\n" if name == "one.py" else name[:5].encode()) * 200)
    return folder


def test_two_steps_of_every_task_through_the_command_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda _: str(data))
    monkeypatch.setattr(adapters, "STEPS", 2)
    # With less than eight channels, the backward of a channels-last convolution in torch 2.13 writes beyond its memory on
    # processors that have AVX2 and no AVX-512.
    small = "steps=2,batch=2,cifar.width=8,cifar-large.width=8"
    for text in ("shakespeare", "python", "python-muon"):
        small += f",{text}.width=32,{text}.depth=1"
    specs = "topk:ratio=0.1"
    given = ["study", "--tasks", ",".join(WITH_DATA), "--seeds", "2", "--ranks", "2", "--specs", specs, "--set", small]
    places = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    assert main([*given, *places, "--data", str(data)]) == 0
    result = json.loads((tmp_path / "out" / "study-compare.json").read_text())
    assert str(data) not in json.dumps(result)
    for name in WITH_DATA:
        task = result["tasks"][name]
        lines = {line["spec"]: line for line in task["lines"]}
        assert list(lines) == ["dense", specs]
        assert all(line["score"] is not None for line in lines.values())
        assert lines["dense"]["compression"] == 1 < lines[specs]["compression"]
        assert TASKS[name].source is not None and task["data"].startswith(TASKS[name].source.name)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "data").iterdir()}
    assert len(made) == 5  # both nets read the same pictures, and both optimizers the same library
    capsys.readouterr()
    assert main([*given, *places, "--data", str(data)]) == 0
    assert "28 measurements, 28 of them finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in made} == made


@pytest.mark.parametrize("spec", ["sdagc:density=0.01,lr_revision=density", "topk:ratio=0.1,momentum=0.9"])
def test_a_spec_that_needs_learning_rates_or_keeps_a_momentum_trains(spec: str, data: Path, tmp_path: Path) -> None:
    for name, width in (("cifar", 8), ("shakespeare", 32)):
        task = TASKS[name]
        assert task.source is not None
        file = table.prepare(name, task.source, data, tmp_path)
        own = task.defaults._replace(steps=2, batch=2, width=width, depth=1)
        record = train(Training(name, spec, 0, 2, own, data=file), tmp_path)
        assert all(map(math.isfinite, record["losses"])) and max(record["sent"]) < 4 * record["parameters"]


def test_simulated_ranks_let_the_model_go_in_the_end() -> None:
    own = Training("conv", "topk", 0, 2, TASKS["conv"].defaults)
    ranks = Updates(own, TASKS["conv"].make(own.settings, 0, 2, None), TASKS["conv"])
    own_layers = {id(each) for replica in ranks._replicas for each in replica.parameters}
    assert own_layers <= exchanged()
    ranks.close()
    assert own_layers.isdisjoint(exchanged())


def test_weights_in_few_bits_step_on_the_exact_ones() -> None:
    """A step far below the rounding is not lost."""
    own = Training("mlp", "weights:bits=8", 0, 2, TASKS["mlp"].defaults._replace(width=64))
    job = TASKS["mlp"].make(own.settings, 0, 2, None)
    start = [each.detach().clone() for each in job.model.parameters()]
    ranks = RoundedWeights(own, job, TASKS["mlp"])
    for _ in range(3):
        ranks.optimizers[0].param_groups[0] |= {"lr": 1e-3, "momentum": 0.0}
        ranks.step([tuple(torch.full_like(each, 1e-4) for each in start)] * 2)
    for before, exact, rounded in zip(start, ranks._exact.values(), job.model.parameters(), strict=True):
        torch.testing.assert_close(exact, before - 3e-7, rtol=0, atol=1e-8)
        wrong = float((rounded - exact).norm().detach() / exact.norm())
        assert 0 < wrong < 0.01 if before.ndim > 1 and before.numel() > 2000 else wrong == 0


def test_a_task_without_its_data_is_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cifar10-25k.npz").write_bytes(b"not an archive")
    (tmp_path / "tinyshakespeare.txt").write_bytes(b"short")
    at = ["study", "--specs", "topk", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    for given, message in (
        (["cifar"], "--tasks cifar needs --data FOLDER: a folder with cifar10-25k.npz (CIFAR-10 as numpy arrays: `jpeg`"),
        (["shakespeare"], "a folder with tinyshakespeare.txt (text, read as bytes); add --data, or leave shakespeare out"),
        (["cifar", "--data", str(tmp_path / "none")], f"--data '{tmp_path}/none' has no cifar10-25k.npz"),
        (["cifar", "--data", str(tmp_path)], "cifar10-25k.npz cannot be read"),
        (["shakespeare", "--data", str(tmp_path)], "the text has 5 bytes; its last tenth must be longer than the 96"),
        (["cifar", "--data", str(data), "--set", "batch=20"], "4 ranks of 20 pictures are more than the 30 to train on"),
        (["shakespeare", "--data", str(data), "--set", "width=40"], "width=40 must be a multiple of 32"),
        (["conv", "--set", "depth=2"], "--set depth: conv has no depth"),
        (["cifar,conv", "--set", "beta2=0.9"], "--set beta2: cifar has no beta2"),
    ):
        assert main([*at, "--tasks", *given]) == 2
        assert message in capsys.readouterr().err


def test_what_decides_a_training_is_in_its_key() -> None:
    own = Training("cifar", "dense", 0, 4, TASKS["cifar"].defaults, data="cifar-1.pt")
    changed = [own.settings._replace(**{name: 2}) for name in ("weight_decay", "warmup", "depth")]
    others = [own._replace(data="cifar-2.pt"), own._replace(door="ddp"), *(own._replace(settings=each) for each in changed)]
    assert len({json.dumps(each.key()) for each in (own, *others)}) == 6
    assert Settings(**own.settings._asdict()) == own.settings == Settings(**own.settings.key())


def test_decay_beside_a_specs_momentum_shrinks_weights_as_much_as_sgds() -> None:
    """Without a gradient a weight falls by the decay alone: lr * decay / (1 - momentum) a step, once the momentum has risen."""
    own = TASKS["cifar"].defaults._replace(lr=0.001)
    shrunk = []
    for momentum in (0.0, 0.9):
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(model.weight)
        optimizer = optimizer_of(TASKS["cifar"], own, model, momentum)
        for _ in range(1000):
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
        shrunk.append(1 - float(model.weight.detach()))
    assert shrunk[0] == pytest.approx(shrunk[1], rel=0.02)  # SGD's rises over ten steps of the 1,000
    assert shrunk[1] == pytest.approx(1000 * 0.001 * 0.005, rel=0.02)


def test_muon_is_torchs_for_matrices_of_layers_and_adamw_for_all_else() -> None:
    own = TASKS["python-muon"].defaults._replace(lr=0.01, width=32, depth=1)
    both, apart = (torch.nn.ModuleList([Transformer(0, own.width, own.depth)]) for _ in range(2))
    optimizer = optimizer_of(TASKS["python-muon"], own, both)
    inner = [each for name, each in apart.named_parameters() if ".layers." in name and each.ndim == 2]
    rest = [each for name, each in apart.named_parameters() if ".layers." not in name or each.ndim != 2]
    assert len(inner) == 4 and {each.ndim for each in rest} == {1, 2}
    theirs = [
        torch.optim.Muon(inner, 0.02, weight_decay=own.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, 0.02, (own.momentum, own.beta2), weight_decay=own.weight_decay),
    ]
    optimizer.param_groups[0]["lr"] = 0.02  # as a schedule does
    for _ in range(2):
        for one, other in zip(both.parameters(), apart.parameters(), strict=True):
            one.grad = other.grad = torch.randn_like(one)
        for each in (optimizer, *theirs):
            each.step()
    for one, other in zip(both.parameters(), apart.parameters(), strict=True):
        assert torch.equal(one, other)
    optimizer.zero_grad()
    assert all(each.grad is None for each in both.parameters())


@pytest.mark.parametrize(("name", "parameters"), [("cifar", 308_826), ("cifar-large", 2_760_442), ("shakespeare", 1_334_720)])
def test_nets_have_the_sizes_that_the_table_says(name: str, parameters: int) -> None:
    own = TASKS[name].defaults
    with torch.device("meta"):
        model = Transformer(0, own.width, own.depth) if own.beta2 else cifar.residual(0, own.width, own.depth)
    assert sum(each.numel() for each in model.parameters()) == parameters
    assert f"{parameters / 1e6:.1f} million parameters" in TASKS[name].about


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "STEPS", 3)
    text = torch.arange(2000) ** 2 % 251
    weights = adapters.trained(text)
    model, plain = adapters.adapted(1, weights), Transformer(0, adapters.WIDTH, adapters.DEPTH)
    plain.load_state_dict({name.removeprefix(adapters.MARK): each for name, each in weights.items()})
    x, y = text[:96][None], text[1:97][None]
    torch.testing.assert_close(model(x), plain(x))
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == 8 * adapters.DEPTH and all(name.endswith((".up", ".down")) for name in names)
    assert sum(each.numel() for each in model.parameters()) == 32_768
    texts.loss(model(x), y).backward()  # at first, only one of two matrices has a gradient
    assert all((float(each.grad.norm()) > 0) == name.endswith(".up") for name, each in model.named_parameters())
    with pytest.raises(Refused, match="width=64 is not the 128 of the transformer"):
        adapters.job(TASKS["adapters"].defaults._replace(width=64), 0, 2, {})


def test_the_tone_of_a_class_has_its_pitch_and_a_perfect_net_is_right() -> None:
    frames, classes = pitch.tones(50, torch.Generator().manual_seed(0))
    hertz = pitch.FIRST * 2 ** (pitch.CENTS * classes / 1200)
    assert 65 <= hertz.min() < 130 and 500 < hertz.max() <= 1000 and torch.allclose(frames.std(1), torch.ones(50))
    assert pytest.approx(pitch.FIRST, abs=0.02) == 31.7  # the frequency that CREPE gives for its first class
    strength = pitch.tones(1, torch.Generator().manual_seed(3))[0][0].double()
    wanted = pitch.FIRST * 2 ** (pitch.CENTS * float(pitch.tones(1, torch.Generator().manual_seed(3))[1]) / 1200)
    time = torch.arange(pitch.FRAME) / pitch.PER_SECOND
    heard = [complex((strength * torch.exp(-2j * math.pi * wanted * by * time)).sum()) for by in (1.0, 1.5)]
    assert abs(heard[0]) > 3 * abs(heard[1])
    assert pitch.accuracy(Oracle()) == 100
    with pytest.raises(Refused, match="width=64 is not the 128 of CREPE's tiny net"):
        pitch.job(TASKS["pitch"].defaults._replace(width=64), 0, 2, {})


class Oracle(torch.nn.Module):
    """Knows the held-out tones."""

    def __init__(self) -> None:
        super().__init__()
        self.left = pitch.tones(pitch.HELD_OUT, torch.Generator().manual_seed(1))[1]

    def forward(self, frames: Tensor) -> Tensor:
        own, self.left = self.left[: len(frames)], self.left[len(frames) :]
        return -(torch.arange(pitch.CLASSES) - own[:, None]).abs()


def test_pictures_are_decoded_and_split(data: Path) -> None:
    arrays = cifar.decode((data / "cifar10-25k.npz").read_bytes())
    assert arrays["train_x"].shape == (30, 32, 32, 3) and arrays["test_x"].shape == (10, 32, 32, 3)
    colours = arrays["test_x"].float().mean((1, 2))
    wanted = torch.tensor([[5.0 * i, 100.0, 255.0 - 5 * i] for i in range(30, 40)])
    torch.testing.assert_close(colours, wanted, atol=2, rtol=0)  # JPEG rounds
    assert arrays["test_y"].tolist() == list(range(10)) and arrays["train_y"].dtype == torch.int64


def test_ranks_take_different_pictures_with_their_labels() -> None:
    pictures = torch.arange(1, 25, dtype=torch.uint8).view(24, 1, 1, 1).expand(24, 32, 32, 3)
    views, labels = cifar.windows(pictures), torch.arange(24)
    parts = [cifar.batches(views, labels, rank, 4, 3, seed=7) for rank in range(4)]
    for _ in range(2):  # two epochs of two steps
        seen = []
        for x, y in (next(part) for part in parts for _ in range(2)):
            shown = x.permute(0, 2, 3, 1)[:, 16, 16] * cifar.DEVIATION + cifar.MEAN
            assert shown.round().int().tolist() == [[label + 1] * 3 for label in y.tolist()]
            seen += y.tolist()
        assert sorted(seen) == list(range(24))
    again, other = (next(cifar.batches(views, labels, 1, 4, 3, seed))[1].tolist() for seed in (7, 8))
    assert again == next(cifar.batches(views, labels, 1, 4, 3, seed=7))[1].tolist() != other


def test_the_sources_of_a_library_are_in_one_order_without_its_tests(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda _: str(data))
    one, other = b"x = 1\n" * 200, b"inner" * 200
    assert texts.python_sources() in (one + other, other + one)
    monkeypatch.setattr(Path, "rglob", lambda self, _, of=Path.rglob: reversed([*of(self, "*.py")]))
    assert texts.python_sources() in (one + other, other + one)


def test_other_data_make_another_prepared_file(data: Path, tmp_path: Path) -> None:
    source = texts.SHAKESPEARE
    first = table.prepare("shakespeare", source, data, tmp_path)
    (tmp_path / "tinyshakespeare.txt").write_bytes(b"To be, or not to be. " * 60)
    second = table.prepare("shakespeare", source, tmp_path, tmp_path)
    assert first != second and {path.name for path in (tmp_path / "data").iterdir()} == {first, second}
    assert bytes(table.load(table.place(tmp_path, second))["train"][:5].tolist()) == b"To be"
