"""A rank of `lab train` and `lab compare`: trains a task by every way in turns, and times each step."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from laboratory import ranks
from laboratory.timing import rotated
from laboratory.train import forecast, processor, start
from laboratory.train.trainee import Door, Trainee

# Steps of each way before the rounds that count.
WARM_UP = 2

# The most steps in which gradcomp's auto may choose before the rounds.
CHOOSING = 500


class Turn(NamedTuple):
    """A turn of a way: the seconds of each step, and the processor time of all, averaged over the ranks."""

    seconds: list[float]
    processor: processor.Used


def warmed_up(trainees: list[Trainee], door: Door, steps: int, turn: float) -> dict[str, int]:
    """Warm every way up, and let auto choose. Return how many steps of each fit a turn."""
    fitting = {}
    for done, trainee in enumerate(trainees):
        if door.rank == 0:
            ranks.tell(f"warm-up, {trainee.way}", done / len(trainees))
        choose(trainee, door)
        took = turn_of(trainee, door, WARM_UP)
        fitting[trainee.way] = max(1, min(steps, int(turn / took.seconds[-1])))
    return fitting


def timed(trainees: list[Trainee], door: Door, rounds: int, fitting: dict[str, int]) -> dict[str, list[Turn]]:
    """Return the turns of each way, each of so many steps as fit one."""
    found: dict[str, list[Turn]] = {trainee.way: [] for trainee in trainees}
    for at in range(rounds):
        for done, i in enumerate(rotated(len(trainees), at)):
            trainee = trainees[i]
            if door.rank == 0:
                part = (at * len(trainees) + done) / (len(trainees) * rounds)
                ranks.tell(f"round {at + 1} of {rounds}, {trainee.way}", part)
            found[trainee.way].append(turn_of(trainee, door, fitting[trainee.way]))
    return found


def turn_of(trainee: Trainee, door: Door, steps: int) -> Turn:
    """Time some steps, averaged over the ranks. Begin when all ranks are there."""
    door.means([0.0], "turn")
    before = processor.used()
    seconds = [trainee.step() / trainee.passes for _ in range(steps)]
    used = processor.used().since(before)
    trainee.rest()
    *means, own, network = door.means([*seconds, used.own, used.network], f"times {steps}")
    return Turn(means, processor.Used(own, network))


def choose(trainee: Trainee, door: Door) -> None:
    """Train until gradcomp's auto has chosen, if this way is auto."""
    for step in range(CHOOSING):
        if trainee.fitted.stats().get("auto", {"cost_in_steps": 0}).get("cost_in_steps") is not None:
            return
        if door.rank == 0 and step % 10 == 0:
            ranks.tell(f"{trainee.way} chooses, step {step}")
        trainee.step()


def measure(started: start.Started) -> dict[str, Any]:
    """Time every way on the command line."""
    options, door = started.options, started.door
    trainees = [started.trainee(way) for way in options.ways]
    fitting = warmed_up(trainees, door, options.steps, options.turn)
    # The machine is not the same all the time: it is measured for forecasts on both sides of the rounds, when all runs.
    foreseen = [forecast.predicted(started, options.ways)] if options.predicts else []
    turns = timed(trainees, door, options.rounds, fitting)
    foreseen += [forecast.predicted(started, options.ways)] if options.predicts else []
    alone = {way: processor.kernels(started, way) for way in options.ways} if options.processor else {}
    found = {}
    for trainee in trainees:
        rounds = [turn.seconds for turn in turns[trainee.way]]
        own: dict[str, Any] = {"rounds": rounds, "bytes": trainee.fitted.bytes_sent(), "loss": trainee.loss}
        if options.processor:
            batches = [len(turn.seconds) * trainee.passes for turn in turns[trainee.way]]
            of_batch = [[each / n for each in turn.processor] for turn, n in zip(turns[trainee.way], batches, strict=True)]
            kernels = alone[trainee.way]
            own["processor"] = {"rounds": of_batch, "kernels": None if kernels is None else kernels._asdict()}
        if auto := trainee.fitted.stats().get("auto"):
            own["auto"] = auto
        if predicted := [each[trainee.way] for each in foreseen if trainee.way in each]:
            own["predicted_ms"] = 1000 * statistics.fmean(predicted)
        found[trainee.way] = own
    return {
        "ranks": door.size,
        "batch": started.settings.batch,
        "parameters": started.parameters,
        "bytes_dense": 4 * started.parameters,
        "ways": found,
    }


def add_options(parser: Any) -> None:
    """Add the options of the rounds."""
    for name in ("rounds", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--turn", type=float, required=True)
    parser.add_argument("--predicts", action="store_true")
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("ways", nargs="+")


if __name__ == "__main__":
    start.run(__doc__, add_options, measure)
