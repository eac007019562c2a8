"""The grid as measures: every functional of the loss in every geometry, a row per geometry.

In: tables of names, symbols, papers and formulas. Out: sixteen measures. Each is a call of `cell`
(`geometry.functionals`) with the geometry's own defaults; its options are those of the functional
and of the chart, and its docstring is assembled from theirs and from what stands here.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from flatgauge.estimators.estimate import Estimate
from flatgauge.geometry import chart
from flatgauge.geometry.chart import GEOMETRIES
from flatgauge.geometry.functionals import FUNCTIONALS, cell
from flatgauge.measures.declaration import declare
from flatgauge.measures.registry import RESCALINGS, Family, ModelDefault, Needs
from flatgauge.surface.surface import LossSurface

#: What a measure of each functional declares.
_FACTS: dict[str, dict[str, Any]] = {
    "top eigenvalue": {
        "requires": Needs(products=True),
        "cost": "about 6 to 25 Hessian products at the default tolerance",
    },
    "trace": {
        "cost": "one sweep (about classes + 2 gradients) where it is exact, else 48 Hessian "
        "products",
        "docs": """
        Cost:
            One sweep over the data gives the traces of all parameters in which the output is
            linear, exactly. The others, or all of them by another method, take one Hessian product
            per probe: the default budget leaves an error of some 3 to 20 %, which the standard
            error shows; a tolerance takes as many as it needs. [meyer2021hutchpp]
        """,
    },
    "worst case in a ball": {
        "requires": Needs(products=True),
        "kind": "worst case",
        "cost": "starts × steps gradients, and the top eigenvalue",
        "docs": """
        Cost:
            ``starts * steps`` gradients, and the top eigenvalue (6 to 25 Hessian products, shared
            with ``<top>``) for a start and the prediction of second order.
        Returns:
            A lower bound of the maximum: the largest rise seen; infinite if the ball reaches a
            pole. In `details`: every start's rise, and what the loss's first two orders predict.
        """,
    },
    "expectation": {
        "kind": "expectation",
        "cost": "2 × pairs forward passes",
        "docs": """
        Cost:
            ``2 * pairs`` forward passes; pairs u, -u cancel the gradient.
        """,
    },
}

#: Options of charts that only noise depends on.
_OF_NOISE = frozenset({"truncation"})


@dataclass(frozen=True)
class GridCell:
    """One functional in a geometry, under a name of its own."""

    functional: str
    name: str
    symbol: str
    paper: str
    summary: str
    formula: str
    examples: Sequence[tuple[str, float, str]]  # arguments, value, how it comes about
    _: KW_ONLY
    note: str = ""  # follows the formula
    invariance: str = ""  # why, or why not
    reference: str = ""  # where it is not that of the row
    cost: str = ""  # where it is not that of the functional
    docs: str = ""  # further sections of the docstring
    rename: Mapping[str, str] = field(default_factory=dict)  # public names of options
    model_defaults: Mapping[str, ModelDefault] = field(default_factory=dict)


def grid_row(
    geometry: str,
    *cells: GridCell,
    invariant_to: frozenset[str],
    reference: str,
    docs: str = "",
    not_with: Mapping[tuple[str, Any], frozenset[str]] | None = None,
) -> tuple[Callable[..., Estimate], ...]:
    """Declare the cells of one geometry as measures; they are returned in their order."""
    top = next(item.name for item in cells if item.functional == "top eigenvalue")
    measures = []
    for item in cells:
        facts = _FACTS[item.functional] | ({"cost": item.cost} if item.cost else {})
        if item.functional == "trace":
            part = getattr(GEOMETRIES[geometry], "part", "diagonal")
            facts["requires"] = Needs(frozenset({part}))
        of_functional = inspect.getdoc(FUNCTIONALS[item.functional]) or ""
        shared = facts.pop("docs", "").replace("<top>", top)
        family = Family(
            paper=item.paper,
            reference=item.reference or reference,
            geometry=geometry,
            functional=item.functional,
            invariant_to=invariant_to,
            not_with=not_with or {},
            model_defaults=item.model_defaults,
            docs="\n\n".join(inspect.cleandoc(text) for text in (of_functional, shared, docs)),
            **facts,
        )
        measures.append(
            declare(
                _function(geometry, item),
                family,
                name=item.name,
                symbol=item.symbol,
                summary=item.summary,
                docs="\n".join(_sections(item)),
            )
        )
    return tuple(measures)


def _sections(item: GridCell) -> Iterator[str]:
    """The sections of the docstring that a cell has to itself."""
    lines = [".. math:: " + item.formula.replace("\n", "\n" + " " * 10)]
    lines += ["", *textwrap.wrap(item.note, 92)] if item.note else []
    yield "Definition:\n" + textwrap.indent("\n".join(lines), "    ")
    if item.invariance:
        yield f"Invariance:\n    {item.invariance}"
    for public in item.rename.values():
        yield f"Args:\n    {public}: The ball's radius."
    if item.docs:
        yield inspect.cleandoc(item.docs)
    lines = [f">>> from flatgauge.surface.examples import {item.examples[0][0].split('(')[0]}"]
    if item.functional != "trace":
        lines = [">>> import torch", *lines]
    for call, value, comment in item.examples:
        comment = f"  # {comment}" if comment else ""
        if item.functional == "trace":
            lines += [f">>> found = <name>({call})"]
        else:
            lines += [">>> generator = torch.Generator().manual_seed(0)"]
            lines += [f">>> found = <name>({call}, generator=generator)"]
        if item.functional == "expectation":
            lines += [f">>> abs(found.value - {value}) < 3 * found.stderr{comment}", "True"]
        else:
            digits = len(str(value).split(".")[1])
            lines += [f">>> round(found.value, {digits}){comment}", str(value)]
    yield "Example:\n" + textwrap.indent("\n".join(lines), "    ")


def _function(geometry: str, item: GridCell) -> Callable[..., Estimate]:
    """A cell as a function of a surface, with the options of its functional and its chart."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    charts = GEOMETRIES[geometry]
    of_chart = inspect.signature(charts).parameters
    names = [o for o in charts.options if o not in _OF_NOISE or item.functional == "expectation"]
    of_functional = inspect.signature(FUNCTIONALS[item.functional]).parameters
    options = [of_chart[name].replace(kind=keyword) for name in (*names, "parameters")]
    for option in list(of_functional.values())[1:]:
        if option.name == "option":  # For messages.
            continue
        default = charts.defaults().get(option.name)
        if default is not None:
            annotation = str(option.annotation).removesuffix(" | None")
            option = option.replace(default=default, annotation=annotation)
        options.append(option.replace(name=item.rename.get(option.name, option.name)))
    inner = {public: name for name, public in item.rename.items()}
    named: dict[str, Any] = {"option": item.rename["epsilon"]} if "epsilon" in item.rename else {}

    def compute(surface: LossSurface, **given: Any) -> Estimate:
        return cell(
            surface,
            geometry=geometry,
            functional=item.functional,
            **named,
            **{inner.get(name, name): value for name, value in given.items()},
        )

    surface = inspect.signature(cell).parameters["surface"]
    compute.__signature__ = inspect.Signature([surface, *options])  # type: ignore[attr-defined]
    return compute


