"""How far beyond the ends of a Krylov space an eigenvalue may lie that it has not shown."""

from __future__ import annotations

import math

import numpy as np

from flatgauge.estimators.krylov import Krylov

CHANCE = 1 / 2000
"""Chance with which an eigenvalue may lie further out than `unseen` says."""

#: Halvings of the interval in which the distance is searched: to the last digits.
_HALVINGS = 60


def unseen(space: Krylov, sign: float, chance: float = CHANCE) -> float:
    r"""Distance beyond the outermost Ritz value within which an eigenvalue may be hidden.

    Definition:
        After :math:`s` products from a unit start :math:`v`, the direction that comes next is

        .. math:: P(A) v, \qquad P(\lambda) = \prod_{i=1}^s (\lambda - \theta_i) / \beta_i,

        with the Ritz values :math:`\theta_i` and the lengths :math:`\beta_i` that were divided
        by. Its component along a unit eigenvector of :math:`\lambda` is that of :math:`v` times
        :math:`P(\lambda)`, and at most one in size. A random :math:`v` has a component below
        :math:`t` with a chance of at most :math:`t \sqrt{2 p / \pi}`, so an eigenvalue beyond
        the point where :math:`P` is :math:`\sqrt{2 p / \pi} / \text{chance}` exists with at most
        this chance over the starts, whatever the matrix.

    Reference:
        [vandorsselaer2000computing]

    Args:
        space: Grown from one random start.
        sign: 1 for the largest eigenvalue, -1 for the smallest.
        chance: Chance with which the distance may be too short.

    Returns:
        The distance; zero where the space has closed, and infinite where it was not grown
        from one start.
    """
    if not space.pending:
        return 0.0
    if space.starts != 1 or not space.size:
        return math.inf
    exponent = math.frexp(space.scale)[1]  # Powers of two change no digit of the answer.
    roots = np.ldexp(np.append(space.ritz().values, space.left_out), -exponent)
    steps = np.ldexp(space.lengths, -exponent)
    luck = math.sqrt(2 * space.matrix.size / math.pi) / chance
    goal = float(np.log(steps).sum()) + math.log(luck)
    inwards = (sign * roots).max() - sign * roots
    low, high = 0.0, math.exp(goal / len(roots))  # At this distance from all it is reached.
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        reached = float(np.log(inwards + middle).sum()) >= goal
        low, high = (low, middle) if reached else (middle, high)
    return math.ldexp(high, exponent)
