"""Which of the lines that tell of causes tells of the first one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotloop.explain.causes import Strength, causes
from hotloop.explain.lines import Line
from hotloop.explain.memory import refined
from hotloop.explain.scan import EXCEPTION, Match, Scan

_POINTS: dict[Strength, float] = {"sure": 3.0, "likely": 2.0, "vague": 1.0}
_WARNED, _QUIET, _HANDLED, _RECOVERED, _UNKNOWN = 1.6, 0.5, 2.5, 0.8, 1.2
"""What is taken off for a warning, a cause that ends nothing, words of its being dealt with, training that went on; and
what an exception that is not known counts. Chosen on the logs of tests/logs/{gpu,provoked,composed}.
"""
_GOES_ON = 8
"""So many lines of progress after a line: it may have been dealt with, or they were buffered when it was written."""
_LESS = 0.01
_CONFIDENCE = {3.0: 0.95, 2.0: 0.75, 1.0: 0.45}
_BAD = re.compile(
    r"Traceback \(most|^(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception)\b|core dumped|Segmentation|\berror:|Error 1\b"
    r"|\b(?:[Ff]ailed(?! to improve)|FAILED|[Ff]atal|Killed|Aborted|Terminated|CANCELLED|ERROR)\b|Out Of Memory"
    r"|[Bb]ack-?off|exitcode *: *-?[1-9]|Interrupt|panic"
)
_CODE = re.compile(r"(?:finished|ended|failed) with [1-9]|exit(?:ed)?(?: with)?(?: exit)? (?:code|status):? [1-9]")
_GOOD = re.compile(
    r"\b(?:train(?:ing|er)?|run|jobs?|experiment|fine-?tun\w+|script|all|evaluation|fit|stage|pipeline)\b.{0,40}"
    r"\b(?:finished|completed?|done|succeeded|successful(?:ly)?|ended)\b|\b(?:done|finished|completed?|succeeded)\b"
    r"|sav(?:e|ed|ing) (?:the )?(?:final|best|model|last)|model saved|best (?:val|acc|score)|max_epochs=\d+. reached"
    r"|\bexit(?:ed)?(?: with)? (?:code|status)? ?0\b",
    re.IGNORECASE,
)
_PASSED = re.compile(r"=+ .*\d+ passed(?!.*\b\d+ failed).* in ")
_NONE = re.compile(
    r"\b(?:errors?|failures?|failed|fatal|killed)\W{1,3}0\b|\b0 (?:errors?|failures?|failed|fatal|killed)\b",
    re.IGNORECASE,
)
"""Counts of failures that there were not."""
_RESULT = re.compile(r"(?:complete|finish|done)\w*\b.*\b(?:best|weights|saved)\b", re.IGNORECASE)
_EPILOGUE = re.compile(r"^wandb: |exited with code 0\b")
"""Said at each end, good or bad."""
_ONWARD = 3
_LAST_LINES = 40
_RESTART = re.compile(
    r"\b[Rr]estart(?:ing|ed)\b|\bwill restart\b|\b[Aa]ttempt [2-9]\b|\b[Ss]tart(?:ing|ed)? again\b|\b[Rr]equeued?\b"
)
_TOLD_AFTERWARDS = {"scheduler", "limits", "hardware"}
"""Areas of causes that a kernel's log or a scheduler's report adds at the end: why a process was killed."""


@dataclass(frozen=True)
class Found:
    """A cause with what speaks for it.

    Attributes:
        confidence: 0 to 1.
        evidence: lines of the log.
        context: what stands before the line that decided.
    """

    id: str
    confidence: float
    evidence: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    context: tuple[Line, ...] = ()


def decide(scan: Scan) -> list[Found]:
    """The causes that the log tells of, the first one first; none for a run that ended well."""
    well = ended_well(scan)
    silent = not any(map(_is_bad, scan.tail[-_LAST_LINES:]))
    scored = [(points(match, well=well, silent=silent), match) for match in scan.matches]
    best: dict[str, tuple[float, Match]] = {}
    for score, match in scored:
        known = best.get(match.cause)
        if score > 0 and (
            known is None
            or score > known[0]
            or (score == known[0] and match.line == known[1].line and match.specific > known[1].specific)
        ):
            best[match.cause] = score, match
    unknown = _unknown(scan, well=well)
    if unknown:
        best["unknown"] = unknown
    order = sorted(_first_ones(best, scored), key=lambda pair: (-pair[0], pair[1].line.place, -pair[1].specific))
    found = [_told(score, match, scan) for score, match in order]
    if found and found[0].id == "unknown":
        return found[:1]
    return [one for one in found if one.id != "unknown"]


def _first_ones(
    best: Mapping[str, tuple[float, Match]], scored: Sequence[tuple[float, Match]]
) -> list[tuple[float, Match]]:
    """The same, where what comes of an earlier cause counts a little less than that, however sure it is.

    Of a likely cause, or of an exception that ended a rank: the others then wait for it, and are killed.
    """
    begins: dict[str, tuple[int, int]] = {}
    for score, match in scored:
        if score > 0:
            begins[match.cause] = min(begins.get(match.cause, match.line.place), match.line.place)
    found = []
    for id_, (score, match) in best.items():
        before = [
            earlier_score
            for earlier_score, earlier in best.values()
            if (_UNKNOWN if earlier.cause == "unknown" else _POINTS["likely"]) <= earlier_score < score
            and earlier.line.place < begins.get(id_, match.line.place)
            and _comes_of(match, earlier)
        ]
        found.append((min([score, *(one - _LESS for one in before)]), match))
    return found


def _comes_of(match: Match, earlier: Match) -> bool:
    """Whether a cause is known to come of an earlier one that ended the run, or was met after the restart."""
    known = causes()
    if match.cause in known[earlier.cause].leads_to:
        return True
    between = [line for line in (*earlier.after, *match.before) if earlier.line.place < line.place < match.line.place]
    restarted = any(_RESTART.search(line.text) for line in between)
    told_afterwards = known[match.cause].area in _TOLD_AFTERWARDS
    return restarted and bool(known[earlier.cause].leads_to) and not told_afterwards


def points(match: Match, *, well: bool, silent: bool) -> float:
    """How much a line speaks for its cause being the first.

    Args:
        well: the run ended well.
        silent: nothing near the log's end speaks of a failure: it ended well, or goes on.
    """
    cause, onward = causes()[match.cause], went_on(match)
    score = _POINTS[match.strength]
    if cause.quiet and not EXCEPTION.match(match.line.text):
        return score - _QUIET - (_HANDLED if match.line.handled else 0.0)
    if well or (silent and (onward or match.strength == "vague")):
        return 0.0
    if match.line.warns:
        if silent and any(line.progress for line in match.after):
            return 0.0
        score -= _WARNED
    if onward:
        score -= _RECOVERED
    return score


def went_on(match: Match) -> bool:
    """Whether training went on behind a line."""
    return sum(line.progress for line in match.after) >= _GOES_ON


def ended_well(scan: Scan) -> bool:
    """Whether a log's last lines tell of a run that did what it should: nothing bad, or much that went on after it."""
    last = scan.tail[-_LAST_LINES:]
    sure = {match.line.place for match in scan.matches if match.strength == "sure" and not match.line.warns}
    sure -= {match.line.place for match in scan.matches if causes()[match.cause].quiet}
    bad = max((place for place, line in enumerate(last) if _is_bad(line) or line.place in sure), default=-1)
    after = [line for line in last[bad + 1 :] if not _EPILOGUE.search(line.text)]
    good = [place for place, line in enumerate(after) if _GOOD.search(line.text)]
    if any(_PASSED.search(line.text) for line in after):
        return True
    if bad < 0:
        return bool(good)
    onward = sum(line.progress + bool(_GOOD.search(line.text)) + bool(_RESULT.search(line.text)) for line in after)
    return bool(good) and onward >= _ONWARD