def _half_limit(surface: LossSurface, options: Mapping[str, Any]) -> float | None:
    """The default radius and truncation: half of min |u_b|, None where nothing limits them."""
    if options["relative"]:
        return None
    found = chart(surface, "basis paths", options["parameters"], skeleton=options["skeleton"])
    return found.epsilon if math.isfinite(found.limit) else None


# The rows, one geometry each.

hessian_trace, hessian_max_eigenvalue, epsilon_sharpness, expected_sharpness = grid_row(
    "weights",
    GridCell(
        "trace",
        "hessian_trace",
        "tr H",
        "classical; a baseline of Petzka et al. 2019 and Tsuzuku et al. 2019",
        "Sum of all eigenvalues of the Hessian over all trainable parameters.",
        r"\operatorname{tr} H = \sum_i \partial^2 L / \partial \theta_i^2",
        [
            ("two_weights(2.0, 3.0)", 26.0, "L = (b relu(a))² has the Hessian diagonal 2b², 2a²"),
            ("two_weights(20.0, 0.3)", 800.18, "the same function"),
        ],
        invariance="Rescaling a hidden unit by c multiplies the second derivatives of what enters "
        "it by c⁻² and of what leaves it by c²: the trace can be made as large as one likes "
        "without changing the function.",
        reference="[meyer2021hutchpp] for the estimator.",
    ),
    GridCell(
        "top eigenvalue",
        "hessian_max_eigenvalue",
        "λ_max(H)",
        "classical; a baseline of Petzka et al. 2019 and Rangamani et al. 2019",
        "Largest eigenvalue of the Hessian over all trainable parameters.",
        r"\lambda_{\max}(H) = \max_{\|u\|_2 = 1} u^\top H u",
        [("bowl([3.0, 1.0])", 3.0, "of ½ (3 a² + b²)")],
        note="The largest by sign, not by size.",
        reference="[lanczos1950]",
    ),
    GridCell(
        "worst case in a ball",
        "epsilon_sharpness",
        "S_ε",
        "Keskar et al. 2017; a baseline of Yi et al. 2019",
        "Largest rise of the loss within a ball around the weights, relative to 1 + loss.",
        r"S_\varepsilon = \max_{\|\delta\|_2 \le \varepsilon}"
        "\n"
        r"\frac{L(\theta + \delta) - L(\theta)}{1 + L(\theta)}",
        [("bowl([3.0, 1.0]), epsilon=0.1", 0.015, "½ (3 a² + b²) rises most along a")],
        invariance="The ball is absolute: shrink all weights of a layer and enlarge the next, and "
        "it reaches further.",
        reference="[keskar2017large]",
    ),
    GridCell(
        "expectation",
        "expected_sharpness",
        "|E L(θ+σu) − L(θ)|",
        "Neyshabur et al. 2017; a baseline of Yi et al. 2019",
        "Mean change of the loss under Gaussian noise on every weight, in size.",
        r"|E\,L(\theta + \sigma u) - L(\theta)|, \quad u \sim N(0, I)",
        [("bowl([3.0, 1.0]), sigma=0.1", 0.02, "0.1² * (3 + 1) / 2")],
        note="To second order it is ``½ σ² |tr H|``.",
        invariance="The noise is absolute, so it shakes small weights more.",
        reference="[neyshabur2017exploring]",
    ),
    invariant_to=frozenset({"permutation", "output_shift"}),
    reference="",
)

