"""All drawings: one of each algorithm, by its name, and one of the routes."""

from __future__ import annotations

from collections.abc import Callable

from laboratory.drawings.codes import lgc
from laboratory.drawings.rounded import rounded
from laboratory.drawings.routes import routes
from laboratory.drawings.sketches import gs_sgd, sketched_sgd
from laboratory.drawings.whole import dense, gtopk, half, sdagc, topk

DRAWINGS: dict[str, Callable[[], str]] = {
    "dense": dense,
    "half": half,
    "topk": topk,
    "sdagc": sdagc,
    "gs_sgd": gs_sgd,
    "sketched_sgd": sketched_sgd,
    "gtopk": gtopk,
    "lgc": lgc,
    "orq": rounded(
        "orq:levels=5", "random rounding to the best levels", "Dashed: the five levels with the least squared error", "levels"
    ),
    "bingrad": rounded("bingrad", "one bit an entry", "Dashed: the means above and below the mean", "levels"),
    "qsgd": rounded("qsgd", "random rounding to fractions of the norm", "Dashed: even levels up to the Euclidean norm", "norm"),
    "terngrad": rounded(
        "terngrad", "random rounding to -s, 0 or s", "Dashed: minus and plus the largest magnitude, and 0", "s ="
    ),
    "linear": rounded("linear", "random rounding to even levels", "Dashed: even levels between the ends", "ends"),
    "routes": routes,
    "sign": rounded("sign", "signs and a mean magnitude", "Dashed: minus and plus the mean magnitude", "magnitude"),
}
