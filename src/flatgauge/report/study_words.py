"""The statistics of a study in plain words."""

from __future__ import annotations

from collections.abc import Iterable

#: By how the name of a column begins: what it is called, and what it means.
_WORDS = {
    "pearson": (
        "Pearson",
        "How well a straight line tells the target from the measure: 1 exactly and rising, 0 not "
        "at all, −1 exactly and falling. One extreme network can make or break it.",
    ),
    "pearson_log": (
        "Pearson (log)",
        "The same with the logarithm of the measure: a straight line on a logarithmic axis.",
    ),
    "spearman": (
        "Spearman",
        "Pearson's correlation of the ranks: whether the order of the networks is the same, "
        "however the measure is scaled. 1 means the same order.",
    ),
    "kendall": (
        "Kendall",
        "Take any two networks: how much more often measure and target agree on which is larger "
        "than they disagree. 1: always agree; 0: as often as not.",
    ),
    "granulated": (
        "granulated",
        "Kendall's coefficient among networks that differ in one factor only, averaged over all "
        "such sets, and then over the factors. It does not reward a measure that merely tells one "
        "setting from another. In brackets: the factor that varies.",
    ),
    "information": (
        "information",
        "Conditional mutual information: how much knowing which of two networks has the larger "
        "measure tells of which has the larger gap, once some factors are known, as a share of "
        "what there is to know. 0: nothing, 1: everything. The smallest over the sets of factors.",
    ),
    "information_chance": (
        "information by chance",
        "What a measure that knows nothing would score here: few networks give a number above 0 "
        "by luck. Compare the information with it.",
    ),
    "information_chance_high": (
        "information by chance, high",
        "What such a measure exceeds in one of twenty cases only.",
    ),
    "sign_error_mean": (
        "sign error",
        "How often the measure orders two networks wrongly that differ in one setting only: 0 "
        "never, 0.5 as a coin does. The mean over pairs of settings, and the worst of them.",
    ),
    "partial": (
        "partial",
        "The correlation that is left when a possible confounder (in brackets) is held still. If "
        "it falls to 0, the measure may only repeat what the confounder says.",
    ),
    "before": (
        "before and after",
        "The correlation of the networks as trained, and after each was randomly rescaled: units "
        "are scaled up on one side and down on the other, so that no output changes.",
    ),
    "lost": (
        "lost",
        "How much of the correlation the rescaling took away, with its interval.",
    ),
    "itself": (
        "itself",
        "The rank correlation of a measure with itself across the rescaling. 1: the order of the "
        "networks stayed; a measure that does not depend on how a network is written has 1.",
    ),
    "largest_change": (
        "largest change",
        "The largest relative change of the measure on any network by the rescaling.",
    ),
}

_ALWAYS = {
    "interval": (
        "The range in brackets. The networks are drawn again and again, with repetition, and the "
        "coefficient is computed anew each time (bootstrap). If the range contains 0, these "
        "networks do not show that measure and target go together."
    ),
    "counted": (
        "Only networks that reached the stated training criterion enter statistics; the others "
        "are drawn hollow and grey, and listed."
    ),
    "line and band": (
        "The line of least squares on the scale that is shown (logarithmic where the axis says "
        "so), and where 95 % of the lines through redrawn networks lie."
    ),
}


def statistics_words(columns: Iterable[str]) -> dict[str, str]:
    """Explain the columns of a study's tables.

    Args:
        columns: Their names.

    Returns:
        By name in plain words: what it means. Columns that are not known are left out.
    """
    found = {}
    bare = {column.split("[")[0] for column in columns}
    for start, (name, meaning) in _WORDS.items():
        if start in bare:
            found[name] = meaning
    return found | _ALWAYS