(
    riemannian_max_eigenvalue,
    riemannian_trace,
    riemannian_epsilon_sharpness,
    riemannian_expected_sharpness,
) = grid_row(
    "per tensor",
    GridCell(
        "top eigenvalue",
        "riemannian_max_eigenvalue",
        "λ_max(DHD), D = ‖θ_i‖",
        "Rangamani et al. 2019, Def. 3 and Prop. 2.5",
        "Largest eigenvalue of the Hessian where each parameter tensor has norm one.",
        r"\lambda_{\max}(D H D), \qquad D = \operatorname{diag}(\|\theta_i\|_2)",
        [
            (
                "two_weights(2.0, 3.0)",
                216.0,
                "H = [[18, 24], [24, 8]], DHD = [[72, 144], [144, 72]]",
            ),
            ("two_weights(20.0, 0.3)", 216.0, "the same function"),
        ],
        note="with one norm for each parameter tensor, weights and biases. It is the spectral norm "
        "of the Riemannian Hessian under the metric "
        r":math:`\sum_i \langle\eta_i, \xi_i\rangle / \|\theta_i\|^2`. A tensor of zeros does not "
        "take part.",
    ),
    GridCell(
        "trace",
        "riemannian_trace",
        "tr(DHD), D = ‖θ_i‖",
        "an open cell of the grid; over layers it is κ_τ,Σ of Petzka et al. 2019",
        "Trace of the Hessian where each parameter tensor has norm one.",
        r"\operatorname{tr}(D H D) = \sum_i \|\theta_i\|_2^2 \operatorname{tr} H_{ii}",
        [("two_weights(2.0, 3.0)", 144.0, "2² * 18 + 3² * 8")],
        note='over all parameter tensors, weights and biases; with ``parameters="layers"`` it is '
        "``kappa_trace_sum``.",
    ),
    GridCell(
        "worst case in a ball",
        "riemannian_epsilon_sharpness",
        "S_ε in units of ‖θ_i‖",
        "Rangamani et al. 2019",
        "Largest rise of the loss in a ball measured by the tensors' norms, relative to 1 + loss.",
        r"\max_{\|u\|_2 \le \varepsilon} \frac{L(\theta + D u) - L(\theta)}{1 + L(\theta)},"
        "\n"
        r"\qquad D = \operatorname{diag}(\|\theta_i\|_2)",
        [("two_weights(2.0, 3.0)", 0.14507, "36 ((1 + 0.05 / √2)⁴ - 1) / 37")],
    ),
    GridCell(
        "expectation",
        "riemannian_expected_sharpness",
        "|E L(θ+σDu) − L(θ)|, D = ‖θ_i‖",
        "an open cell of the grid; no paper has it",
        "Mean change of the loss under noise in proportion to every tensor's norm, in size.",
        r"|E\,L(\theta + \sigma D u) - L(\theta)|, \qquad"
        "\n"
        r"D = \operatorname{diag}(\|\theta_i\|_2), \quad u_i \sim N(0, I / n_i)",
        [("two_weights(2.0, 3.0), sigma=0.01, pairs=400", 0.0072, "0.01² * 144 / 2, and more")],
        note="with n_i the number of weights of tensor i: its noise has the expected squared "
        r"length :math:`\sigma^2 \|\theta_i\|^2`. To second order it is "
        r":math:`\tfrac12 \sigma^2 |\sum_i \|\theta_i\|^2 \operatorname{tr} H_{ii} / n_i|`.",
    ),
    invariant_to=frozenset({"layerwise", "permutation"}),
    reference="[rangamani2019scale]",
    docs="""
    Invariance:
        (A shift of the outputs changes the size of the last bias.)
    """,
)

