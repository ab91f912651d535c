"""A rank of `lab train`: trains a task by every way in turns, and times each step."""

from __future__ import annotations

from typing import Any

from laboratory import ranks
from laboratory.timing import rotated
from laboratory.train import start
from laboratory.train.trainee import Door, Trainee

# Steps of each way before the rounds that count.
WARM_UP = 2

# The most steps in which gradcomp's auto may choose before the rounds.
CHOOSING = 500


def warmed_up(trainees: list[Trainee], door: Door, steps: int, turn: float) -> dict[str, int]:
    """Warm every way up, and let auto choose. Return how many steps of each fit a turn."""
    fitting = {}
    for done, trainee in enumerate(trainees):
        if door.rank == 0:
            ranks.tell(f"warm-up, {trainee.way}", done / len(trainees))
        choose(trainee, door)
        took = turn_of(trainee, door, WARM_UP)
        fitting[trainee.way] = max(1, min(steps, int(turn / took[-1])))
    return fitting


def timed(trainees: list[Trainee], door: Door, rounds: int, fitting: dict[str, int]) -> dict[str, list[list[float]]]:
    """Return the turns of each way, each of so many steps as fit one."""
    found: dict[str, list[list[float]]] = {trainee.way: [] for trainee in trainees}
    for at in range(rounds):
        for done, i in enumerate(rotated(len(trainees), at)):
            trainee = trainees[i]
            if door.rank == 0:
                part = (at * len(trainees) + done) / (len(trainees) * rounds)
                ranks.tell(f"round {at + 1} of {rounds}, {trainee.way}", part)
            found[trainee.way].append(turn_of(trainee, door, fitting[trainee.way]))
    return found


def turn_of(trainee: Trainee, door: Door, steps: int) -> list[float]:
    """Time some steps, averaged over the ranks. Begin when all ranks are there."""
    door.means([0.0], "turn")
    seconds = [trainee.step() / trainee.passes for _ in range(steps)]
    trainee.rest()
    return door.means(seconds, f"times {steps}")


def choose(trainee: Trainee, door: Door) -> None:
    """Train until gradcomp's auto has chosen, if this way is auto."""
    for step in range(CHOOSING):
        if trainee.fitted.stats().get("auto", {"choices": 1})["choices"]:
            return
        if door.rank == 0 and step % 10 == 0:
            ranks.tell(f"{trainee.way} chooses, step {step}")
        trainee.step()


def measure(started: start.Started) -> dict[str, Any]:
    """Time every way on the command line."""
    options, door = started.options, started.door
    trainees = [started.trainee(way) for way in options.ways]
    fitting = warmed_up(trainees, door, options.steps, options.turn)
    turns = timed(trainees, door, options.rounds, fitting)
    found = {}
    for trainee in trainees:
        own: dict[str, Any] = {"rounds": turns[trainee.way], "bytes": trainee.fitted.bytes_sent(), "loss": trainee.loss}
        if auto := trainee.fitted.stats().get("auto"):
            own["auto"] = auto
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
    parser.add_argument("ways", nargs="+")


if __name__ == "__main__":
    start.run(__doc__, add_options, measure)
