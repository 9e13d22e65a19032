"""Verdicts on claims: a quantity over seeds, its 95 % interval and the bounds of the claim decide each check."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any, NamedTuple

from fedsieve.studies.results import paired_difference

HOLDS, FAILS, UNDECIDED, NOT_EVALUATED = "holds", "does not hold", "undecided", "not evaluated"


class Check(NamedTuple):
    """A claim in one case: a quantity with its interval, the bounds that the claim sets, and the outcome."""

    case: dict[str, Any]
    quantity: str
    mean: float | None
    interval: float | None
    """half-width of the 95 % t interval over seeds; None for one seed"""
    error: float | None
    """standard error of the mean"""
    num_seeds: int
    at_least: float | None
    at_most: float | None
    outcome: str
    note: str

    @property
    def numbers(self) -> str:
        """The quantity with its interval and bounds as text."""
        bounds = [f"{word} {value:g}" for word, value in (("above", self.at_least), ("below", self.at_most)) if value is not None]
        value = "" if self.mean is None else f" {self.mean:+.3f}" + ("" if self.interval is None else f" ± {self.interval:.3f}")
        claimed = f" (claimed: {' and '.join(bounds)})" if bounds and value else ""
        return f"{self.quantity}{value}{claimed}" + (f"; {self.note}" if self.note else "")


class Verdict(NamedTuple):
    """A claim under one recipe: the verdict, the outcome of each group of cases, and the checks that lead to them."""

    number: int
    claim: str
    recipe: str
    verdict: str
    groups: dict[str, str]
    checks: list[Check]


def make_check(
    case: dict[str, Any],
    quantity: str,
    values: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    unfinished: str = "",
    note: str = "",
) -> Check | None:
    """Return a check: it holds if the whole interval is within the bounds, and fails if none of it is; otherwise it is undecided.

    One value has no interval and decides nothing. If runs did not finish, which `unfinished` says, the check fails; without values a note
    says why nothing is decided. None: no values and nothing to say.
    """
    if not values and not unfinished and not note:
        return None
    found = paired_difference(values, [0.0] * len(values))
    bounds = (at_least, at_most)
    outcome = FAILS if unfinished else decide(found["difference"], found["interval"], *bounds)
    notes = "; ".join(filter(None, (unfinished, note)))
    return Check(case, quantity, found["difference"], found["interval"], found["error"], len(values), *bounds, outcome, notes)


def make_range_check(case: dict[str, Any], quantity: str, certain: float, possible: float, *, at_least: float, note: str) -> Check:
    """Return a check of a quantity that is between a certain and a possible value, because intervals decided what it includes."""
    outcome = HOLDS if certain >= at_least else FAILS if possible < at_least else UNDECIDED
    return Check(case, quantity, certain, None, None, 0, at_least, None, outcome, f"at most {possible:.2f}; {note}")


def decide(mean: float | None, interval: float | None, at_least: float | None, at_most: float | None) -> str:
    """Return the outcome for a mean and the half-width of its interval."""
    if mean is None or interval is None:
        return UNDECIDED
    low, high = mean - interval, mean + interval
    if (at_least is not None and high <= at_least) or (at_most is not None and low >= at_most):
        return FAILS
    inside = (at_least is None or low > at_least) and (at_most is None or high < at_most)
    return HOLDS if inside else UNDECIDED


def combine(outcomes: Sequence[str]) -> str:
    """Return the outcome of several checks that must all hold."""
    if FAILS in outcomes:
        return FAILS
    return HOLDS if all(outcome == HOLDS for outcome in outcomes) else UNDECIDED


def make_verdict(number: int, claim: str, recipe: str, checks: list[Check], group_keys: Sequence[str]) -> Verdict:
    """Return the verdict on all checks, with the outcome of each group of cases."""
    if not checks:
        return Verdict(number, claim, recipe, NOT_EVALUATED, {}, checks)
    by_group: dict[str, list[str]] = {}
    for check in checks:
        name = " ".join(str(check.case[key]) for key in group_keys if key in check.case)
        by_group.setdefault(name, []).append(check.outcome)
    groups = {name: combine(outcomes) for name, outcomes in by_group.items()}
    return Verdict(number, claim, recipe, combine(list(groups.values())), groups, checks)


def to_document(verdicts: Sequence[Verdict], **about: Any) -> dict[str, Any]:
    """Return the content of claims.json: facts about the runs, and every verdict with its checks."""
    claims = [{**verdict._asdict(), "checks": [check._asdict() for check in verdict.checks]} for verdict in verdicts]
    return {**about, "claims": claims}


def read_verdicts(document: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdicts of a document."""
    return [Verdict(**{**claim, "checks": [Check(**check) for check in claim["checks"]]}) for claim in document["claims"]]


