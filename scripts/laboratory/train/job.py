"""A rank of `lab train` and `lab compare`: trains a task by every way in turns, and times each step."""

from __future__ import annotations

from typing import Any

from laboratory import ranks
from laboratory.timing import rotated
from laboratory.train import forecast, start
from laboratory.train.trainee import Door, Trainee

# Steps of each way before the rounds that count.
WARM_UP = 2

# The most steps in which gradcomp's auto may choose before the rounds.
CHOOSING = 500


def timed(trainees: list[Trainee], door: Door, rounds: int, steps: int, turn: float) -> dict[str, list[list[float]]]:
    """Return the seconds of each way, round and step. The warm-up before them decides how many steps fit a turn."""
    found: dict[str, list[list[float]]] = {trainee.way: [] for trainee in trainees}
    fitting: dict[str, int] = {}
    for at in range(rounds + 1):
        for done, i in enumerate(rotated(len(trainees), at)):
            trainee = trainees[i]
            if door.rank == 0:
                stage = f"round {at}" if at else "warm-up"
                part = (at * len(trainees) + done) / (len(trainees) * (rounds + 1))
                ranks.tell(f"{stage} of {rounds}, {trainee.way}", part)
            seconds = turn_of(trainee, door, fitting[trainee.way] if at else WARM_UP)
            if at:
                found[trainee.way].append(seconds)
                continue
            choose(trainee, door)
            fitting[trainee.way] = max(1, min(steps, int(turn / seconds[-1])))
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
        if trainee.fitted.stats().get("auto", {"cost_in_steps": 0}).get("cost_in_steps") is not None:
            return
        if door.rank == 0 and step % 10 == 0:
            ranks.tell(f"{trainee.way} chooses, step {step}")
        trainee.step()


def measure(started: start.Started) -> dict[str, Any]:
    """Time every way on the command line."""
    options, door = started.options, started.door
    trainees = [started.trainee(way) for way in options.ways]
    foreseen = forecast.predicted(started, options.ways) if options.predicts else {}
    seconds = timed(trainees, door, options.rounds, options.steps, options.turn)
    found = {}
    for trainee in trainees:
        own: dict[str, Any] = {"rounds": seconds[trainee.way], "bytes": trainee.fitted.bytes_sent(), "loss": trainee.loss}
        if auto := trainee.fitted.stats().get("auto"):
            own["auto"] = auto
        if trainee.way in foreseen:
            own["predicted_ms"] = 1000 * foreseen[trainee.way]
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
    parser.add_argument("ways", nargs="+")


if __name__ == "__main__":
    start.run(__doc__, add_options, measure)