(
    riemannian_max_eigenvalue_nodewise,
    adaptive_trace,
    adaptive_sharpness,
    adaptive_expected_sharpness,
) = grid_row(
    "per weight",
    GridCell(
        "top eigenvalue",
        "riemannian_max_eigenvalue_nodewise",
        "λ_max(DHD), D = |θ|",
        "Rangamani et al. 2019, §6",
        "Largest eigenvalue of the Hessian in units of every parameter's own size.",
        r"\lambda_{\max}(D H D), \qquad D = \operatorname{diag}(|\theta|)",
        [("two_weights(2.0, 3.0)", 216.0, "")],
        reference="[rangamani2019scale]",
    ),
    GridCell(
        "trace",
        "adaptive_trace",
        "Σ θ² h",
        "a cell of the grid; cf. Kim et al. 2023, connectivity sharpness",
        "Trace of the Hessian in units of every parameter's own size.",
        r"\operatorname{tr}(D H D) = \sum_k \theta_k^2 \, \partial^2 L / \partial \theta_k^2,"
        "\n"
        r"\qquad D = \operatorname{diag}(|\theta|)",
        [
            ("two_weights(2.0, 3.0)", 144.0, "2² * 18 + 3² * 8"),
            ("two_weights(20.0, 0.3)", 144.0, "the same function"),
        ],
    ),
    GridCell(
        "worst case in a ball",
        "adaptive_sharpness",
        "max L(θ+δ) − L(θ), ‖δ/|θ|‖ ≤ ρ",
        "Kwon et al. 2021 (ASAM)",
        "Largest rise of the loss under relative changes of the weights.",
        r"\max_{\|u\|_2 \le \rho} L(\theta + |\theta| \odot u) - L(\theta)",
        [("two_weights(2.0, 3.0)", 84.838, "36 ((1 + 0.5 / √2)⁴ - 1)")],
        rename={"epsilon": "rho"},
    ),
    GridCell(
        "expectation",
        "adaptive_expected_sharpness",
        "|E L(θ+σ|θ|u) − L(θ)|",
        "an open cell of the grid; no paper has it",
        "Mean change of the loss under noise in proportion to every weight, in size.",
        r"|E\,L(\theta + \sigma |\theta| \odot u) - L(\theta)|, \quad u \sim N(0, I)",
        [("two_weights(2.0, 3.0), sigma=0.01, pairs=400", 0.0072, "0.01² * 144 / 2, and more")],
        note="To second order it is ``½ σ²`` times the size of ``adaptive_trace``.",
    ),
    invariant_to=RESCALINGS | {"permutation"},
    reference="[kwon2021asam] for the geometry.",
    docs="""
    Invariance:
        (A shift of the outputs changes the last bias.)
    """,
)