def _is_bad(line: Line) -> bool:
    if _CODE.search(line.text):
        return True
    harmless = line.warns or _GOOD.search(line.text) or _NONE.search(line.text)
    return bool(_BAD.search(line.text)) and not harmless


def _unknown(scan: Scan, *, well: bool) -> tuple[float, Match] | None:
    """The first exception that the run did not survive, where nothing is known of it."""
    if well:
        return None
    ended = [match for match in scan.exceptions if not went_on(match)]
    told = {match.line.place for match in scan.matches}
    if ended:
        first = next((match for match in ended if match.line.place not in told), None)
        return (_UNKNOWN, first) if first else None
    bad = [line for line in scan.tail[-_LAST_LINES:] if _is_bad(line)]
    return (0.5, Match("unknown", "vague", 0, bad[0], (), ())) if bad else None


def _told(score: float, match: Match, scan: Scan) -> Found:
    same = [other.line for other in scan.matches if other.cause == match.cause and other.strength == match.strength]
    lines = {line.place: line for line in (*same[:3], match.line)}
    confidence = min(_CONFIDENCE[_POINTS[match.strength]], max(0.2, 0.95 * score / 3))
    found = Found(match.cause, round(confidence, 2), tuple(lines[place] for place in sorted(lines)), (), match.before)
    return refined(found, match)