def verdict_table(document: Mapping[str, Any]) -> str:
    """Return the verdicts as a Markdown table, one line per claim and one column per recipe, and the data below it."""
    if not document["claims"]:
        return "Not computed for this version yet: `fedsieve reproduce all --scale short` computes it."
    verdicts = read_verdicts(document)
    recipes = list(dict.fromkeys(verdict.recipe for verdict in verdicts))
    lines = ["| claim | " + " | ".join(f"recipe {recipe}" for recipe in recipes) + " |", "|" + "---|" * (1 + len(recipes))]
    for number, claim in dict.fromkeys((verdict.number, verdict.claim) for verdict in verdicts):
        found = {verdict.recipe: format_verdict(verdict) for verdict in verdicts if verdict.number == number}
        lines.append("| " + " | ".join([f"{number}. {claim}", *(found.get(recipe, NOT_EVALUATED) for recipe in recipes)]) + " |")
    return "\n".join([*lines, "", fill(describe_document(document), 120)])


def describe_document(document: Mapping[str, Any]) -> str:
    """Return scale, seeds and data of a document in one paragraph."""
    seeds = ", ".join(map(str, document["seeds"]))
    return f"Scale {document['scale']}, seeds {seeds} (some studies use fewer: see the checks). Data: {document['data']}."


def format_verdict(verdict: Verdict) -> str:
    """Return a verdict as Markdown; in brackets the groups by outcome if they differ, and the number of checks by outcome."""
    details = "; ".join([*list_groups(verdict), count_checks(verdict)])
    return f"**{verdict.verdict}** ({details})"


def list_groups(verdict: Verdict) -> list[str]:
    """Return the groups of cases by outcome, or nothing if all have the same."""
    by_outcome = {outcome: [name for name in verdict.groups if verdict.groups[name] == outcome] for outcome in (HOLDS, FAILS, UNDECIDED)}
    listed = [f"{outcome}: {', '.join(names)}" for outcome, names in by_outcome.items() if names]
    return listed if len(listed) > 1 else []


def count_checks(verdict: Verdict) -> str:
    """Return how many checks hold, fail and are undecided."""
    words = {HOLDS: "hold", FAILS: "do not", UNDECIDED: "undecided"}
    counts = {outcome: sum(check.outcome == outcome for check in verdict.checks) for outcome in words}
    return ", ".join(f"{counts[outcome]} {word}" for outcome, word in words.items() if counts[outcome])


def verdict_details(document: Mapping[str, Any]) -> str:
    """Return every verdict with all of its checks as Markdown."""
    parts = []
    for verdict in read_verdicts(document):
        cases = [f"- {check.outcome}: {format_case(check.case)}: {check.numbers}" for check in verdict.checks]
        parts += [f"## {verdict.number}. {verdict.claim}, recipe {verdict.recipe}", "", format_verdict(verdict), "", *cases, ""]
    return "\n".join(parts)


def format_case(case: Mapping[str, Any]) -> str:
    """Return a case as text."""
    return ", ".join(str(value) if key in ("task", "algorithm", "what") else f"{key} {value}" for key, value in case.items())