psi_max_eigenvalue, psi_trace, psi_epsilon_sharpness, psi_expected_sharpness = grid_row(
    "basis paths",
    GridCell(
        "top eigenvalue",
        "psi_max_eigenvalue",
        "λ_max(∂²L/∂v²)",
        "an open cell of Yi et al. 2019, whose skeleton is the diagonal one",
        "Largest eigenvalue of the Hessian by path values; strongest skeleton by default.",
        r"\lambda_{\max}\left(\frac{\partial^2 L}{\partial v^2}\right)",
        [
            ("two_weights(2.0, 3.0)", 2.0, "L = v² in the value v = ab of the only path"),
            ("two_weights(20.0, 0.3)", 2.0, "the same function"),
        ],
        note="with v the values of the m - H basis paths.",
    ),
    GridCell(
        "trace",
        "psi_trace",
        "tr ∂²L/∂v²",
        "Yi et al. 2019, Definition 4.1, whose skeleton is the diagonal one",
        "Trace of the Hessian by path values; strongest skeleton by default.",
        r"\operatorname{tr} \frac{\partial^2 L}{\partial v^2}"
        "\n"
        r"= \sum_k \frac{\partial^2 L}{\partial v_k^2}",
        [("two_weights(2.0, 3.0)", 2.0, "L = v²")],
        note="with v the values of the m - H basis paths. For a path value that no weight is "
        "divided by, the second derivative is its weight's, over (P R)². For the *roots*, each of "
        "which scales all that leaves the hidden units of its run, it comes out of a second sweep "
        "for runs of one or two units; for longer runs and residual streams by Hessian products, "
        "exactly where there are no more of them than `probes`, else by Hutch++ over them alone. "
        "The part of the trace that is of first order (zero where the gradient is) is in "
        '``details["first order"]``.',
        cost="two sweeps (2 × classes + 5 gradients) where exact, 48 Hessian products for the rest",
        docs="""
        Cost:
            Two sweeps (the first is shared with other measures); products for what is left.
        """,
    ),
    GridCell(
        "worst case in a ball",
        "psi_epsilon_sharpness",
        "max (L(v+δ) − L(v)) / (1 + L), ‖δ‖ ≤ ε",
        "Yi et al. 2019, eq. 7, whose skeleton is the diagonal one",
        "Largest rise in a ball of path values over 1 + loss; strongest skeleton by default.",
        r"\max_{\|\delta\|_2 \le \varepsilon} \frac{L(v + \delta) - L(v)}{1 + L(v)}",
        [("two_weights(2.0, 3.0)", 1.216216, "(9² - 6²) / (1 + 6²): L = v², v = 6, radius 3")],
        note="Where the path value of a hidden unit passes zero, the loss has a pole: from a "
        "radius of the smallest of them on, min |u_b|, the value is infinite.",
        docs="""
        Args:
            epsilon: The ball's radius; None for half of min |u_b| (0.5 with ``relative=True``, 0.1
                without hidden units). `fg.compare` uses the smallest of the models' defaults.
        """,
        model_defaults={"epsilon": _half_limit},
    ),
    GridCell(
        "expectation",
        "psi_expected_sharpness",
        "|E L(v+u) − L(v)|",
        "Yi et al. 2019, Definition 4.1, whose skeleton is the diagonal one",
        "Mean change of the loss under noise on path values; strongest skeleton by default.",
        r"|E\,L(v + u) - L(v)|",
        [("two_weights(2.0, 3.0), pairs=400", 0.0025, "L = v²: 0.05²")],
        note="Every component of u is normal of size σ, on the condition that it is not larger "
        "than the truncation: without it the mean is infinite, because the loss has poles where "
        "the path value of a hidden unit is zero.",
        docs="""
        Args:
            sigma: The size of the noise; the paper draws its plots with 0.05.
            truncation: The largest size of a component, below min |u_b|; None for half of that.
                `fg.compare` uses the smallest of the models' defaults. Not used with
                ``relative=True``, where there are no poles.
        """,
        model_defaults={"truncation": _half_limit},
    ),
    invariant_to=RESCALINGS | {"permutation", "output_shift"},
    reference="[yi2019positively]",
    # The diagonal skeleton follows the order of the units; log|v| sees the size of the last bias.
    not_with={
        ("skeleton", "diagonal"): frozenset({"permutation"}),
        ("relative", True): frozenset({"output_shift"}),
    },
    docs="""
    Invariance:
        (Not permutation with ``skeleton="diagonal"``, or where the strongest skeleton is tied,
        which is noted; not output_shift with ``relative=True``.)
    Args:
        skeleton: ``"strongest"``, or ``"diagonal"`` for the paper's, which depends on the order of
            the units, and whose values differ by orders of magnitude.
        relative: Whether log|v| is moved in the place of v, which spans many orders of magnitude.
    Raises:
        ValueError: If an option is out of range, parameters are frozen, or a generator is needed
            and missing.
        UnsupportedGraphError: If the model has no basis paths.
    """,
)
